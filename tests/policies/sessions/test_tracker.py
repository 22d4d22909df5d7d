"""Sessions over virtual time."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kedge.policies.sessions import SessionHints, SessionKey, SessionTracker, TurnEnd
from kedge.policies.sessions.tracker import KEPT
from kedge.policies.sessions.turns import UNKNOWN_END
from tests.policies.sessions.test_links import HERE, THERE, chain


def turn(tracker: SessionTracker, blocks: list[int], now: float, end: TurnEnd = UNKNOWN_END) -> SessionKey:
    """One whole turn at `now`."""
    key = tracker.arrive(HERE, chain(*blocks), now)
    tracker.answered(key, chain(*blocks), now, end)
    return key


def test_a_growing_prompt_is_one_session_and_another_prompt_another() -> None:
    tracker = SessionTracker()
    first = turn(tracker, [1, 2], 0.0)
    assert turn(tracker, [1, 2, 3], 5.0) == first
    assert turn(tracker, [1, 9], 6.0) != first
    assert len(tracker) == 2


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


def test_ranks_change_with_idle_time_without_any_request() -> None:
    tracker = SessionTracker()
    key = turn(tracker, [1], 0.0)
    before = tracker.advance(0.0)[key]
    assert tracker.advance(0.1) == {}
    after = tracker.advance(50.0)[key]
    assert before is not None and after is not None and after > before


def test_a_session_in_flight_ranks_first_and_a_cancelled_one_is_idle_again() -> None:
    tracker = SessionTracker()
    key = turn(tracker, [1], 0.0)
    tracker.arrive(HERE, chain(1, 2), 1.0)
    assert tracker.advance(1.0)[key] == 0.0
    tracker.cancelled(key, 2.0)
    assert tracker.advance(2.0)[key] != 0.0


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
    assert tracker.advance(0.0) == {key: None} and not len(tracker) and tracker.rank(key) == math.inf
    tracker.answered(key, chain(1), 1.0)
    tracker.cancelled(key, 1.0)
    assert tracker.advance(1.0) == {}


def test_agents_whose_prompts_only_begin_alike_do_not_continue() -> None:
    tracker, varies, grows = SessionTracker(), SessionHints(flow="varies"), SessionHints(flow="grows")
    for step in range(4):
        key = tracker.arrive(HERE, chain(1, 2, 100 + step), 0.0, varies)
        tracker.answered(key, chain(1, 2, 100 + step), 0.0)
        key = tracker.arrive(HERE, chain(3, *range(step)), 0.0, grows)
        tracker.answered(key, chain(3, *range(step)), 0.0)
    assert tracker.continues("varies") == 0 and tracker.continues("grows") == 3 / 4
    assert tracker.continues("unknown") == 0


class Traffic(RuleBasedStateMachine):
    """Any order of turns: memory is bounded, and the ranks add up to what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker, self.now = SessionTracker(capacity=4), 0.0
        self.ranks: dict[SessionKey, float] = {}
        self.open: list[tuple[SessionKey, list[int]]] = []

    @rule(blocks=st.lists(st.integers(0, 2), max_size=4), named=st.sampled_from(["", "", "x", "y"]))
    def arrive(self, blocks: list[int], named: str) -> None:
        key = self.tracker.arrive(HERE, chain(*blocks), self.now, SessionHints(session=named))
        self.open.append((key, blocks))

    @rule(cancel=st.booleans(), kept=st.sampled_from([None, 0.0, 3.0, 3600.0]), data=st.data())
    def end_turn(self, cancel: bool, kept: float | None, data: st.DataObject) -> None:
        if self.open:
            key, blocks = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
            if cancel:
                self.tracker.cancelled(key, self.now)
            else:
                self.tracker.answered(key, chain(*blocks, 5), self.now, TurnEnd(keep_for=kept))

    @rule(seconds=st.floats(0, 1e5))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data(), seconds=st.just(math.inf) | st.floats(0, 1e5))
    def expect(self, data: st.DataObject, seconds: float) -> None:
        self.tracker.expect(
            data.draw(st.sampled_from([*sorted(self.ranks, key=str), SessionKey(HERE, "no one")])), self.now, seconds
        )

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.ranks:
            self.tracker.end(data.draw(st.sampled_from(sorted(self.ranks, key=str))))

    @invariant()
    def ranks_are_those_that_were_returned(self) -> None:
        for key, rank in self.tracker.advance(self.now).items():
            if rank is None:
                self.ranks.pop(key, None)
            else:
                self.ranks[key] = rank
        assert len(self.tracker) == len(self.ranks) <= 4
        assert all(self.tracker.rank(key) == rank >= 0 for key, rank in self.ranks.items())
        assert len(self.tracker._links._marks) <= 4


TestTraffic = Traffic.TestCase


def test_the_share_of_requests_that_sessions_come_back_with() -> None:
    tracker = SessionTracker()
    for number in range(100):
        key = tracker.arrive(HERE, [f"one-shot {number}"], float(number))
        tracker.answered(key, [f"one-shot {number}"], float(number))
    assert tracker.returning == 0.0
    history: list[str] = []
    for number in range(100):
        history.append(f"block {number}")
        key = tracker.arrive(HERE, history, 100.0 + number)
        tracker.answered(key, history, 100.0 + number)
    assert 0.9 < tracker.returning <= 1.0
