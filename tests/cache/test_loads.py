"""Loads from the host: hazards seen in the released code of KVFlow, by their names, and what is prefetched."""

import math

from kedge.policies.eviction import lru
from tests.cache.helpers import NS, World


def test_labels_are_forgotten_with_their_agents() -> None:
    world = World(4)
    for run in range(50):
        world.forecast(**{f"run-{run}": 1.0})
        world.serve("AA", f"run-{run}", 2)
        world.forecast(**{f"run-{run}": None})
    assert not world.tree.labels.nodes and not world.cache._owners.next_runs
    node = world.tree.end(NS, b"AA")
    assert (node.step, node.labels, node.steps) == (None, {}, None)


def test_a_demand_load_is_not_cancelled_by_a_step_update() -> None:
    world = World(6, host_blocks=12, copy_jobs=1, on_host={"a": "AAA", "b": "BBB"})
    world.forecast(a=1, b=1)
    world.cache.pump()
    assert len(world.copier.submitted) == 1, "the other one is queued"
    text = "BBB" if world.tree.labels.nodes["a"].transfer.copy in world.copier.submitted else "AAA"
    assert world.demand(text) == "loading"
    world.forecast(a=40, b=40)
    world.settle()
    assert world.on_device("AAA", "BBB") == ["AAA", "BBB"]
    assert world.outcomes("prefetch").get("cancelled") is None


def test_a_prefetch_for_step_2_never_evicts_step_1() -> None:
    world = World(3, host_blocks=8, prefetch_window=3, on_host={"one": "AAA", "two": "BBB"})
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


def test_what_a_request_waits_for_goes_last() -> None:
    world = World(6, host_blocks=8, on_host={"a": "AAA"})
    world.demand("AAA", "r")
    world.settle()
    world.forecast(b=0)
    world.serve("BBB", "b", 3)
    world.settle()
    world.evict(3)
    assert world.on_device("AAA", "BBB") == ["AAA"], "though its agent is 50 steps away"
    world.cache.withdraw("r")
    world.serve("BBB", "b", 3)
    world.evict(3)
    assert world.on_device("AAA", "BBB") == ["BBB"]


def test_a_demand_never_evicts_what_somebody_else_waits_for() -> None:
    world = World(4, host_blocks=8, on_host={"a": "AAA", "b": "BBB"})
    world.demand("AAA", "r")
    world.settle()
    assert world.demand("BBB", "s") == "loadable"
    assert world.on_device("AAA") == ["AAA"]
    world.cache.withdraw("r")
    assert world.demand("BBB", "s") == "loading"


def test_what_was_just_prefetched_is_not_the_least_recently_used() -> None:
    world = World(5, host_blocks=8, policy=lru, backup_hits=None, on_host={"a": "AAA"})
    world.serve("xy")
    world.forecast(a=0)
    world.settle()
    world.evict(1)
    assert world.on_device("AAA") == ["AAA"]


def test_a_denied_load_comes_before_all_prefetches_once_there_is_room() -> None:
    world = World(6, host_blocks=12, on_host={"a": "AAA", "b": "BBB"})
    running = world.admit("123456")
    assert world.demand("BBB") == "loadable"
    world.forecast(a=0)
    world.cache.pump()
    assert not world.copier.submitted
    world.cache.abort(running.request_id)
    world.cache.pump()
    assert world.copier.submitted and world.demand("BBB") == "loading"
    world.settle()
    assert "BBB" in world.on_device("BBB")


def test_a_prefix_larger_than_the_room_is_loaded_in_part() -> None:
    world = World(6, host_blocks=8, on_host={"a": "AAAA"})
    world.admit("xyz")
    assert world.demand("AAAA", "r") == "loadable"
    world.cache.withdraw("r")
    assert world.demand("AAA", "r") == "loading"
    world.settle()
    assert world.admit("AAA", request="r").exact_tokens == 3


def test_a_load_waits_for_its_ancestors_and_is_cancelled_or_thrown_away_where_theirs_failed() -> None:
    for jobs, ok in ((1, False), (2, False), (2, True)):
        world = World(8, host_blocks=12, copy_jobs=jobs, on_host={"a": "AAA", "ab": "AAABB"})
        world.forecast(a=0)
        world.cache.pump()
        world.forecast(ab=1)
        world.cache.pump()
        upper, lower = world.tree.labels.nodes["a"].transfer, world.tree.labels.nodes["ab"].transfer
        assert upper.nodes != lower.nodes and (lower.copy in world.copier.submitted) == (jobs == 2)
        if jobs == 2:
            world.copier.end(1)
            world.cache.pump()
            world.check()
            assert world.tokens("AAABB") == (0, 5), "it waits for its ancestors"
        world.copier.end(0, ok=ok)
        world.cache.pump()
        world.check()
        assert world.tokens("AAABB") == ((5, 0) if ok else (0, 5))
        if ok:
            continue
        assert world.outcomes("prefetch") == {"failed": 1, "cancelled" if jobs == 1 else "wasted": 1}
        assert world.demand("AAABB") == "loading"
        world.settle()
        assert world.on_device("AAABB") == ["AAABB"]


def test_a_failed_load_is_recomputed() -> None:
    world = World(4, host_blocks=8, on_host={"a": "AAA"})
    assert world.demand("AAA", "r") == "loading"
    world.settle(ok=False)
    assert world.demand("AAA", "r") == "ready"
    assert world.admit("AAA", request="r").exact_tokens == 0


def test_a_prefetch_that_failed_is_tried_again_when_its_step_changes() -> None:
    world = World(6, host_blocks=8, on_host={"a": "AAA"})
    world.forecast(a=1)
    for _ in range(3):
        world.settle(ok=False)
    assert world.outcomes("prefetch") == {"failed": 1} and not world.cache.transferring
    world.forecast(a=0)
    world.settle()
    assert world.on_device("AAA") == ["AAA"]


# prefetches -----------------------------------------------------------------------------------------------------------


def test_all_branches_are_loaded_and_nobody_outside_the_window() -> None:
    world = World(9, host_blocks=12, prefetch_window=1, on_host={"a": "AA", "b": "BB", "c": "CC", "d": "DD"})
    world.forecast(a=1, b=1, c=2, d=math.inf)
    world.settle()
    assert world.on_device("AA", "BB", "CC", "DD") == ["AA", "BB"]
    assert world.cache.stats().transfers["prefetch"]["completed"] == 0, "not yet hit"
    assert world.serve("AA") == 2
    assert world.outcomes("prefetch") == {"completed": 1}
    assert world.cache.stats().prefetched_hit_tokens == 2


def test_no_more_than_the_jobs_that_are_allowed_and_likely_ones_first() -> None:
    world = World(9, host_blocks=12, on_host={"a": "AA", "b": "BB"})
    world.cache.prefetcher.jobs = 1
    world.cache.on_forecast({"a": (1.0, 0.2), "b": (1.0, 0.8)})
    world.cache.pump()
    world.cache.pump()
    assert len(world.copier.submitted) == 1
    world.copier.end_all()
    world.cache.pump()
    assert world.on_device("AA", "BB") == ["BB"] and len(world.copier.submitted) == 1


def test_what_leaves_the_window_before_it_starts_is_cancelled() -> None:
    world = World(9, host_blocks=12, copy_jobs=1, on_host={"a": "AA", "b": "BB"})
    world.forecast(a=0, b=1)
    world.cache.pump()
    world.forecast(a=9, b=9)
    assert world.outcomes("prefetch") == {"cancelled": 1}
    world.settle()
    assert world.on_device("AA", "BB") == ["AA"], "what had started ends"


def test_a_demanded_prefetch_is_promoted_and_counted_late() -> None:
    world = World(9, host_blocks=12, copy_jobs=1, on_host={"a": "AA", "b": "BB", "c": "CC"})
    world.forecast(a=0, b=1, c=2)
    world.cache.pump()
    assert world.demand("CC") == "loading"
    loads = [copy for copy in world.copier.history if copy.direction == "load"]
    world.settle()
    assert len([copy for copy in world.copier.history if copy.direction == "load"]) == 3, "none is queued twice"
    assert world.outcomes("prefetch") == {"late": 1}
    assert len(loads) == 2, "the other prefetch under way does not hold it up"
    lease = world.admit("CC", request=world.new_request())
    assert lease.spans[0].source == "host"


def test_the_ancestors_come_in_the_same_load() -> None:
    world = World(9, host_blocks=12, on_host={"a": "AA", "ab": "AABB"})
    world.forecast(ab=1)
    world.cache.pump()
    assert [len(copy.sources) for copy in world.copier.submitted] == [4] and not world.cache.stats().leased_blocks
    world.settle()
    assert world.on_device("AABB") == ["AABB"]


def test_an_evicted_fixed_prompt_comes_back_while_its_agent_is_near() -> None:
    world = World(6, host_blocks=12, on_host={"a": "AA"})
    world.forecast(a=1)
    world.settle()
    world.serve("123456")
    assert not world.on_device("AA")
    world.settle()
    assert world.on_device("AA") == ["AA"], "it replaced traffic without a label"


def test_a_label_alone_makes_a_prompt_on_the_host_come() -> None:
    """So a new run of a known agent can be expected before its first request."""
    world = World(6, host_blocks=12, on_host={"old": "AA"})
    world.forecast(new=1)
    world.cache.pump()
    world.cache.on_label(NS, "new", b"AA")
    world.settle()
    assert world.on_device("AA") == ["AA"]
