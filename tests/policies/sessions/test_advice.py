"""What clients say of sessions between requests: what becomes of it, and what stands for later turns."""

from __future__ import annotations

import math

from kedge.hints.actions import ActionOutcome, ActionResult
from kedge.hints.values import MAX_KEPT_SECONDS
from kedge.policies.sessions import SessionHints, SessionKey, SessionLedger, Turn
from kedge.policies.sessions.advice import GIVEN_UP, LATER, NAMELESS, UNKNOWN
from kedge.types import AgentId, AgentKey, Namespace, RunId, TurnHints
from kedge.workflow.steps import NextRun
from tests.policies.sessions.test_links import HERE, THERE, chain

APPLIED, CLIPPED, DEFERRED, REJECTED = ActionResult


class Desk:
    """A ledger on a clock of its own, with one session's turns."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ledger = SessionLedger(100, lambda: self.now)
        self.blocks = 1

    def arrive(self, hints: SessionHints) -> Turn:
        return self.ledger.arrive(HERE, chain(*range(self.blocks)), hints)

    def answer(self, turn: Turn) -> None:
        self.blocks += 1
        self.ledger.answered(turn, chain(*range(self.blocks)))

    def turn(self, hints: SessionHints) -> SessionKey:
        turn = self.arrive(hints)
        self.answer(turn)
        return turn.session

    def say(self, namespace: Namespace = HERE, **said: object) -> list[tuple[str, ActionResult, str]]:
        outcomes = self.ledger.advise(namespace, TurnHints(**said))  # type: ignore[arg-type]
        return [(one.action_id, one.outcome, one.session) for one in outcomes]

    def step(self, key: SessionKey) -> float:
        self.ledger.advance()
        return self.ledger.tracker.rank(key)


MINE = SessionHints("mine")


def test_an_idle_session_goes_first_or_is_kept_from_now_on() -> None:
    desk = Desk()
    key = desk.turn(MINE)
    desk.now = 100.0
    usual = desk.step(key)
    assert desk.say(session="mine", keep_for=0.0) == [("keep_for", APPLIED, "")]
    assert desk.step(key) == math.inf
    assert desk.say(session="mine", keep_for=60.0) == [("keep_for", APPLIED, "")]
    assert desk.step(key) < usual / 10
    desk.now = 159.0
    kept = desk.step(key)
    desk.now = 161.0
    assert desk.step(key) > 10 * kept


def test_what_stands_counts_after_every_answer_unless_the_request_says_otherwise() -> None:
    desk = Desk()
    assert desk.say(session="mine", keep_for=0.0) == [("keep_for", DEFERRED, "")], "it is not known yet"
    assert desk.step(desk.turn(MINE)) == math.inf
    assert desk.step(desk.turn(MINE)) == math.inf
    assert desk.step(desk.turn(SessionHints("mine", keep_for=5.0))) < math.inf
    assert desk.step(desk.turn(MINE)) == math.inf


def test_a_session_in_flight_takes_it_with_its_answer_and_a_time_of_return_once() -> None:
    desk = Desk()
    turn = desk.arrive(MINE)
    assert desk.say(session="mine", keep_for=0.0, returns_in=3.0) == [
        ("keep_for", DEFERRED, ""),
        ("returns_in", DEFERRED, ""),
    ]
    assert desk.step(turn.session) == 0.0
    desk.answer(turn)
    assert desk.step(turn.session) == 3.0, "a time of return goes before what is kept"
    assert desk.step(desk.turn(MINE)) == math.inf


def test_a_session_ends_at_once_or_with_the_request_in_flight() -> None:
    desk = Desk()
    key = desk.turn(MINE)
    assert desk.say(session="mine", is_last=True, keep_for=3.0) == [("keep_for", REJECTED, ""), ("final", APPLIED, "")]
    assert desk.say(session="mine", is_last=True) == [("final", REJECTED, "")]
    for ends in (desk.answer, desk.ledger.cancelled):
        turn = desk.arrive(MINE)
        assert desk.say(session="mine", is_last=True) == [("final", DEFERRED, "")]
        ends(turn)
        assert key not in desk.ledger.tracker
        assert desk.ledger.advance().steps[key] is None


def test_other_sessions_are_expected_where_they_are_idle() -> None:
    desk = Desk()
    key, running = desk.turn(MINE), desk.arrive(SessionHints("busy"))
    expects = {"mine": 4.0, "busy": 1.0, "stranger": 2.0}
    assert desk.say(expects=expects) == [
        ("expects", APPLIED, "mine"),
        ("expects", REJECTED, "busy"),
        ("expects", REJECTED, "stranger"),
    ]
    assert desk.step(key) == 4.0 and desk.step(running.session) == 0.0
    assert desk.say(expects={"mine": math.inf}) == [("expects", APPLIED, "mine")]
    assert desk.step(key) == math.inf
    assert desk.say(session="mine", keep_for=9.0) == [("keep_for", APPLIED, "")], "the last word counts"
    assert desk.step(key) < math.inf


def test_nobody_speaks_for_another_tenant_or_for_nobody() -> None:
    desk = Desk()
    key = desk.turn(MINE)
    before = desk.step(key)
    assert desk.say(THERE, session="mine", keep_for=0.0, returns_in=1.0) == [
        ("keep_for", DEFERRED, ""),
        ("returns_in", REJECTED, ""),
    ]
    assert desk.say(THERE, expects={"mine": 0.0}) == [("expects", REJECTED, "mine")]
    assert desk.say(keep_for=1.0, returns_in=1.0, is_last=True) == [
        ("keep_for", REJECTED, ""),
        ("returns_in", REJECTED, ""),
    ], "the end of a call without a session is that of its run"
    assert desk.step(key) == before


def test_a_time_that_is_too_long_is_clipped_and_every_outcome_has_a_reason() -> None:
    desk = Desk()
    desk.turn(MINE)
    clipped = desk.ledger.advise(HERE, TurnHints("mine", keep_for=1e9))[0]
    assert (clipped.outcome, f"{MAX_KEPT_SECONDS:g} s at most" in clipped.reason) == (CLIPPED, True)
    later = desk.ledger.advise(HERE, TurnHints("other", keep_for=1e9))[0]
    assert later.outcome is DEFERRED and later.reason.startswith(LATER) and "at most" in later.reason
    said = TurnHints(keep_for=1.0, expects={"gone": 1.0})
    assert [one.reason for one in desk.ledger.advise(HERE, said)] == [NAMELESS, UNKNOWN]
    ended = desk.ledger.advise(HERE, TurnHints("mine", is_last=True, returns_in=1.0))
    assert [(one.reason, one.outcome) for one in ended][0] == (GIVEN_UP, REJECTED)


def test_where_the_forecast_of_its_agent_decides_that_is_said() -> None:
    desk = Desk()
    agent = AgentKey(HERE, "", RunId("r"), AgentId("a"))
    mine = SessionHints("mine", flow="a", agent=agent)
    desk.turn(mine)
    [first] = desk.ledger.advise(HERE, TurnHints("mine", keep_for=9.0))
    assert first.outcome is DEFERRED and "continue one another" in first.reason
    desk.turn(mine)
    assert desk.ledger.advise(HERE, TurnHints("mine", keep_for=9.0))[0].outcome is APPLIED
    desk.ledger.on_forecast({agent: NextRun(2.0)})
    [held] = desk.ledger.advise(HERE, TurnHints("mine", keep_for=9.0))
    assert held.outcome is DEFERRED and "forecast" in held.reason
    [expected] = desk.ledger.advise(HERE, TurnHints(expects={"mine": 1.0}))
    assert expected == ActionOutcome("expects", held.reason, DEFERRED, "mine")


def test_no_tenant_s_hints_push_out_those_of_others() -> None:
    desk = Desk()
    desk.ledger._advice._standing._limit = 3
    key = desk.turn(MINE)
    desk.say(session="mine", keep_for=0.0)
    for name in range(9):
        desk.say(THERE, session=str(name), keep_for=1.0)
    assert len(desk.ledger._advice) == 3
    assert desk.step(key) == desk.step(desk.turn(MINE)) == math.inf
