"""Kedge's own cache, driven by arrivals in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.bench.sessions.baselines import lru_hit_rate
from kedge.bench.sessions.composing import Arrival
from kedge.bench.sessions.product import PRODUCT_CASES, SessionHooks, agent_of, product_replay
from kedge.bench.sessions.replay import SPACE, CacheReplay
from kedge.bench.workflow.cache import NoCopier
from kedge.cache import CacheManager
from kedge.settings import TierSettings
from kedge.types import RequestId
from tests.bench.sessions.builders import arrival, link, traffic

CASES = sorted(PRODUCT_CASES)


class Journal:
    """Hooks that write down when they are called, and how much of the prompt is cached then."""

    def __init__(self, cache: CacheManager) -> None:
        self.cache = cache
        self.events: list[tuple[str, str, int]] = []

    def arrived(self, arrival: Arrival) -> None:
        self._note("arrived", arrival)

    def answered(self, arrival: Arrival) -> None:
        self._note("answered", arrival)

    def _note(self, event: str, arrival: Arrival) -> None:
        self.events.append((event, arrival.session, self.cache.match(SPACE, arrival.chain).tokens_count))


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


def test_hooks_are_called_before_and_after_a_prompt_is_cached() -> None:
    cache = CacheManager(9, 1)
    journal = Journal(cache)
    CacheReplay(cache, [journal]).hit_rate([arrival(0, "a", [1, 2]), arrival(1, "a", [1, 2, 3])])
    assert journal.events == [("arrived", "a", 0), ("answered", "a", 2), ("arrived", "a", 2), ("answered", "a", 3)]


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


def test_fixed_prompts_are_labelled_until_their_session_s_last_request() -> None:
    replay = product_replay(PRODUCT_CASES["kedge_fixed"], 8)
    first, last = link([arrival(0, "a", [1, 2, 3]), arrival(1, "a", [1, 2, 3, 4])])
    for one in (first, last):
        one.turn = replace(one.turn, fixed_blocks=2)
    labels = replay.cache.tiers.tree.labels
    replay.serve(first)
    labelled = labels.node(agent_of(first))
    assert labelled and sum(step.size for step in labelled.path()) == 2
    replay.serve(last)
    assert labels.node(agent_of(first)) is None and len(labels) == 0


def repeated(pauses: dict[str, float], rounds: int) -> list[Arrival]:
    """Sessions that each come back after their own pause, with chains of their own that grow by a block."""
    found = [
        arrival(start + turn * pause, name, range(start * 1000, start * 1000 + 6 + turn), stop="tool")
        for start, (name, pause) in enumerate(pauses.items())
        for turn in range(rounds)
    ]
    return link(sorted(found, key=lambda one: one.at))


PACES = repeated({"quick": 3.0, "slow": 40.0, "idle": 41.0, "late": 43.0}, 30)
"""One session that comes back soon among some that push it out under LRU."""


@pytest.mark.parametrize("case", ["kedge", "kedge_ids", "kedge_perfect"])
def test_sessions_are_kept_by_when_they_return(case: str) -> None:
    replay = product_replay(PRODUCT_CASES[case], 60)
    assert replay.hit_rate(PACES) > lru_hit_rate(PACES, 60)


def test_ids_distinguish_sessions_of_one_prompt() -> None:
    hooks = {case: SessionHooks(CacheManager(9, 1), PRODUCT_CASES[case]) for case in ("kedge", "kedge_ids")}
    for one in (arrival(0, "a", [1, 2]), arrival(1, "b", [1, 2])):
        for each in hooks.values():
            each.arrived(one)
            each.answered(one)
    assert {case: len(each.caching.ledger.steps.tracker) for case, each in hooks.items()} == {
        "kedge": 1,
        "kedge_ids": 2,
    }
