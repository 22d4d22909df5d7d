"""Sessions over virtual time."""

import math
from heapq import heappush
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.policies.sessions import SessionHints, SessionKey, TurnEnd
from kedge.policies.sessions.tracker import BORROWED, EDGES, KEPT, PRIOR, ReturnTimes, SessionTracker, best_rate, bin_of
from kedge.policies.sessions.turns import UNKNOWN_END
from tests.policies.sessions.test_links import HERE, HERE_TOO, THERE, chain


def turn(tracker: SessionTracker, blocks: list[int], now: float, end: TurnEnd = UNKNOWN_END) -> SessionKey:
    """One whole turn at `now`."""
    key = tracker.arrive(HERE, chain(*blocks), now)
    tracker.answered(key, chain(*blocks), now, end)
    return key


def test_a_request_beside_a_turn_that_has_not_ended_is_of_another_session() -> None:
    tracker = SessionTracker()
    first = turn(tracker, [1, 2], 0.0)
    assert tracker.arrive(HERE, chain(1, 2, 3), 1.0) == first
    beside = tracker.arrive(HERE, chain(1, 2, 3), 1.5)
    assert beside != first
    tracker.answered(first, chain(1, 2, 3), 2.0)
    assert tracker.arrive(HERE, chain(1, 2, 3, 4), 3.0) == first


def test_a_given_id_is_the_session_whatever_the_prompt() -> None:
    tracker, hints = SessionTracker(), SessionHints(session="x")
    first = tracker.arrive(HERE, chain(1, 2), 0.0, hints)
    assert tracker.arrive(HERE, chain(7), 1.0, hints) == first != tracker.arrive(THERE, chain(7), 1.0, hints)


def test_who_comes_back_soon_ranks_before_who_does_not() -> None:
    tracker, now = SessionTracker(), 0.0
    for step in range(60):
        now = 1000.0 * step
        tool = turn(tracker, [1, *range(step)], now, TurnEnd("tool"))
        tool = turn(tracker, [1, *range(step), -1], now + 3, TurnEnd("tool"))
        user = turn(tracker, [2, *range(step)], now + 3, TurnEnd("user"))
    ranks = tracker.advance(now + 3)
    assert ranks[tool] is not None and ranks[tool] == tracker.rank(tool) < tracker.rank(user)


def test_two_requests_of_a_session_at_once_end_it_only_together() -> None:
    tracker, hints = SessionTracker(), SessionHints(session="x")
    key = tracker.arrive(HERE, chain(1), 0.0, hints)
    tracker.arrive(HERE, chain(1, 2), 0.0, hints)
    tracker.answered(key, chain(1), 1.0)
    assert tracker.advance(1.0)[key] == 0.0
    tracker.answered(key, chain(1, 2), 2.0)
    assert tracker.advance(2.0)[key] != 0.0


def test_a_given_return_is_the_rank() -> None:
    tracker = SessionTracker()
    key = turn(tracker, [1], 0.0, TurnEnd(returns_in=100.0))
    assert tracker.advance(0.0)[key] == 100.0
    assert tracker.advance(60.0)[key] == pytest.approx(40, abs=5)
    never = turn(tracker, [2], 60.0, TurnEnd(returns_in=math.inf))
    assert tracker.advance(60.0)[never] == math.inf


def test_a_session_that_is_to_be_kept_ranks_before_alike_ones_until_then() -> None:
    tracker, patient = SessionTracker(), SessionTracker()
    kept, other = turn(tracker, [1], 0.0, TurnEnd(keep_for=300.0)), turn(patient, [1], 0.0)
    for now in (0.0, 10.0, 100.0, 299.0):
        tracker.advance(now), patient.advance(now)
        assert tracker.rank(kept) == pytest.approx(patient.rank(other) / KEPT)
    tracker.advance(301.0), patient.advance(301.0)
    assert tracker.rank(kept) == pytest.approx(patient.rank(other))


def test_an_ended_session_is_forgotten() -> None:
    tracker = SessionTracker()
    key = turn(tracker, [1], 0.0)
    tracker.end(key)
    assert tracker.advance(0.0) == {key: None} and not tracker._sessions and tracker.rank(key) == math.inf
    tracker.answered(key, chain(1), 1.0)
    tracker.cancelled(key, 1.0)
    assert tracker.advance(1.0) == {}


def test_timers_of_idle_sessions_end_however_times_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an idle time is rounded below the edge of its bin, a timer was due at once, again and again."""
    times = [(0.1 * at, edge) for at in range(200) for edge in EDGES[1:]]
    rounded = [(since, edge) for since, edge in times if (since + edge) - since < edge]
    assert rounded
    pushes = iter(())

    def push(heap: list[Any], entry: Any) -> None:
        assert next(pushes, None) is not None, "timers are set for ever"
        heappush(heap, entry)

    monkeypatch.setattr("kedge.structures.heaps.heappush", push)
    for since, edge in rounded:
        pushes, sessions = iter(range(100)), SessionTracker()
        turn(sessions, [1], since)
        sessions.advance(since + edge)
        sessions.advance(since + edge)


@pytest.mark.parametrize("capacity", [1, 50])
def test_timers_that_are_outdated_go_before_their_time(capacity: int) -> None:
    tracker = SessionTracker(capacity)
    for number in range(1000):
        turn(tracker, [number % 100], float(number), TurnEnd(returns_in=1e12))
        assert len(tracker._timers._heap) <= max(64, 2 * len(tracker._sessions))
    ranks = [tracker.rank(key) for key in tracker._sessions]
    tracker.advance(1e11 + 1000)
    assert all(tracker.rank(key) < rank for key, rank in zip(tracker._sessions, ranks, strict=True)), "they still run"


def test_the_share_of_requests_that_sessions_come_back_with() -> None:
    tracker = SessionTracker()
    for number in range(100):
        turn(tracker, [number], float(number))
    assert tracker.returning == 0.0
    for number in range(100):
        turn(tracker, [100, *range(number)], 100.0 + number)
    assert 0.9 < tracker.returning <= 1.0


# return times, against direct sums over known distributions -----------------------------------------------------------


def idle(times: ReturnTimes, kind: tuple[str, ...], until: int, *, returns: bool) -> None:
    """Let a session be idle into bin `until`, where it stays or `returns`."""
    times.begin(kind)
    for at in range(until + returns):
        times.observe(kind, at, returned=at == until)


@given(st.floats(0, 1e6))
def test_a_bin_holds_its_idle_time(idle: float) -> None:
    at = bin_of(idle)
    assert EDGES[at] <= idle and (at + 1 == len(EDGES) or idle < EDGES[at + 1])


KINDS = ("tool", 1), ("tool", 2), ("user", 1)


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, len(EDGES) - 2), st.booleans()), max_size=40))
def test_what_is_worth_most_is_by_how_many_alike_ones_returned_in_each_bin(
    spells: list[tuple[tuple[str, int], int, bool]],
) -> None:
    """One that is still in a bin counts half there; where few are alike, it is as in a wider class."""
    times = ReturnTimes()
    for kind, end, returned in spells:
        idle(times, kind, end, returns=returned)
    for kind in (*KINDS, ("tool", 3), ("new", 1)):
        shares = [PRIOR] * len(EDGES)
        for depth in range(3):
            ends = [(end, returned) for one, end, returned in spells if one[:depth] == kind[:depth]]
            for at in range(len(EDGES)):
                came = sum(returned for end, returned in ends if end == at)
                there = sum(1 if end > at or returned else 0.5 for end, returned in ends if end >= at)
                shares[at] = (came + BORROWED * shares[at]) / (there + BORROWED)
        assert [times.rate(kind, at) for at in (0, 9)] == pytest.approx([best_rate(shares, at) for at in (0, 9)])


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
    times, fast = ReturnTimes(), ("tool",)
    for gap in [1000.0] * 2000 + [2.0] * 8000:
        idle(times, fast, bin_of(gap), returns=True)
        rate = times.rate(fast, 0)
    assert 1 / rate < 10


def test_a_tenant_forgets_only_its_own_sessions() -> None:
    tracker = SessionTracker(4)
    kept = [tracker.arrive(THERE, chain(at), 0.0) for at in range(2)]
    own = [tracker.arrive(namespace, chain(2, at), 1.0) for at in range(9) for namespace in (HERE, HERE_TOO)]
    assert [one in tracker for one in (*kept, *own)] == [True] * 2 + [False] * 16 + [True] * 2
