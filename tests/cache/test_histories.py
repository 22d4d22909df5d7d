"""Histories that grow turn by turn: one node each, worth what their session is, whatever part of them is left."""

from __future__ import annotations

import random

import pytest

from kedge.errors import OutOfBlocks
from tests.cache.helpers import NS, World


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
    assert world.tree.labels.node("old") is None
    world.check()


def test_the_rest_of_a_shortened_history_is_not_worth_less_than_before() -> None:
    """Its leaf and its label were in one node that its trunk did not share: the trunk competed without a step."""
    world = World(12)
    world.forecast(far=9, near=1, other=5)
    world.serve("TTTT", "other", 4)
    world.serve("TTTTnn", "near", 6)
    world.serve("ffff", "far", 4)
    world.serve("zzzzzz", "other", 6)
    assert [len(world.tree.match(NS, text)) for text in (b"TTTTnn", b"ffff")] == [6, 0]
    world.check()


@pytest.mark.parametrize("host_blocks", [0, 30])
@pytest.mark.parametrize("seed", range(6))
def test_histories_that_grow_fork_and_end_keep_the_books(seed: int, host_blocks: int) -> None:
    rng, world = random.Random(seed), World(24, host_blocks=host_blocks)
    texts = {name: "S" * rng.randrange(4) + name for name in "abcdef"}
    for _ in range(250):
        name = rng.choice("abcdef")
        world.forecast(**{name: rng.choice((0, 1, 5, 50, float("inf")))})
        if rng.random() < 0.1:
            texts[name] = texts[name][: rng.randrange(1, len(texts[name]) + 1)] + name.upper()
        texts[name] = (texts[name] + name * rng.randrange(4))[:20]
        try:
            world.serve(texts[name], name, len(texts[name]))
        except OutOfBlocks:
            assert world.copier.submitted, "only copies that have started hold blocks"
            world.settle()
            world.serve(texts[name], name, len(texts[name]))
        if rng.random() < 0.1:
            world.cache.on_forecast({rng.choice("abcdef"): None})
        if host_blocks and rng.random() < 0.7:
            world.copier.end_all(ok=rng.random() < 0.9)
            world.cache.pump()
        world.check()
