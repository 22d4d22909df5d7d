"""Hit rates in virtual time: LRU against a naive twin and a reference simulator, and Kedge's own cache."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.bench.sessions.arrivals import QUICK, Arrival, load_traces
from kedge.bench.sessions.measure import (
    SPACE,
    CacheReplay,
    NoCopier,
    ceiling,
    kedge_hit_rate,
    lru_hit_rate,
    measure,
    tiered_cache,
)
from kedge.cache import CacheManager
from kedge.settings import TierSettings
from tests.bench.sessions.builders import AGENT, arrival, shipped_traffic, traffic, write

CAPACITIES = st.integers(1, 25)
REFERENCE = {0.1: 0.1713, 0.25: 0.4778, 0.5: 0.8283}
"""LRU by an independent simulator: 8 live, gaps cut at 3,600 s, 1,000 requests."""
SETTINGS = replace(QUICK, capacities=(0.25,), requests=120)


def test_figures_are_those_of_the_reference() -> None:
    shipped = shipped_traffic()
    assert shipped.working_set == pytest.approx(1402.8675)
    assert ceiling(shipped.arrivals) == pytest.approx(0.9716, abs=1e-4)
    for share, expected in REFERENCE.items():
        assert lru_hit_rate(shipped.arrivals, shipped.capacity(share)) == pytest.approx(expected, abs=1e-3)


def naive_hits(chain: tuple[int, ...], cached: list[int]) -> int:
    return next((at for at, block in enumerate(chain) if block not in cached), len(chain))


def naive_lru(arrivals: list[Arrival], capacity: int) -> int:
    cached: list[int] = []
    hits = 0
    for one in arrivals:
        chain = one.chain[:capacity]
        hits += naive_hits(one.chain, cached)
        cached = [block for block in cached if block not in chain] + list(reversed(chain))
        cached = cached[-capacity:]
    return hits


def total(arrivals: list[Arrival]) -> int:
    return sum(len(one.chain) for one in arrivals)


@given(traffic(), CAPACITIES)
def test_lru_is_its_naive_twin_and_room_for_all_gives_the_ceiling(arrivals: list[Arrival], capacity: int) -> None:
    replay = CacheReplay(CacheManager(capacity, 1), has_sessions=False)
    found = replay.hit_rate(arrivals)
    assert found == lru_hit_rate(arrivals, capacity) == pytest.approx(naive_lru(arrivals, capacity) / total(arrivals))
    replay.cache.check_integrity()
    assert lru_hit_rate(arrivals, total(arrivals)) == ceiling(arrivals)


@given(traffic(), CAPACITIES, st.sampled_from([0, 3]))
def test_the_cache_stays_whole_after_every_request(arrivals: list[Arrival], capacity: int, host_times: int) -> None:
    cache = tiered_cache(capacity, host_times)
    replay = CacheReplay(cache)
    for one in arrivals:
        assert 0 <= replay.serve(one) <= len(one.chain)
        cache.check_integrity()
        assert (cache.stats().leased_blocks, cache.transferring) == (0, False)


def test_a_request_without_room_hits_nothing_and_takes_nothing() -> None:
    cache = CacheManager(4, 1)
    replay = CacheReplay(cache, has_sessions=False)
    assert [replay.serve(arrival(0, "a", [1, 2])), replay.serve(arrival(1, "a", [1, 2]))] == [0, 2]
    cache.admit("other", SPACE, [9, 8, 7, 6], 0, 3)
    assert replay.serve(arrival(2, "a", [1, 2, 3])) == 0
    cache.check_integrity()
    assert not cache.starved


def test_what_the_host_has_is_hit_as_well() -> None:
    chains = [range(at * 10, at * 10 + 8) for at in range(3)]
    arrivals = [arrival(float(at), "abc"[at % 3], chains[at % 3]) for at in range(12)]
    assert lru_hit_rate(arrivals, 9) == 0
    tiers = TierSettings(host_memory="27 blocks", backup_hits=0)
    cache = CacheManager(9, 1, tiers=tiers, copier=NoCopier())
    assert CacheReplay(cache, has_sessions=False).hit_rate(arrivals) == 9 / 12


def test_sessions_are_kept_by_when_they_return() -> None:
    """One session that comes back soon among some that push it out under LRU; each grows by a block."""
    pauses = {"quick": 3.0, "slow": 40.0, "idle": 41.0, "late": 43.0}
    found = [
        arrival(start + turn * pause, name, range(start * 1000, start * 1000 + 6 + turn), stop="tool")
        for start, (name, pause) in enumerate(pauses.items())
        for turn in range(30)
    ]
    paces = sorted(found, key=lambda one: one.at)
    assert kedge_hit_rate(paces, 60) > lru_hit_rate(paces, 60)


def test_prompts_without_a_full_block_are_replayed_too(tmp_path: Path) -> None:
    line = {**AGENT, "n": 100, "h": [[0, 1]]}
    result = measure(SETTINGS, load_traces([write(tmp_path / "t.jsonl", [line] * 3)]))
    assert set(result["t"]["open"]["8"]["0.25"].values()) == {0.0}
