"""Kedge's own cache with the hints that clients may give, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sessions.measure import PRODUCT_CASES, HintedHooks, agent_of, measure_cost, product_replay
from kedge.bench.sessions.arrivals import QUICK, SLICE, Arrival, load_traces, traffic_of
from kedge.bench.sessions.measure import lru_hit_rate
from kedge.cache import CacheManager
from tests.bench.sessions.builders import arrival, link, traffic
from tests.bench.sessions.test_replay import PACES

CASES = sorted(PRODUCT_CASES)


@given(traffic(), st.integers(1, 25), st.sampled_from(CASES))
@settings(deadline=None)
def test_the_cache_stays_whole_after_every_request(arrivals: list[Arrival], capacity: int, case: str) -> None:
    replay = product_replay(PRODUCT_CASES[case], capacity)
    for one in arrivals:
        assert 0 <= replay.serve(one) <= len(one.chain)
        replay.cache.check_integrity()
        stats = replay.cache.stats()
        assert (stats.leased_blocks, replay.cache.transferring) == (0, False)


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


@pytest.mark.parametrize("case", ["kedge", "kedge_ids", "kedge_perfect"])
def test_sessions_are_kept_by_when_they_return(case: str) -> None:
    replay = product_replay(PRODUCT_CASES[case], 60)
    assert replay.hit_rate(PACES) > lru_hit_rate(PACES, 60)


def test_ids_distinguish_sessions_of_one_prompt() -> None:
    hooks = {case: HintedHooks(CacheManager(9, 1), PRODUCT_CASES[case]) for case in ("kedge", "kedge_ids")}
    for one in (arrival(0, "a", [1, 2]), arrival(1, "b", [1, 2])):
        for each in hooks.values():
            each.arrived(one)
            each.answered(one)
    assert {case: len(each.caching.ledger.tracker) for case, each in hooks.items()} == {
        "kedge": 1,
        "kedge_ids": 2,
    }


def test_costs_are_of_requests_and_of_blocks() -> None:
    (trace,) = load_traces([SLICE])
    (found,) = traffic_of(trace, replace(QUICK, requests=120))
    cost = measure_cost(found.arrivals, found.capacity(0.25)).as_json()
    assert all(value > 0 for value in cost.values())
