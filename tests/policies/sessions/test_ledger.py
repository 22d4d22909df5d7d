"""What both engines keep of sessions: turns, their order, which policy rules, and what clients say between requests."""

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kedge.hints.actions import ActionOutcome, ActionResult
from kedge.policies.sessions import SessionHints, SessionKey, SessionLedger, Turn, TurnEnd
from kedge.policies.sessions.ledger import GIVEN_UP, LATER, NAMELESS, NO_SESSIONS, UNKNOWN, refused
from kedge.policies.sessions.tracker import SessionState, SessionTracker
from kedge.types import AgentKey, GenerateRequest, Namespace, Segment, TurnHints, WorkflowAgent
from kedge.workflow.steps import NextRun
from tests.policies.sessions.test_links import HERE, THERE, chain


@pytest.fixture
def ledger() -> SessionLedger:
    """A ledger whose clock stands still."""
    return SessionLedger(100, lambda: 0.0)


def test_the_hints_of_a_request_name_its_agent_in_all_runs_and_in_this_one() -> None:
    turn = TurnHints("s", "p", 2.5, True, 60.0, {"other": 1.0})
    request = GenerateRequest((Segment((1, 2), "p0"),), tenant="t", workflow="w", run="r", agent="a", turn=turn)
    agent = AgentKey(Namespace("t"), "", "r", "a")
    assert SessionHints.of(request) == SessionHints(
        "s", "p", 2.5, True, 60.0, {"other": 1.0}, flow=(Namespace("t"), "w", "a"), agent=agent
    )
    assert SessionHints.of(GenerateRequest((Segment((1,), "p0"),))) == SessionHints()


def test_a_request_says_how_long_its_session_is_kept_and_which_others_are_needed(ledger: SessionLedger) -> None:
    waiting, done = (ledger.arrive(HERE, chain(number), SessionHints(str(number))) for number in (1, 2))
    ledger.answered(waiting, chain(1, 3))
    ledger.answered(done, chain(2, 3), TurnEnd(returns_in=7.0))
    ledger.advance()
    own = ledger.arrive(HERE, chain(4), SessionHints("own", keep_for=0.0, expects={"1": 0.0, "2": math.inf, "": 1.0}))
    steps = ledger.advance().steps
    assert (steps[waiting.session], steps[done.session]) == ((0.0, 1.0), (math.inf, 1.0))
    ledger.answered(own, chain(4, 5))
    assert ledger.advance().steps[own.session] == (math.inf, 1.0)
    ledger.arrive(THERE, chain(4), SessionHints("stranger", expects={"2": 0.0}))
    assert done.session not in ledger.advance().steps, "nobody ranks another tenant's sessions"


def test_what_a_request_says_of_its_end_counts_unless_the_engine_knows_better(ledger: SessionLedger) -> None:
    turns = [ledger.arrive(HERE, chain(at), SessionHints(f"s{at}", returns_in=5.0)) for at in range(2)]
    last = ledger.arrive(HERE, chain(2), SessionHints("s2", is_last=True))
    ledger.answered(turns[0], chain(0, 10))
    ledger.answered(turns[1], chain(1, 11), TurnEnd(returns_in=3.0))
    ledger.answered(last, chain(2, 12))
    steps = ledger.advance().steps
    assert [steps[turn.session] for turn in (*turns, last)] == [(5.0, 1.0), (3.0, 1.0), None]
    assert last.session not in ledger.tracker


AGENT, FLOW = AgentKey(HERE, "", "run", "writer"), WorkflowAgent(HERE, "flow", "writer")
WRITER = SessionHints(flow=FLOW, agent=AGENT)


def served(ledger: SessionLedger, blocks: list[int], hints: SessionHints = WRITER) -> SessionKey:
    turn = ledger.arrive(HERE, chain(*blocks), hints)
    ledger.answered(turn, turn.chain)
    return turn.session


def test_what_varies_behind_a_fixed_prompt_is_not_expected_again(ledger: SessionLedger) -> None:
    ledger.on_forecast({AGENT: (3.0, 1.0)})
    for call in range(3):
        key = served(ledger, [1, 2, 100 + call])
        assert ledger.advance().steps[key] is None and not ledger.expects(key)


def test_an_agent_whose_prompts_grow_returns_when_its_forecast_says(ledger: SessionLedger) -> None:
    ledger.on_forecast({AGENT: (3.0, 1.0)})
    served(ledger, [1])
    key = served(ledger, [1, 2])
    share = 1 / 2
    assert ledger.advance().steps[key] == ((3 + 1) / share, 1.0)
    ledger.on_forecast({AGENT: (1.0, 1.0)})
    assert ledger.advance().steps == {key: ((1 + 1) / share, 1.0)}
    ledger.on_forecast({AGENT: None})
    assert ledger.advance().steps == {key: None}, "its run is over"
    assert not (ledger._places or ledger._agents or ledger._sessions), "nothing is left behind"


def test_a_session_is_that_of_the_run_that_it_was_last_seen_in(ledger: SessionLedger) -> None:
    first, last = (AgentKey(HERE, "", run, "writer") for run in ("first", "last"))
    for agent in (first, last):
        ledger.on_forecast({agent: NextRun(3.0)})
        key = served(ledger, [1], SessionHints("mine", flow=FLOW, agent=agent))
    assert ledger._sessions == {last: key}
    ledger.on_forecast({first: None})
    assert key in ledger.tracker
    ledger.on_forecast({last: None})
    assert ledger.advance().steps == {key: None} and not ledger._sessions


def test_without_a_forecast_the_rank_counts_in_steps_of_the_observed_pace() -> None:
    now = 0.0
    ledger = SessionLedger(100, lambda: now)
    idle = served(ledger, [1], SessionHints())
    in_seconds = ledger.tracker.rank(idle)
    assert ledger.advance().steps[idle] == (in_seconds, 1.0)
    for call in range(200):  # of an agent; sessions without one say nothing of a workflow's steps
        turn = ledger.arrive(HERE, chain(9, call), WRITER)
        now += 10.0
        ledger.answered(turn, turn.chain)
    key = served(ledger, [2], SessionHints())
    assert ledger.advance().steps[key] == (pytest.approx(ledger.tracker.rank(key) / 10, rel=0.01), 1.0)


def test_who_waits_goes_before_all_that_are_idle_and_by_place(ledger: SessionLedger) -> None:
    idle = served(ledger, [1], SessionHints())
    first, last = (ledger.arrive(HERE, chain(number)) for number in (2, 3))

    def order() -> list[SessionKey]:
        return sorted(known, key=lambda key: known[key])

    known = {key: (step or (math.inf,))[0] for key, step in ledger.advance().steps.items()}
    assert order() == [first.session, last.session, idle]
    ledger.waiting([last, first])
    known |= {key: (step or (math.inf,))[0] for key, step in ledger.advance().steps.items()}
    assert order() == [last.session, first.session, idle] and known[first.session] < 0


# what clients say of sessions between requests ------------------------------------------------------------------------

APPLIED, _, DEFERRED, REJECTED = ActionResult


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

    def say(self, namespace: Namespace = HERE, **said: object) -> dict[str, ActionResult]:
        outcomes = self.ledger.advise(namespace, TurnHints(**said))  # type: ignore[arg-type]
        return {f"{one.action_id} {one.session}".strip(): one.outcome for one in outcomes}

    def step(self, key: SessionKey) -> float:
        self.ledger.advance()
        return self.ledger.tracker.rank(key)


MINE = SessionHints("mine")


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_an_idle_session_goes_first_or_is_kept_from_now_on(desk: Desk) -> None:
    key = desk.turn(MINE)
    desk.now = 100.0
    usual = desk.step(key)
    assert desk.say(session="mine", keep_for=0.0) == {"keep_for": APPLIED}
    assert desk.step(key) == math.inf
    assert desk.say(session="mine", keep_for=60.0) == {"keep_for": APPLIED}
    assert desk.step(key) < usual / 10
    desk.now = 159.0
    kept = desk.step(key)
    desk.now = 161.0
    assert desk.step(key) > 10 * kept


def test_what_stands_counts_after_every_answer_unless_the_request_says_otherwise(desk: Desk) -> None:
    assert desk.say(session="mine", keep_for=0.0) == {"keep_for": DEFERRED}, "it is not known yet"
    assert desk.step(desk.turn(MINE)) == math.inf
    assert desk.step(desk.turn(MINE)) == math.inf
    assert desk.step(desk.turn(SessionHints("mine", keep_for=5.0))) < math.inf
    assert desk.step(desk.turn(MINE)) == math.inf


def test_a_session_in_flight_takes_it_with_its_answer_and_a_time_of_return_once(desk: Desk) -> None:
    turn = desk.arrive(MINE)
    assert desk.say(session="mine", keep_for=0.0, returns_in=3.0) == {"keep_for": DEFERRED, "returns_in": DEFERRED}
    assert desk.step(turn.session) == 0.0
    desk.answer(turn)
    assert desk.step(turn.session) == 3.0, "a time of return goes before what is kept"
    assert desk.step(desk.turn(MINE)) == math.inf


def test_a_session_ends_at_once_or_with_the_request_in_flight(desk: Desk) -> None:
    key = desk.turn(MINE)
    assert desk.say(session="mine", is_last=True, keep_for=3.0) == {"keep_for": REJECTED, "final": APPLIED}
    assert desk.say(session="mine", is_last=True) == {"final": REJECTED}
    for ends in (desk.answer, desk.ledger.cancelled):
        turn = desk.arrive(MINE)
        assert desk.say(session="mine", is_last=True) == {"final": DEFERRED}
        ends(turn)
        assert key not in desk.ledger.tracker
        assert desk.ledger.advance().steps[key] is None


def test_other_sessions_are_expected_where_they_are_idle(desk: Desk) -> None:
    key, running = desk.turn(MINE), desk.arrive(SessionHints("busy"))
    expects = {"mine": 4.0, "busy": 1.0, "new": 2.0}
    assert desk.say(expects=expects) == {"expects mine": APPLIED, "expects busy": REJECTED, "expects new": REJECTED}
    assert desk.step(key) == 4.0 and desk.step(running.session) == 0.0
    assert desk.say(expects={"mine": math.inf}) == {"expects mine": APPLIED}
    assert desk.step(key) == math.inf
    assert desk.say(session="mine", keep_for=9.0) == {"keep_for": APPLIED}, "the last word counts"
    assert desk.step(key) < math.inf


def test_nobody_speaks_for_another_tenant_or_for_nobody(desk: Desk) -> None:
    key = desk.turn(MINE)
    before = desk.step(key)
    assert desk.say(THERE, session="mine", keep_for=0.0) == {"keep_for": DEFERRED}
    assert desk.say(THERE, session="mine", returns_in=1.0) == {"returns_in": REJECTED}
    assert desk.say(THERE, expects={"mine": 0.0}) == {"expects mine": REJECTED}
    # the end of a call without a session is that of its run
    assert desk.say(is_last=True) == {}
    assert desk.say(keep_for=1.0, returns_in=1.0, is_last=True) == {"keep_for": REJECTED, "returns_in": REJECTED}
    assert desk.step(key) == before


def test_every_outcome_has_a_reason(desk: Desk) -> None:
    desk.turn(MINE)
    said = TurnHints("other", keep_for=1.0), TurnHints(keep_for=1.0, expects={"gone": 1.0})
    assert [one.reason for each in said for one in desk.ledger.advise(HERE, each)] == [LATER, NAMELESS, UNKNOWN]
    ended = desk.ledger.advise(HERE, TurnHints("mine", is_last=True, returns_in=1.0))
    assert [(one.reason, one.outcome) for one in ended][0] == (GIVEN_UP, REJECTED)
    assert [(one.action_id, one.reason) for one in refused(said[0], NO_SESSIONS)] == [("keep_for", NO_SESSIONS)]


def test_where_the_forecast_of_its_agent_decides_that_is_said(desk: Desk) -> None:
    agent = AgentKey(HERE, "", "r", "a")
    mine = SessionHints("mine", flow=FLOW, agent=agent)
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


def test_no_tenant_s_hints_push_out_those_of_others(desk: Desk) -> None:
    desk.ledger._standing._limit = 3
    key = desk.turn(MINE)
    desk.say(session="mine", keep_for=0.0)
    for name in range(9):
        desk.say(THERE, session=str(name), keep_for=1.0)
    assert len(desk.ledger._standing) == 3
    assert desk.step(key) == desk.step(desk.turn(MINE)) == math.inf


class Traffic(RuleBasedStateMachine):
    """Any order of turns: memory is bounded, steps are those of the ranks, and turns in flight go before all others."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.open = 0.0, list[Turn]()
        self.ledger = SessionLedger(64, lambda: self.now)
        self.tracker = self.ledger.tracker = SessionTracker(capacity=4)
        self.steps: dict[SessionKey, float] = {}

    @rule(blocks=st.lists(st.integers(0, 2), max_size=4), named=st.sampled_from(["", "", "x", "y"]))
    def arrive(self, blocks: list[int], named: str) -> None:
        self.open.append(self.ledger.arrive(HERE, chain(*blocks), SessionHints(session=named)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), returns_in=st.sampled_from([None, 0.0, 5.0]), kept=st.sampled_from([None, 0.0, 3.0, 3600.0]))
    def end_turn(self, data: st.DataObject, returns_in: float | None, kept: float | None) -> None:
        turn = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if data.draw(st.booleans()):
            self.ledger.answered(turn, [*turn.chain, 9], TurnEnd(returns_in=returns_in, keep_for=kept))
        else:
            self.ledger.cancelled(turn)

    @rule(seconds=st.floats(0, 1e5))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data(), seconds=st.just(math.inf) | st.floats(0, 1e5))
    def expect(self, data: st.DataObject, seconds: float) -> None:
        key = data.draw(st.sampled_from([*sorted(self.steps, key=str), SessionKey(HERE, "no one")]))
        self.tracker.expect(key, self.now, seconds)

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.tracker.end(data.draw(st.sampled_from(sorted(self.steps, key=str))))

    @invariant()
    def is_sound(self) -> None:
        for key, next_run in self.ledger.advance().steps.items():
            if next_run is None:
                self.steps.pop(key, None)
            else:
                self.steps[key] = next_run[0]
        assert self.ledger.advance().steps == {}
        assert len(self.tracker._sessions) == len(self.steps) <= 4 and len(self.tracker._links._marks) <= 4
        running = {turn.session for turn in self.open}
        assert not any(self.tracker.state(key) is SessionState.IN_FLIGHT for key in self.steps.keys() - running)
        assert all(key in running if step < 0 else step == self.tracker.rank(key) for key, step in self.steps.items())


TestTraffic = Traffic.TestCase
