"""Forecasts that come true are passed on, others become less probable, client by client."""

from __future__ import annotations

import random

import pytest

from kedge.policies.sessions.ledger import ForecastRecord
from kedge.structures.bounded import ENTRIES
from kedge.types import AgentId, AgentKey, Namespace, RunId, TenantId

SPACE = Namespace(TenantId("tests"))
AGENTS = [AgentId(f"a{number}") for number in range(10)]
CALLS = 60


def key(agent: AgentId, client: str = "app") -> AgentKey:
    return AgentKey(SPACE, client, RunId("run"), agent)


def cycle_from(at: int, client: str = "app", own: float = 10.0) -> dict[AgentKey, tuple[float, float] | None]:
    """The forecast of a cycle in which agent `at` has just begun, whose own step is `own`."""
    later = {key(agent, client): ((number - at) % 10 + 0.0, 1.0) for number, agent in enumerate(AGENTS)}
    return {**later, key(AGENTS[at], client): (own, 1.0)}


def play(record: ForecastRecord, order: list[int], client: str = "app", how: str = "running") -> None:
    """Call agents in this order. The forecast comes after the call, or before it and counts it as running, or done."""
    for at in order:
        if how != "later":
            record.on_forecast(cycle_from(at, client, 0.0 if how == "running" else 10.0))
        record.called(key(AGENTS[at], client))
        if how == "later":
            record.on_forecast(cycle_from(at, client))


def probability(record: ForecastRecord, client: str = "app") -> float:
    changed = record.on_forecast({key(AGENTS[0], client): (1.0, 1.0)})
    (next_run,) = changed.values()
    assert next_run is not None
    assert next_run[0] == 1.0
    return next_run[1]


@pytest.mark.parametrize("how", ["running", "done", "later"])
def test_forecasts_that_come_true_stay_as_they_are(how: str) -> None:
    record = ForecastRecord()
    play(record, [number % 10 for number in range(CALLS)], how=how)
    assert record.skill(key(AGENTS[0])) > 0.9
    assert probability(record) == 1.0


@pytest.mark.parametrize("how", ["running", "done", "later"])
def test_forecasts_of_agents_that_call_in_another_order_lose_their_probability(how: str) -> None:
    record, draw = ForecastRecord(), random.Random(0)
    play(record, [draw.randrange(10) for _ in range(CALLS)], how=how)
    assert probability(record) < 0.3


def test_half_right_is_believed() -> None:
    record, draw = ForecastRecord(), random.Random(0)
    order = [0]
    for _ in range(CALLS):
        order.append((order[-1] + 1) % 10 if draw.random() < 0.6 else draw.randrange(10))
    play(record, order)
    assert probability(record) == 1.0


def test_one_clients_forecasts_say_nothing_of_anothers() -> None:
    record, draw = ForecastRecord(), random.Random(0)
    play(record, [draw.randrange(10) for _ in range(CALLS)], "wrong")
    assert probability(record, "wrong") < 0.3
    assert probability(record, "right") == 1.0


def test_forecasts_are_believed_again_once_they_come_true() -> None:
    record, draw = ForecastRecord(), random.Random(0)
    play(record, [draw.randrange(10) for _ in range(CALLS)])
    play(record, [number % 10 for number in range(CALLS)])
    assert probability(record) == 1.0


def test_agents_that_run_in_parallel_are_all_right() -> None:
    record, stage = ForecastRecord(), AGENTS[:4]
    for _ in range(CALLS):
        record.on_forecast({key(agent): (1.0 if agent in stage else 3.0, 1.0) for agent in AGENTS})
        for agent in stage:
            record.called(key(agent))
    assert probability(record) == 1.0


def test_what_no_forecast_names_is_ignored() -> None:
    record = ForecastRecord()
    record.called(key(AGENTS[0]))
    record.on_forecast({key(AGENTS[0]): (1.0, 1.0)})
    record.called(key(AGENTS[5]))
    assert record.skill(key(AGENTS[0])) == 1.0
    assert record.on_forecast({key(AGENTS[0]): None}) == {key(AGENTS[0]): None}


def test_memory_is_bounded() -> None:
    record = ForecastRecord()
    for number in range(2 * ENTRIES):
        client = str(number)
        record.on_forecast(cycle_from(0, client))
        record.called(key(AGENTS[5], client))
        record.on_forecast(dict.fromkeys(cycle_from(0, client)))
    assert len(record) <= ENTRIES
