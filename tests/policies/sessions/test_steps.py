"""Forecasts and what is learned, on one scale."""

from __future__ import annotations

import math

import pytest

from kedge.policies.sessions import SessionHints, SessionKey, SessionSteps
from kedge.types import AgentId, AgentKey, RunId
from tests.policies.sessions.test_links import HERE, chain

AGENT = AgentKey(HERE, "", RunId("run"), AgentId("writer"))
HINTS = SessionHints(flow="writer", agent=AGENT)


def turn(steps: SessionSteps, blocks: list[int], now: float, hints: SessionHints = HINTS) -> SessionKey:
    key = steps.arrive(HERE, chain(*blocks), now, hints)
    steps.answered(key, chain(*blocks), now)
    return key


def test_what_varies_behind_a_fixed_prompt_is_not_expected_again() -> None:
    steps = SessionSteps()
    steps.on_forecast({AGENT: (3.0, 1.0)})
    for call in range(3):
        key = turn(steps, [1, 2, 100 + call], float(call))
        assert steps.advance(float(call))[key] is None and not steps.expects(key)


def test_an_agent_whose_prompts_grow_returns_when_its_forecast_says() -> None:
    steps = SessionSteps()
    steps.on_forecast({AGENT: (3.0, 1.0)})
    turn(steps, [1], 0.0)
    key = turn(steps, [1, 2], 1.0)
    share = 1 / 2
    assert steps.advance(1.0)[key] == ((3 + 1) / share, 1.0)
    steps.on_forecast({AGENT: (1.0, 1.0)})
    assert steps.advance(1.0) == {key: ((1 + 1) / share, 1.0)}
    steps.on_forecast({AGENT: None})
    assert steps.advance(1.0) == {key: None}, "its run is over"


def test_without_a_forecast_the_rank_counts_in_steps_of_the_observed_pace() -> None:
    steps = SessionSteps()
    key = turn(steps, [1], 0.0, SessionHints())
    steps.advance(0.0)
    in_seconds = steps.tracker.rank(key)
    paced = SessionSteps()
    agent = paced.arrive(HERE, chain(9), 0.0, HINTS)
    for _ in range(200):
        paced.observe_call(agent, 10.0)
    key = turn(paced, [1], 0.0, SessionHints())
    paced.observe_call(key, 1e6)
    assert paced.advance(0.0)[key] == (pytest.approx(in_seconds / 10, rel=0.01), 1.0)


def test_who_waits_goes_before_all_that_are_idle_and_by_place() -> None:
    steps = SessionSteps()
    idle = turn(steps, [1], 0.0, SessionHints())
    last = steps.arrive(HERE, chain(2), 0.0, place=5)
    first = steps.arrive(HERE, chain(3), 0.0, place=0)
    first_steps = steps.advance(0.0)
    values = [first_steps[key] for key in (first, last, idle)]
    assert all(values) and [one[0] for one in values if one] == sorted(one[0] for one in values if one)
    assert values[1] is not None and values[1][0] < 0
    steps.hold(last, 0)
    assert steps.advance(0.0)[last] == first_steps[first]
    steps.cancelled(last, 0.0)
    assert (steps.advance(0.0)[last] or (math.nan,))[0] > 0


def test_a_forgotten_session_leaves_nothing_behind() -> None:
    steps = SessionSteps()
    steps.on_forecast({AGENT: (3.0, 1.0)})
    key = turn(steps, [1], 0.0)
    steps.tracker.end(key)
    assert steps.advance(0.0)[key] is None
    assert not (steps._places or steps._agents or steps._sessions)
