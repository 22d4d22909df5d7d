"""Priorities against a naive recomputation (which is what `check_integrity` does), and what follows a fixed prompt."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.cache.node import DEVICE
from kedge.cache.radix_tree import RadixTree
from kedge.errors import PlanError
from tests.cache.helpers import NS, World

TEXTS = st.text("ab", min_size=1, max_size=6)
STEPS = st.sampled_from([0.0, 1.0, 2.0, 7.0, math.inf])


def ending(tree: RadixTree, text: str):
    return tree.end(NS, text.encode())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("PQR"), TEXTS, STEPS | st.none(), st.booleans()), max_size=25))
def test_every_node_has_the_least_step_of_the_labels_below(changes: list) -> None:
    tree = RadixTree(1)
    fresh = iter(range(10_000))
    labels: dict[str, tuple[bytes, float]] = {}
    for key, text, step, whole in changes:
        known = tree.walk(NS, text.encode(), DEVICE).device_blocks()
        blocks = known + [next(fresh) for _ in range(len(text) - len(known))]
        tree.insert(NS, text.encode(), blocks)
        tree.labels.owners.on_forecast({key: None if step is None else (step, 1.0)})
        if step is None:
            labels.pop(key, None)
        elif whole or key not in labels:
            tree.labels.put(key, ending(tree, text))
            labels[key] = text.encode(), step
        else:
            labels[key] = labels[key][0], step
        tree.check_integrity([])
        for node in tree.nodes():
            prefix = bytes(node.prefix()[::4])
            least = min((s for end, s in labels.values() if end.startswith(prefix)), default=None)
            assert node.step == least, (prefix, labels)


def test_a_label_stands_at_the_block_that_ends_the_fixed_prompt() -> None:
    world = World(8, block_size=2)
    world.forecast(a=1)
    lease = world.admit("AAAAAxx")
    world.cache.commit_prefix(lease.request_id, b"AAAAAx")
    assert world.cache.on_label(NS, "a", b"AAAAA") == 4
    assert [(node.size, node.step, node.varying) for node in world.tree.nodes()] == [(2, 1.0, False), (1, None, True)]
    world.check()


def test_a_label_costs_by_depth_not_by_neighbours() -> None:
    tree = RadixTree(1)
    tree.insert(NS, b"A", [0])
    calls, owners = [], tree.labels.owners
    owners.on_forecast({i: (float(i), 1.0) for i in range(1000)})
    for i in range(1000):
        tree.insert(NS, (65, 1000 + i), [0, i + 1])
        tree.labels.put(i, tree.end(NS, (65, 1000 + i)))
    tree.labels._offer = calls.append
    owners.on_forecast({500: (2000.0, 1.0)})
    assert len(calls) == 1
    owners.on_forecast({0: (3000.0, 1.0)})
    assert len(calls) == 3 and ending(tree, "A").step == 1.0


def test_a_wrong_priority_is_found() -> None:
    world = World(4)
    world.forecast(a=3)
    world.serve("AA", "a", 2)
    node = world.tree.labels.nodes["a"]
    node.step = 2.0
    with pytest.raises(PlanError, match=r"priority=2\.0"):
        world.tree.labels.check_integrity([node])
    node.step = 3.0
    world.tree.labels.nodes.clear()
    with pytest.raises(PlanError, match="are not where they are said to be"):
        world.tree.labels.check_integrity([node])


# histories that grow turn by turn -------------------------------------------------------------------------------------


def sizes(world: World) -> list[int]:
    return [node.size for node in world.tree.nodes()]


def test_a_history_that_grows_is_one_node() -> None:
    world = World(40)
    world.forecast(s=3)
    for turn in range(1, 8):
        world.serve("x" * 3 * turn, "s", 3 * turn)
        assert sizes(world) == [3 * turn]
        world.check()


def test_what_others_share_labels_and_locks_stays_apart() -> None:
    world = World(60)
    world.forecast(s=3, t=2, fixed=1)
    world.serve("AAAA", "fixed", 2)
    world.serve("AAAA", "s", 4)
    world.serve("AAAAss", "s", 6)
    assert sorted(sizes(world)) == [2, 4], "the fixed prompt ends at a label"
    lease = world.admit("AAAAssx")
    world.serve("AAAAssss", "s", 8)
    assert 2 in sizes(world), "what a request holds ends where it does"
    world.check()
    world.cache.abort(lease.request_id)
    world.serve("AAAAtt", "t", 6)
    world.serve("AAAAsssss", "s", 9)
    assert sorted(sizes(world)) == [2, 2, 2, 5]
    world.check()


def test_a_label_moves_up_as_the_end_of_its_history_goes() -> None:
    world = World(10)
    world.forecast(old=9, new=1)
    world.serve("oo", "old", 2)
    world.serve("oooo", "old", 4)
    lease = world.admit("oo")
    world.serve("nnnnnnnn", "new", 8)
    world.check()
    assert [(bytes(node.prefix()[::4]), node.step) for node in world.tree.nodes() if node.step == 9] == [(b"oo", 9)]
    world.cache.abort(lease.request_id)
    world.serve("mmmmmmmmmm", "new", 10)
    assert "old" not in world.tree.labels.nodes
    world.check()


def test_the_rest_of_a_shortened_history_is_not_worth_less_than_before() -> None:
    """Its leaf and its label were in one node that its trunk did not share: the trunk competed without a step."""
    world = World(12)
    world.forecast(far=9, near=1, other=5)
    world.serve("TTTT", "other", 4)
    world.serve("TTTTnn", "near", 6)
    world.serve("ffff", "far", 4)
    world.serve("zzzzzz", "other", 6)
    assert [len(world.cache.match(NS, text)) for text in (b"TTTTnn", b"ffff")] == [6, 0]
    world.check()
