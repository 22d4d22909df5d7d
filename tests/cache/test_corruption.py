"""Blocks that come back from the host with another content than went there: they go, and nothing else does."""

from __future__ import annotations

import pytest

from tests.cache.helpers import NS, World


def on_host(*texts: str, host_blocks: int = 20) -> World:
    """A world in which the host alone holds these prompts."""
    world = World(12, host_blocks, backup_hits=0)
    for text in texts:
        world.serve(text)
        world.settle()
    world.evict(world.cache.stats().cached_blocks)
    assert all(world.tokens(text) == (0, len(text)) for text in texts)
    return world


def land(world: World, at: int = 0) -> None:
    world.copier.end(at)
    world.cache.pump()
    world.check()


@pytest.mark.parametrize("bad", range(5))
def test_what_comes_before_a_corrupt_block_lands_and_the_rest_is_never_offered_again(bad: int) -> None:
    world = on_host("ABCDE")
    world.corrupt("ABCDE"[: bad + 1])
    assert world.demand("ABCDE") == "loading"
    land(world)
    assert world.demand("ABCDE") == "ready", "the request computes what is lost"
    assert world.tokens("ABCDE") == (bad, 0)
    stats = world.cache.stats()
    assert (stats.corrupt_blocks, stats.failed_copies, stats.blocks_loaded) == (1, 0, 4)
    assert world.outcomes("demand") == {"failed": 1}
    assert world.admit("ABCDE").exact_tokens == bad
    assert stats.host_cached_blocks == bad


def test_all_corrupt_blocks_of_a_load_are_counted() -> None:
    world = on_host("ABCDE")
    world.corrupt("ABC")
    world.corrupt("ABCD")
    world.demand("ABCDE")
    land(world)
    assert world.cache.stats().corrupt_blocks == 2 and world.tokens("ABCDE") == (2, 0)


def test_other_branches_stay() -> None:
    world = on_host("ABCDE", "ABXY")
    world.corrupt("ABC")
    world.demand("ABCDE")
    land(world)
    assert world.tokens("ABXY") == (2, 2)


def test_what_lies_below_goes_too_and_queued_loads_of_it_are_cancelled() -> None:
    world = on_host("ABCDE", "ABCFG", "ABCFH")
    world.corrupt("AB")
    world.demand("ABC", "first")
    world.demand("ABCDE", "second")
    world.demand("ABCFG", "third")
    world.cache.withdraw("third")
    land(world)
    while world.copier.submitted:
        land(world)
    assert [world.tokens(text) for text in ("ABCDE", "ABCFG", "ABCFH")] == [(1, 0)] * 3
    assert world.demand("ABCDE", "second") == "ready"
    world.settle()


def test_corrupt_blocks_stay_until_loads_below_them_have_ended() -> None:
    world = on_host("ABCDE")
    world.corrupt("AB")
    world.demand("AB", "first")
    world.demand("ABCDE", "second")
    assert len(world.copier.submitted) == 2
    land(world, 0)
    assert world.cache.tiers.pending() and world.demand("AB", "first") == "loading"
    land(world)
    assert not world.cache.tiers.pending() and world.tokens("ABCDE") == (1, 0)
    assert (world.demand("AB", "first"), world.demand("ABCDE", "second")) == ("ready", "ready")


def test_the_load_below_may_end_first() -> None:
    world = on_host("ABCDE")
    world.corrupt("AB")
    world.demand("AB", "first")
    world.demand("ABCDE", "second")
    land(world, 1)
    land(world, 0)
    assert not world.cache.tiers.pending() and world.tokens("ABCDE") == (1, 0)


def test_a_recompute_that_overtook_the_load_keeps_its_own_blocks() -> None:
    world = on_host("ABCDE")
    world.corrupt("ABC")
    world.demand("ABCDE")
    lease = world.admit("ABCDE")
    world.cache.commit_prefix(lease.request_id, b"ABCDE")
    land(world)
    assert world.tokens("ABCDE") == (5, 0)
    assert world.cache.stats().host_cached_blocks == 2, "the host keeps what is sound"
    world.cache.finish(lease.request_id, b"ABCDE")
    world.settle()
    assert world.serve("ABCDE") == 5


def test_labels_of_corrupt_prompts_do_no_harm() -> None:
    world = World(8, 20)
    world.forecast(a=1.0)
    world.serve("ABCDE", "a", fixed=5)
    world.settle()
    world.corrupt("ABC")
    world.evict(world.cache.stats().cached_blocks)
    world.settle()
    world.forecast(a=0.0)
    world.settle()
    assert world.cache.stats().corrupt_blocks == 1 and world.tokens("ABCDE") == (2, 0)
    assert world.cache.status(NS, b"ABCDE").host_tokens == 0
