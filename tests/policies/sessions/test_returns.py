"""Return times against direct sums over known distributions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.policies.sessions.tracker import EDGES, ReturnTimes, best_rate, bin_of

FAST, SLOW = ("tool",), ("user",)


def feed(times: ReturnTimes, kind: tuple[str, ...], gaps: list[float]) -> None:
    for gap in gaps:
        idle(times, kind, bin_of(gap))
        times.observe(kind, bin_of(gap), returned=True)


def idle(times: ReturnTimes, kind: tuple[str, ...], until: int) -> None:
    """Let a session be idle into bin `until`."""
    times.begin(kind)
    for at in range(until):
        times.observe(kind, at, returned=False)


@given(st.floats(0, 1e6))
def test_a_bin_holds_its_idle_time(idle: float) -> None:
    at = bin_of(idle)
    assert EDGES[at] <= idle and (at + 1 == len(EDGES) or idle < EDGES[at + 1])


def test_before_anything_was_seen_who_was_idle_for_less_is_worth_more() -> None:
    times = ReturnTimes()
    rates = [times.rate(FAST, at) for at in range(len(EDGES))]
    assert all(sooner > later for sooner, later in zip(rates, rates[1:], strict=False))


def test_kinds_that_return_sooner_are_worth_more() -> None:
    times, rng = ReturnTimes(), random.Random(0)
    feed(times, FAST, [rng.expovariate(1 / 5) for _ in range(200)])
    feed(times, SLOW, [rng.expovariate(1 / 500) for _ in range(200)])
    assert times.rate(FAST, 0) > 20 * times.rate(SLOW, 0)
    assert 1 / times.rate(FAST, 0) == pytest.approx(5, rel=0.3), "an exponential idle time has its mean as its price"


def test_who_is_overdue_is_worth_less_than_who_is_not() -> None:
    times = ReturnTimes()
    feed(times, FAST, [10.0] * 100)
    at = bin_of(10)
    assert times.rate(FAST, at) > times.rate(FAST, 0) > times.rate(FAST, at + 1)


def test_sessions_that_never_return_count() -> None:
    """Half of all return after a second; of those that do not, nothing is expected."""
    times = ReturnTimes()
    for _ in range(200):
        feed(times, FAST, [1.0])
        idle(times, FAST, len(EDGES) - 1)
    assert times.rate(FAST, bin_of(100)) < times.rate(FAST, 0) / 1000


def test_a_new_kind_is_worth_what_its_wider_kind_is() -> None:
    times = ReturnTimes()
    feed(times, ("tool", 1), [5.0] * 300)
    feed(times, ("user", 1), [5000.0] * 300)
    assert times.rate(("tool", 7), 0) > 20 * times.rate(("user", 7), 0)


@given(st.lists(st.floats(0, 1), min_size=len(EDGES), max_size=len(EDGES)), st.integers(0, len(EDGES) - 1))
def test_the_best_rate_is_that_of_some_horizon_and_of_none_better(shares: list[float], start: int) -> None:
    widths = [*(after - before for before, after in zip(EDGES, EDGES[1:], strict=False)), EDGES[-1]]
    best, alive, returned, held = 0.0, 1.0, 0.0, 0.0
    for at in range(start, len(EDGES)):
        returned += alive * shares[at]
        held += widths[at] * alive * (1 - shares[at] / 2)
        best, alive = max(best, returned / held), alive * (1 - shares[at])
    assert best_rate(shares, start) == pytest.approx(best, rel=0.01, abs=1e-9)


def test_what_is_old_is_forgotten_slowly() -> None:
    times = ReturnTimes()
    feed(times, FAST, [1000.0] * 2000)
    feed(times, FAST, [2.0] * 8000)
    assert 1 / times.rate(FAST, 0) < 10


def test_those_that_are_still_idle_count_from_when_they_are() -> None:
    """A hundred have been idle for four minutes, and the first one returns: one in a hundred, and not all."""
    times, at = ReturnTimes(), bin_of(240)
    for _ in range(99):
        idle(times, FAST, at)
    feed(times, FAST, [240.0])
    assert times.rate(FAST, at) < 1 / 2000
