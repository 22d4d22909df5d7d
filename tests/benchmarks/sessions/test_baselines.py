"""Belady against a naive twin, and the reference simulator's figures on the trace that ships; costs."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sessions.measure import belady_hit_rate, measure_cost
from kedge.bench.sessions.arrivals import Arrival, Traffic
from kedge.bench.sessions.measure import ceiling
from tests.bench.sessions.builders import arrival, shipped_traffic, traffic
from tests.bench.sessions.test_replay import naive_hits, total

CAPACITIES = st.integers(1, 25)
REFERENCE = {0.1: 0.1760, 0.25: 0.5689, 0.5: 0.8852}
"""Belady by an independent simulator: 8 live, gaps cut at 3,600 s, 1,000 requests."""


@pytest.fixture(scope="module")
def shipped() -> Traffic:
    return shipped_traffic()


def test_figures_are_those_of_the_reference(shipped: Traffic) -> None:
    for share, expected in REFERENCE.items():
        capacity = shipped.capacity(share)
        assert belady_hit_rate(shipped.arrivals, capacity) == pytest.approx(expected, abs=1e-3)


def naive_belady(arrivals: list[Arrival], capacity: int) -> int:
    """Look through all that is to come for each victim, and remember depths of blocks as last used."""
    cached: list[int] = []
    depth: dict[int, int] = {}
    hits = 0
    for number, one in enumerate(arrivals):
        chain = one.chain[:capacity]
        hits += naive_hits(chain, cached)
        new = [block for block in chain if block not in cached]

        def next_use(block: int, future: list[Arrival] = arrivals[number:]) -> float:
            return next((later.at for later in future if block in later.chain), inf)

        while len(cached) + len(new) > capacity:
            others = [block for block in cached if block not in chain]
            cached.remove(max(others, key=lambda block: (next_use(block), depth[block], -block)))
        cached += new
        depth |= {block: at for at, block in enumerate(chain)}
    return hits


@given(traffic(), CAPACITIES)
@settings(deadline=None)
def test_belady_is_its_naive_twin(arrivals: list[Arrival], capacity: int) -> None:
    assert belady_hit_rate(arrivals, capacity) == pytest.approx(naive_belady(arrivals, capacity) / total(arrivals))


@given(traffic())
@settings(deadline=None)
def test_room_for_everything_gives_the_ceiling(arrivals: list[Arrival]) -> None:
    assert belady_hit_rate(arrivals, total(arrivals)) == ceiling(arrivals)


def test_nothing_is_hit_by_prompts_without_a_block() -> None:
    empty = [arrival(0, "a", []), arrival(1, "a", [])]
    assert belady_hit_rate(empty, 1) == 0


def test_costs_are_of_requests_and_of_blocks(shipped: Traffic) -> None:
    cost = measure_cost(shipped.arrivals[:120], shipped.capacity(0.25)).as_json()
    assert all(value > 0 for value in cost.values())
