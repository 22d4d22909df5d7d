"""Kedge's own cache, driven by arrivals in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.bench.sessions.baselines import lru_hit_rate
from kedge.bench.sessions.composing import Arrival
from kedge.bench.sessions.product import PRODUCT_CASES, product_replay
from kedge.bench.sessions.replay import SPACE, CacheReplay, FixedPromptHints
from kedge.bench.workflow.cache import NoCopier
from kedge.cache import CacheManager
from kedge.settings import TierSettings
from kedge.types import RequestId
from tests.bench.sessions.builders import arrival, traffic

CASES = sorted(PRODUCT_CASES)


class Journal:
    """Hooks that write down what they are told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def arrived(self, arrival: Arrival) -> None:
        self.told.append(("arrived", arrival.session))

    def cached(self, arrival: Arrival) -> None:
        self.told.append(("cached", arrival.session))

    def ended(self, arrival: Arrival) -> None:
        self.told.append(("ended", arrival.session))


@given(traffic(), st.integers(1, 25))
@settings(deadline=None)
def test_the_cache_without_hooks_is_lru(arrivals: list[Arrival], capacity: int) -> None:
    replay = CacheReplay(CacheManager(capacity, 1))
    assert replay.hit_rate(arrivals) == pytest.approx(lru_hit_rate(arrivals, capacity))
    replay.cache.check_integrity()


@given(traffic(), st.integers(1, 25), st.sampled_from(CASES))
@settings(deadline=None)
def test_the_cache_stays_whole_after_every_request(arrivals: list[Arrival], capacity: int, case: str) -> None:
    replay = product_replay(PRODUCT_CASES[case], capacity)
    for one in arrivals:
        assert 0 <= replay.serve(one) <= len(one.chain)
        replay.cache.check_integrity()
        stats = replay.cache.stats()
        assert (stats.leased_blocks, replay.cache.transferring) == (0, False)


def test_hooks_are_told_in_order_of_time() -> None:
    journal = Journal()
    replay = CacheReplay(CacheManager(9, 1), [journal])
    arrivals = [
        arrival(0, "slow", [1], seconds=30),
        arrival(1, "quick", [2], seconds=4),
        arrival(5, "next", [3], seconds=1),  # at the very end of the quick one
        arrival(40, "last", [4]),
    ]
    replay.hit_rate(arrivals)
    assert journal.told == [
        ("arrived", "slow"), ("cached", "slow"), ("arrived", "quick"), ("cached", "quick"), ("ended", "quick"),
        ("arrived", "next"), ("cached", "next"), ("ended", "next"), ("ended", "slow"),
        ("arrived", "last"), ("cached", "last"),
    ]  # fmt: skip


def test_a_request_without_room_hits_nothing_and_takes_nothing() -> None:
    cache = CacheManager(4, 1)
    replay = CacheReplay(cache)
    assert [replay.serve(arrival(0, "a", [1, 2])), replay.serve(arrival(1, "a", [1, 2]))] == [0, 2]
    cache.admit(RequestId("other"), SPACE, [9, 8, 7, 6], 0, 3)
    assert replay.serve(arrival(2, "a", [1, 2, 3])) == 0
    cache.check_integrity()
    assert not cache.starved


def test_what_the_host_has_is_hit_as_well() -> None:
    chains = [range(at * 10, at * 10 + 8) for at in range(3)]
    arrivals = [arrival(float(at), "abc"[at % 3], chains[at % 3]) for at in range(12)]
    assert lru_hit_rate(arrivals, 9) == 0
    replay = CacheReplay(CacheManager(9, 1, tiers=TierSettings(host_blocks=27, backup_hits=0), copier=NoCopier()))
    assert replay.hit_rate(arrivals) == 9 / 12


def test_fixed_prompts_are_labelled_while_their_session_lives() -> None:
    cache = CacheManager(8, 1, tiers=TierSettings(), copier=NoCopier())
    hints = FixedPromptHints(cache)
    one = arrival(0, "a", [1, 2, 3])
    one.turn = type(one.turn)(one.turn.record, one.chain, 2)
    replay = CacheReplay(cache, [hints])
    replay.serve(one)
    labels = cache.tiers.tree.labels
    assert [sum(step.size for step in node.path()) for node in [labels.node("a")] if node] == [2]
    replay.serve(arrival(1, "b", [7]))
    assert labels.node("a") is None
