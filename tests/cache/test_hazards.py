"""Each hazard seen in the released code of KVFlow (KVFLOW.md, section 8), by its name."""

from __future__ import annotations

import math

import pytest

from kedge.cache import belady, lru
from kedge.cache.node import Handle
from kedge.types import RequestId, Source, Span
from tests.cache.helpers import NS, World


def on_host_only(world: World, **fixed: str) -> None:
    """Every agent's fixed prompt is on the host and nothing is on the device; everybody is far away."""
    world.forecast(**dict.fromkeys(fixed, 50.0))
    for agent, text in fixed.items():
        world.serve(text, agent, len(text))
        world.settle()
    world.evict(world.cache.stats().cached_blocks)
    assert not world.on_device(*fixed.values()) and world.cached(*fixed.values()) == list(fixed.values())


def test_agents_that_share_a_prefix_keep_both_labels() -> None:
    world = World(8)
    world.forecast(near=1, far=9)
    world.serve("AAA", "far", 3)
    world.serve("AAA", "near", 3)
    world.serve("BBB")
    world.forecast(near=None)
    assert world.tree.labels.node("far").step == 9
    world.forecast(near=1)
    world.serve("AAA", "near", 3)
    world.forecast(far=None)
    assert world.tree.labels.node("near").step == 1


def test_a_varying_suffix_goes_before_another_agents_fixed_prompt() -> None:
    world = World(8)
    world.forecast(near=1, far=9)
    world.serve("FFF", "far", 3)
    world.serve("NNNxy", "near", 3)
    world.evict(2)
    assert world.on_device("FFF", "NNN", "NNNx") == ["FFF", "NNN"]


def test_without_hints_the_agent_just_touched_is_not_evicted_first() -> None:
    world = World(6)
    world.serve("AAA")
    world.serve("BBB")
    world.serve("AAA")
    world.evict(3)
    assert world.on_device("AAA", "BBB") == ["AAA"]


def test_steps_are_not_lumped_into_levels() -> None:
    world = World(5)
    steps = {"a": 4.0, "b": 9.0, "c": 3.0, "d": 8.0, "e": 5.0}
    world.forecast(**steps)
    for agent in steps:
        world.serve(agent, agent, 1)
    gone = []
    for _ in steps:
        before = world.on_device(*steps)
        world.evict(1)
        gone += set(before) - set(world.on_device(*steps))
    assert [steps[agent] for agent in gone] == [9, 8, 5, 4, 3]


def test_what_was_freed_counts_so_nothing_is_freed_twice() -> None:
    world = World(8)
    world.serve("ABCDEFGH")
    lease = world.admit("12345")
    assert world.cache.stats().evictions == 5
    world.cache.abort(lease.request_id)
    world.admit("6789ab")
    assert world.cache.stats().evictions == 6


def test_labels_are_forgotten_with_their_agents() -> None:
    world = World(4)
    for run in range(50):
        world.forecast(**{f"run-{run}": 1.0})
        world.serve("AA", f"run-{run}", 2)
        world.forecast(**{f"run-{run}": None})
    assert len(world.tree.labels) == 0 and not world.cache._next_runs
    node = world.tree.end(NS, b"AA")
    assert (node.step, node.labels, node.steps) == (None, {}, None)


def test_a_handle_that_outlives_its_node_leads_nowhere() -> None:
    world = World(4)
    world.serve("AAAA")
    handle = Handle.of(world.tree.end(NS, b"AAAA"))
    world.evict(4)
    world.serve("AAAA")
    world.serve("BB")
    assert handle.node is None
    world.forecast(a=0)
    assert world.cache.on_label(NS, "a", b"AAAA") == 2, "what is left of it, by tokens and never by an old handle"


def test_a_demand_load_is_not_cancelled_by_a_step_update() -> None:
    world = World(6, host_blocks=12, copy_jobs=1)
    on_host_only(world, a="AAA", b="BBB")
    world.forecast(a=1, b=1)
    world.cache.pump()
    assert len(world.copier.submitted) == 1, "the other one is queued"
    text = "BBB" if world.tree.labels.node("a").transfer.started else "AAA"
    assert world.demand(text) == "loading"
    world.forecast(a=40, b=40)
    world.settle()
    assert world.on_device("AAA", "BBB") == ["AAA", "BBB"]
    assert world.outcomes("prefetch").get("cancelled") is None


@pytest.mark.parametrize("policy", [lru, belady(lambda _: math.inf), None])
def test_prefetch_needs_no_other_feature(policy) -> None:
    world = World(4, host_blocks=8, policy=policy, backup_hits=None)
    on_host_only(world, a="AAA")
    world.forecast(a=1)
    world.settle()
    assert world.on_device("AAA") == ["AAA"]


def test_a_prefetch_for_step_2_never_evicts_step_1() -> None:
    world = World(3, host_blocks=8, prefetch_window=3)
    on_host_only(world, one="AAA", two="BBB")
    world.forecast(one=1)
    world.settle()
    world.forecast(two=2)
    world.settle()
    assert world.on_device("AAA", "BBB") == ["AAA"]
    world.forecast(two=1)
    world.settle()
    assert world.on_device("AAA", "BBB") == ["AAA"], "as near is not strictly farther"
    world.forecast(two=0)
    world.settle()
    assert world.on_device("AAA", "BBB") == ["BBB"]


def test_a_request_reuses_what_its_own_load_brought() -> None:
    world = World(4, host_blocks=8)
    on_host_only(world, a="AAA")
    assert world.demand("AAA", "r") == "loading"
    world.settle()
    other = world.admit("x")
    world.cache.abort(other.request_id)
    lease = world.admit("AAA", request=RequestId("r"))
    assert lease.spans == (Span(0, 3, Source.HOST),)
    stats = world.cache.stats()
    assert (stats.host_hit_tokens, stats.hit_tokens) == (3, 3)


def test_what_a_request_waits_for_goes_last() -> None:
    world = World(6, host_blocks=8)
    on_host_only(world, a="AAA")
    world.demand("AAA", "r")
    world.settle()
    world.forecast(b=0)
    world.serve("BBB", "b", 3)
    world.settle()
    world.evict(3)
    assert world.on_device("AAA", "BBB") == ["AAA"], "though its agent is 50 steps away"
    world.cache.withdraw(RequestId("r"))
    world.serve("BBB", "b", 3)
    world.evict(3)
    assert world.on_device("AAA", "BBB") == ["BBB"]


def test_a_demand_never_evicts_what_somebody_else_waits_for() -> None:
    world = World(4, host_blocks=8)
    on_host_only(world, a="AAA", b="BBB")
    world.demand("AAA", "r")
    world.settle()
    assert world.demand("BBB", "s") == "loadable"
    assert world.on_device("AAA") == ["AAA"]
    world.cache.withdraw(RequestId("r"))
    assert world.demand("BBB", "s") == "loading"


def test_who_has_been_admitted_waits_no_more() -> None:
    world = World(6, host_blocks=8)
    on_host_only(world, a="AAA")
    world.demand("AAA", "r")
    world.settle()
    lease = world.admit("AAA", request=RequestId("r"))
    world.cache.finish(lease.request_id, b"AAA")
    assert world.tree.end(NS, b"AAA").wanted == 0


def test_what_was_just_prefetched_is_not_the_least_recently_used() -> None:
    world = World(5, host_blocks=8, policy=lru, backup_hits=None)
    on_host_only(world, a="AAA")
    world.serve("xy")
    world.forecast(a=0)
    world.settle()
    world.evict(1)
    assert world.on_device("AAA") == ["AAA"]


def test_a_denied_load_comes_before_all_prefetches_once_there_is_room() -> None:
    world = World(6, host_blocks=12)
    on_host_only(world, a="AAA", b="BBB")
    running = world.admit("123456")
    assert world.demand("BBB") == "loadable"
    world.forecast(a=0)
    world.cache.pump()
    assert not world.copier.submitted
    world.cache.abort(running.request_id)
    world.cache.pump()
    assert world.demand("BBB") == "loading"
    world.settle()
    assert "BBB" in world.on_device("BBB")


def test_a_prefix_larger_than_the_room_is_loaded_in_part() -> None:
    world = World(6, host_blocks=8)
    on_host_only(world, a="AAAA")
    world.admit("xyz")
    assert world.demand("AAAA", "r") == "loadable"
    world.cache.withdraw(RequestId("r"))
    assert world.demand("AAA", "r") == "loading"
    world.settle()
    assert world.admit("AAA", request=RequestId("r")).exact_tokens == 3


def test_who_has_waited_long_enough_is_admitted_without_its_load() -> None:
    world = World(6, host_blocks=8)
    on_host_only(world, a="AAAA")
    running = world.admit("xyz")
    assert world.demand("AAAA", "r") == "loadable"
    world.cache.abort(running.request_id)
    assert world.admit("AAAA", request=RequestId("r")).exact_tokens == 0
    world.check()


def test_a_load_whose_ancestors_load_failed_is_cancelled_or_thrown_away() -> None:
    for jobs in (1, 2):
        world = World(8, host_blocks=12, copy_jobs=jobs)
        on_host_only(world, a="AAA", ab="AAABB")
        world.forecast(a=0)
        world.cache.pump()
        world.forecast(ab=1)
        world.cache.pump()
        upper, lower = world.tree.labels.node("a").transfer, world.tree.labels.node("ab").transfer
        assert upper.nodes != lower.nodes and lower.started == (jobs == 2)
        if lower.started:
            world.copier.end(1)
            world.cache.pump()
            world.check()
            assert world.tokens("AAABB") == (0, 5), "it waits for its ancestors"
        world.copier.end(0, ok=False)
        world.cache.pump()
        world.check()
        assert world.tokens("AAABB") == (0, 5)
        assert world.outcomes("prefetch") == {"failed": 1, "cancelled" if jobs == 1 else "wasted": 1}
        assert world.demand("AAABB") == "loading"
        world.settle()
        assert world.on_device("AAABB") == ["AAABB"]


def test_loads_that_end_in_the_wrong_order_land_in_the_right_one() -> None:
    world = World(8, host_blocks=12)
    on_host_only(world, a="AAA", ab="AAABB")
    world.forecast(a=0)
    world.cache.pump()
    world.forecast(ab=1)
    world.cache.pump()
    world.copier.end(1)
    world.cache.pump()
    world.check()
    assert world.tokens("AAABB") == (0, 5)
    world.copier.end(0)
    world.cache.pump()
    world.check()
    assert world.tokens("AAABB") == (5, 0)


def test_a_failed_copy_to_the_host_drops_the_copy_and_nothing_else() -> None:
    world = World(6, host_blocks=6)
    world.forecast(a=3)
    world.serve("AAA", "a", 3)
    world.settle(ok=False)
    stats = world.cache.stats()
    assert (stats.failed_copies, stats.host_free_blocks, world.tokens("AAA")) == (1, 6, (3, 0))
    world.serve("AAA", "a", 3)
    world.settle()
    assert world.cache.stats().host_cached_blocks == 3


def test_a_failed_load_is_recomputed() -> None:
    world = World(4, host_blocks=8)
    on_host_only(world, a="AAA")
    assert world.demand("AAA", "r") == "loading"
    world.settle(ok=False)
    assert world.demand("AAA", "r") == "ready"
    assert world.admit("AAA", request=RequestId("r")).exact_tokens == 0


def test_a_hint_that_never_comes_true_costs_nothing_but_its_load() -> None:
    world = World(6, host_blocks=12)
    on_host_only(world, a="AAA")
    world.forecast(a=1, ghost=0)
    world.settle()
    world.serve("123456")
    assert world.outcomes("prefetch") == {"wasted": 1}
    assert world.cache.on_label(NS, "nobody", b"123") == 0
