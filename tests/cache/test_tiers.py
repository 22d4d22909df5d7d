"""The state table of KVFLOW.md, section 5, row by row, and what the host tier keeps."""

import pytest

from kedge.cache import Copied
from kedge.cache.node import State
from kedge.errors import PlanError
from kedge.policies.eviction import lru
from kedge.types import Namespace, Source, Span
from tests.cache.helpers import NS, World


def state(world: World, text: str) -> State:
    node = world.tree.end(NS, text.encode())
    assert node is not None and bytes(node.prefix()[::4]) == text.encode()
    return node.state


def test_a_fixed_prompt_goes_through_all_states() -> None:
    world = World(4, host_blocks=4)
    world.forecast(a=9)
    world.serve("AAA", "a", 3)
    assert state(world, "AAA") is State.OFFLOADING
    assert world.on_device("AAA") == ["AAA"], "readable while it is copied"
    world.settle()
    assert state(world, "AAA") is State.BOTH
    world.evict(3)
    assert state(world, "AAA") is State.HOST
    world.demand("AAA")
    assert state(world, "AAA") is State.LOADING
    world.settle()
    assert state(world, "AAA") is State.BOTH
    world.cache.clear()
    assert world.tree.end(NS, b"AAA") is None


def test_a_recompute_of_a_part_adopts_that_part() -> None:
    world = World(8, host_blocks=4, on_host={"a": "AAAA"})
    world.serve("AA")
    assert (world.tokens("AAAA"), world.cache.stats().host_cached_blocks) == ((2, 2), 4)
    world.serve("AAAxy")
    assert (world.tokens("AAAA"), world.tokens("AAAxy")) == ((3, 1), (5, 0))


def test_a_part_of_a_backed_up_node_leaves_the_device() -> None:
    world = World(4, host_blocks=4)
    world.forecast(a=9)
    world.serve("AAAA", "a", 4)
    world.settle()
    world.evict(3)
    assert world.tokens("AAAA") == (1, 3)
    world.demand("AAAA")
    assert [len(copy.sources) for copy in world.copier.submitted] == [3]
    world.settle()
    assert world.on_device("AAAA") == ["AAAA"]
    assert world.admit("AAAA", request="waiting").spans == (Span(0, 1, Source.DEVICE), Span(1, 4, Source.HOST))


@pytest.mark.parametrize(("hits", "after_one", "after_two"), [(0, 4, 4), (1, 0, 4), (2, 0, 0), (None, 0, 0)])
def test_a_prompt_without_label_is_backed_up_once_it_has_been_hit(
    hits: int | None, after_one: int, after_two: int
) -> None:
    world = World(8, host_blocks=8, backup_hits=hits)
    copied = []
    for _ in range(2):
        world.serve("xxyy")
        world.settle()
        copied.append(sum(len(copy.sources) for copy in world.copier.history))
    assert copied == [after_one, after_two]


def test_a_fixed_prompt_is_backed_up_without_a_forecast_too() -> None:
    world = World(4, host_blocks=9)
    world.serve("AAAx", "unknown", 3)
    world.settle()
    assert [len(copy.sources) for copy in world.copier.history] == [3], "the fixed prompt and nothing else"
    world.serve("BBBy")
    assert world.tokens("AAAx") == (0, 3)
    assert world.demand("AAAz", "r") == "loading"
    world.settle()
    assert world.admit("AAAz", request="r").exact_tokens == 3


def test_ancestors_are_backed_up_before_what_follows_them() -> None:
    world = World(9, host_blocks=9)
    world.forecast(a=1, ab=2)
    lease = world.admit("AAABB")
    world.cache.commit_prefix(lease.request_id, b"AAABB")
    world.cache.on_label(NS, "a", b"AAA")
    world.cache.pump()
    world.cache.on_label(NS, "ab", b"AAABB")
    world.cache.pump()
    assert [len(copy.sources) for copy in world.copier.history] == [3], "the rest waits"
    world.settle()
    assert [len(copy.sources) for copy in world.copier.history] == [3, 2]
    assert state(world, "AAABB") is State.BOTH


def test_the_host_tier_gives_up_what_is_farthest_and_leaves_first() -> None:
    world = World(9, host_blocks=6, on_host={"far": "FFF", "near": "NNN"})
    world.forecast(far=60, near=40, new=50)
    world.serve("XX", "new", 2)
    world.settle()
    assert (world.tokens("FFF"), world.tokens("NNN"), world.tokens("XX")) == ((0, 1), (0, 3), (2, 0))
    world.check()


def test_a_backup_never_drops_what_is_worth_more() -> None:
    world = World(9, host_blocks=3, on_host={"near": "NNN"})
    world.forecast(near=1, new=50)
    world.settle()
    world.serve("XX", "new", 2)
    world.settle()
    stats = world.cache.stats()
    assert stats.skipped_backups == 1 and stats.host_cached_blocks == 3
    assert world.tree.end(NS, b"XX").state is State.DEVICE


def test_clear_cancels_what_has_not_started_and_spares_what_has() -> None:
    world = World(8, host_blocks=8, copy_jobs=1, on_host={"a": "AAA", "b": "BB"})
    world.forecast(a=0, b=1)
    world.cache.pump()
    world.cache.clear()
    world.check()
    assert world.cached("AAA", "BB") == ["AAA"] and world.cache.transferring
    world.settle()
    world.cache.clear()
    stats = world.cache.stats()
    assert (stats.free_blocks, stats.host_free_blocks, world.cache.transferring) == (8, 8, False)


def test_stats_count_what_moves_and_what_is_evicted_why() -> None:
    world = World(4, host_blocks=8, block_bytes=100, on_host={"a": "AAA"})
    world.forecast(b=7)
    world.serve("BB", "b", 2)
    world.serve("BBxx")
    world.settle()
    world.demand("AAA")
    world.settle()
    stats = world.cache.stats()
    assert (stats.blocks_offloaded, stats.bytes_offloaded) == (5, 500)
    assert (stats.blocks_loaded, stats.bytes_loaded) == (3, 300)
    assert stats.evictions == 6


def test_loading_is_declined_where_computing_takes_less_time_than_loads_took() -> None:
    world = World(8, host_blocks=8, on_host={"a": "AAA"})
    world.demand("AAA")
    world.copier.end(seconds=0.3)
    world.cache.pump()
    world.cache.withdraw("waiting")
    world.evict(3)
    for seconds, passes, answer in ((0.4, 50, "loading"), (0.2, 50, "ready"), (0.2, 500, "loading again")):
        for _ in range(passes):
            world.cache.tiers.transfers.cost.computed(3, seconds)
        assert [world.demand("AAA", answer) for _ in range(2)] == [answer.split()[0]] * 2
        world.cache.withdraw(answer)
        world.settle(ok=False)


def test_two_requests_wait_for_one_load() -> None:
    world = World(8, host_blocks=8, on_host={"a": "AAA"})
    assert [world.demand("AAA", name) for name in "rs"] == ["loading", "loading"]
    assert len(world.copier.submitted) == 1
    world.settle()
    assert [world.demand("AAA", name) for name in "rs"] == ["ready", "ready"]
    for name in "rs":
        world.cache.withdraw(name)
    world.check()


def test_a_status_tells_the_tiers_apart_and_changes_nothing() -> None:
    world = World(8, host_blocks=8, on_host={"a": "AAA"})
    world.serve("AAx")
    status = world.cache.status(NS, b"AAAz")
    assert (status.readiness, status.device_tokens, status.host_tokens) == ("loadable", 2, 1)
    assert world.cache.status(Namespace("x"), b"AAA").readiness == "ready"
    world.demand("AAA")
    assert world.cache.status(NS, b"AAA").readiness == "loading"


def test_a_copy_that_ends_twice_is_a_bug() -> None:
    world = World(4, host_blocks=4)
    world.forecast(a=1)
    world.serve("AA", "a", 2)
    world.settle()
    world.copier._ended.append(Copied(world.copier.history[0].copy_id, True))
    with pytest.raises(PlanError, match="is not under way"):
        world.cache.pump()


@pytest.mark.parametrize(("room", "agents"), [(3, 10), (4, 10), (5, 10), (2, 5), (9, 10)])
def test_hits_of_a_cycle_are_those_of_the_formula(room: int, agents: int) -> None:
    """KVFLOW.md, section 9: with room for C of N agents, LRU hits 0 and step order (C - 1) / (N - 1)."""
    rounds, size = 3 * (agents - 1), 4
    texts = {agent: chr(65 + agent) * size for agent in range(agents)}
    hits = {}
    for name, policy in (("lru", lru), ("steps", None)):
        world = World(room * size, policy=policy)
        served = []
        for turn in range(rounds * agents):
            world.cache.on_forecast({a: (float((a - turn) % agents), 1.0) for a in range(agents)})
            served.append(world.serve(texts[turn % agents], turn % agents, size) == size)
        hits[name] = sum(served[agents * (agents - 1) :]) / (len(served) - agents * (agents - 1))
    assert hits["lru"] == 0
    assert hits["steps"] == pytest.approx((room - 1) / (agents - 1), abs=0.02)
