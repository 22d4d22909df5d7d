"""What both engines keep of sessions: turns, their order, and which policy rules."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kedge.policies.sessions import SessionHints, SessionKey, SessionLedger, Turn, TurnEnd
from kedge.types import AgentId, AgentKey, GenerateRequest, Namespace, RunId, Segment, TenantId, TurnHints, WorkflowId
from tests.policies.sessions.test_links import HERE, THERE, chain


def test_the_hints_of_a_request_name_its_agent_in_all_runs_and_in_this_one() -> None:
    request = GenerateRequest(
        (Segment((1, 2), "p0"),),
        tenant=TenantId("t"),
        workflow=WorkflowId("w"),
        run=RunId("r"),
        agent=AgentId("a"),
        turn=TurnHints("s", "p", 2.5, True, 60.0, {"other": 1.0}),
    )
    space = Namespace(TenantId("t"))
    agent = AgentKey(space, "", RunId("r"), AgentId("a"))
    assert SessionHints.of(request) == SessionHints(
        "s", "p", 2.5, True, 60.0, {"other": 1.0}, flow=(space, "w", "a"), agent=agent
    )
    assert SessionHints.of(GenerateRequest((Segment((1,), "p0"),))) == SessionHints()


def test_a_request_says_how_long_its_session_is_kept_and_which_others_are_needed() -> None:
    ledger = SessionLedger(100, lambda: 0.0)
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


def test_a_turn_that_ends_is_idle_and_returns_when_it_is_known_to() -> None:
    now = 0.0
    ledger = SessionLedger(100, lambda: now)
    answered, cancelled = (ledger.arrive(HERE, chain(number)) for number in (1, 2))
    ledger.answered(answered, chain(1, 3), TurnEnd(returns_in=7.0))
    ledger.cancelled(cancelled)
    steps = ledger.advance().steps
    assert steps[answered.session] == (7.0, 1.0)
    assert (steps[cancelled.session] or (-1.0,))[0] > 0
    now = 1.0
    assert ledger.arrive(HERE, chain(1, 3, 4)).session == answered.session


def test_what_a_request_says_of_its_end_counts_unless_the_engine_knows_better() -> None:
    ledger = SessionLedger(100, lambda: 0.0)
    turns = [ledger.arrive(HERE, chain(at), SessionHints(f"s{at}", returns_in=5.0)) for at in range(2)]
    last = ledger.arrive(HERE, chain(2), SessionHints("s2", is_last=True))
    ledger.answered(turns[0], chain(0, 10))
    ledger.answered(turns[1], chain(1, 11), TurnEnd(returns_in=3.0))
    ledger.answered(last, chain(2, 12))
    steps = ledger.advance().steps
    assert [steps[turn.session] for turn in (*turns, last)] == [(5.0, 1.0), (3.0, 1.0), None]
    assert last.session not in ledger.tracker


AGENT = AgentKey(HERE, "", RunId("run"), AgentId("writer"))
WRITER = SessionHints(flow="writer", agent=AGENT)


def served(ledger: SessionLedger, blocks: list[int], hints: SessionHints = WRITER) -> SessionKey:
    turn = ledger.arrive(HERE, chain(*blocks), hints)
    ledger.answered(turn, turn.chain)
    return turn.session


def test_what_varies_behind_a_fixed_prompt_is_not_expected_again() -> None:
    ledger = SessionLedger(100, lambda: 0.0)
    ledger.on_forecast({AGENT: (3.0, 1.0)})
    for call in range(3):
        key = served(ledger, [1, 2, 100 + call])
        assert ledger.advance().steps[key] is None and not ledger.expects(key)


def test_an_agent_whose_prompts_grow_returns_when_its_forecast_says() -> None:
    ledger = SessionLedger(100, lambda: 0.0)
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


def test_who_waits_goes_before_all_that_are_idle_and_by_place() -> None:
    ledger = SessionLedger(100, lambda: 0.0)
    idle = served(ledger, [1], SessionHints())
    first, last = (ledger.arrive(HERE, chain(number)) for number in (2, 3))

    def order() -> list[SessionKey]:
        return sorted(known, key=lambda key: known[key])

    known = {key: (step or (math.inf,))[0] for key, step in ledger.advance().steps.items()}
    assert order() == [first.session, last.session, idle]
    ledger.waiting([last, first])
    known |= {key: (step or (math.inf,))[0] for key, step in ledger.advance().steps.items()}
    assert order() == [last.session, first.session, idle] and known[first.session] < 0


def play(rounds: int) -> list[tuple[bool, bool]]:
    """Sessions that take turns and all fit, with hints that say the opposite. Per round: whether the policy has to be
    swapped, and whether that of sessions rules then.
    """
    now, found = 0.0, []
    ledger = SessionLedger(200, lambda: now)
    agents = itertools.count()
    for at in range(rounds):
        now += 1.0
        for first in (0, 1000):
            turn = ledger.arrive(HERE, chain(*range(first, first + 40 + at // 6)))
            ledger.answered(turn, turn.chain)
            agent = AgentKey(HERE, "", RunId("r"), AgentId(str(next(agents))))
            ledger.on_forecast({agent: (0.0, 1.0)})
            other = ledger.arrive(HERE, [random.Random(f"{at}{first}{block}").random() for block in range(30)])
            ledger.answered(other, other.chain)
            ledger.own(agent, other.chain)
            found.append((ledger.advance().swaps_policy, ledger.guard.trusted))
    return found


def test_the_policy_is_swapped_exactly_when_the_guard_changes_its_mind() -> None:
    found, trusted = play(60), True
    for swaps, now_trusted in found:
        assert swaps == (trusted != now_trusted)
        trusted = now_trusted
    assert any(swaps for swaps, _ in found) and not trusted


class Turns(RuleBasedStateMachine):
    """Turns begin and end in any order: those in flight are always needed before all others."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.open = 0.0, list[Turn]()
        self.ledger = SessionLedger(64, lambda: self.now)
        self.steps: dict[object, float] = {}

    @rule(blocks=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def arrive(self, blocks: list[int]) -> None:
        self.open.append(self.ledger.arrive(HERE, chain(*blocks)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), returns_in=st.sampled_from([None, 0.0, 5.0]))
    def end(self, data: st.DataObject, returns_in: float | None) -> None:
        turn = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if data.draw(st.booleans()):
            self.ledger.answered(turn, [*turn.chain, 9], TurnEnd(returns_in=returns_in))
        else:
            self.ledger.cancelled(turn)

    @rule(seconds=st.floats(0, 1e4))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def waiting_goes_first(self) -> None:
        for key, next_run in self.ledger.advance().steps.items():
            self.steps[key] = float("inf") if next_run is None else next_run[0]
        assert self.ledger.advance().steps == {}
        assert all(step >= 0 for key, step in self.steps.items() if key not in {turn.session for turn in self.open})


TestTurns = Turns.TestCase
