"""The state table of KVFLOW.md, section 5, row by row, and what the host tier keeps."""

from __future__ import annotations

import pytest

from kedge.cache import CacheManager, Copied, lru
from kedge.cache.node import HOST, State
from kedge.errors import ConfigError, OutOfBlocks, PlanError
from kedge.settings import TierSettings
from kedge.types import Namespace, RequestId, Source, Span, TenantId
from tests.cache.helpers import NS, World
from tests.cache.test_hazards import on_host_only


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


def test_what_is_copied_is_never_a_victim() -> None:
    world = World(4, host_blocks=4)
    world.forecast(a=9)
    world.serve("AAA", "a", 3)
    world.cache.pump()
    with pytest.raises(OutOfBlocks, match="0 of 3"):
        world.evict(1)
    world.settle()
    world.evict(3)
    world.demand("AAA")
    with pytest.raises(OutOfBlocks, match="0 of 0"):
        world.evict(2)


def test_a_recompute_adopts_its_own_blocks() -> None:
    world = World(8, host_blocks=4)
    on_host_only(world, a="AAAA")
    lease = world.admit("AAAAxy")
    world.cache.finish(lease.request_id, b"AAAAxy")
    world.check()
    assert state(world, "AAAA") is State.BOTH
    assert world.cache.match(NS, b"AAAAxy").blocks == lease.blocks


def test_a_recompute_of_a_part_adopts_that_part() -> None:
    world = World(8, host_blocks=4)
    on_host_only(world, a="AAAA")
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
    assert world.admit("AAAA", request=RequestId("waiting")).spans == (
        Span(0, 1, Source.DEVICE),
        Span(1, 4, Source.HOST),
    )


def test_fixed_prompts_are_written_through_once() -> None:
    world = World(8, host_blocks=8)
    world.forecast(a=1)
    for suffix in "xyz":
        world.serve("AAA" + suffix, "a", 3)
        world.settle()
    assert [len(copy.sources) for copy in world.copier.history] == [3]


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
    assert world.admit("AAAz", request=RequestId("r")).exact_tokens == 3


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
    world = World(9, host_blocks=6)
    on_host_only(world, far="FFF", near="NNN")
    world.forecast(far=60, near=40, new=50)
    world.serve("XX", "new", 2)
    world.settle()
    assert (world.tokens("FFF"), world.tokens("NNN"), world.tokens("XX")) == ((0, 1), (0, 3), (2, 0))
    world.check()


def test_a_backup_never_drops_what_is_worth_more() -> None:
    world = World(9, host_blocks=3)
    on_host_only(world, near="NNN")
    world.forecast(near=1, new=50)
    world.settle()
    world.serve("XX", "new", 2)
    world.settle()
    stats = world.cache.stats()
    assert stats.skipped_backups == 1 and stats.host_cached_blocks == 3
    assert world.tree.end(NS, b"XX").state is State.DEVICE


def test_what_is_loading_is_pinned_on_the_host() -> None:
    world = World(9, host_blocks=3)
    on_host_only(world, a="AAA")
    world.demand("AAA")
    world.forecast(b=0)
    world.serve("BB", "b", 2)
    world.settle()
    assert world.on_device("AAA", "BB") == ["AAA", "BB"]
    assert world.tree.end(NS, b"AAA").blocks[HOST]


def test_a_host_tier_of_size_zero_moves_nothing() -> None:
    world = World(6, host_blocks=0, policy=lru)
    world.forecast(a=1)
    world.serve("AAA", "a", 3)
    world.serve("AAA", "a", 3)
    world.settle()
    assert not world.copier.history and not world.cache.transferring


def test_clear_cancels_what_has_not_started_and_spares_what_has() -> None:
    world = World(8, host_blocks=8, copy_jobs=1)
    on_host_only(world, a="AAA", b="BB")
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
    world = World(4, host_blocks=8, block_bytes=100)
    on_host_only(world, a="AAA")
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


def test_loading_is_declined_where_computing_is_cheaper() -> None:
    world = World(8, host_blocks=8)
    on_host_only(world, a="AAA")
    world.cache.observe_compute(1000, 0.001)
    world.cache.tiers.cost.load.observe(1, 1.0)
    assert world.demand("AAA") == "ready"
    assert not world.copier.submitted


def test_loads_are_measured() -> None:
    world = World(8, host_blocks=8)
    on_host_only(world, a="AAA")
    world.demand("AAA")
    world.copier.end(seconds=0.3)
    world.cache.pump()
    assert world.cache.tiers.cost.load.seconds_per_unit == pytest.approx(0.1)


def test_two_requests_wait_for_one_load() -> None:
    world = World(8, host_blocks=8)
    on_host_only(world, a="AAA")
    assert [world.demand("AAA", name) for name in "rs"] == ["loading", "loading"]
    assert len(world.copier.submitted) == 1
    world.settle()
    assert [world.demand("AAA", name) for name in "rs"] == ["ready", "ready"]
    for name in "rs":
        world.cache.withdraw(RequestId(name))
    world.check()


def test_a_status_tells_the_tiers_apart_and_changes_nothing() -> None:
    world = World(8, host_blocks=8)
    on_host_only(world, a="AAA")
    world.serve("AAx")
    status = world.cache.status(NS, b"AAAz")
    assert (status.readiness, status.device_tokens, status.host_tokens) == ("loadable", 2, 1)
    assert world.cache.status(Namespace(TenantId("x")), b"AAA").readiness == "ready"
    world.demand("AAA")
    assert world.cache.status(NS, b"AAA").readiness == "loading"


def test_a_block_without_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_bytes=0"):
        CacheManager(4, block_bytes=0)


def test_a_host_tier_needs_a_copier() -> None:
    with pytest.raises(ConfigError, match="host_blocks=4"):
        CacheManager(4, tiers=TierSettings(host_memory="4 blocks"))


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
