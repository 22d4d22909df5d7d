"""Prompts of the agents that a client is going to call: told early, as far as they are known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kedge.engine.echo import ByteTokenizer, EchoEngine
from kedge.engine.local.engine import LocalEngine
from kedge.server.workflows import client_runs
from kedge.types import GenerateRequest
from tests.engine.local.conftest import engine_of, tiny_model
from tests.server.conftest import YAML, Served, serving

CHAT = "/v1/chat/completions"
TEAM = """
name: team
inputs: [user_question]
turns: 2
loops: [[judge, solver]]
agents:
  - {id: solver, system: You solve it., user: "Q: {user_question} J: {agent_judge_current}", max_tokens: 6}
  - {id: critic, system: You doubt it., user: "Q: {user_question} S: {agent_solver_current}", max_tokens: 6}
  - {id: judge, system: You judge it., max_tokens: 6,
     user: "S: {agent_solver_current} C: {agent_critic_current} Q: {user_question}"}
"""
GAP = "…"


@pytest.fixture
def served() -> Iterator[Served]:
    with EchoEngine({"solver": "four", "critic": "five", "judge": "six"}) as engine, serving(engine) as running:
        yield running


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with served.http() as opened:
        register(opened)
        yield opened


def register(http: httpx.Client, flow: str = TEAM) -> None:
    assert http.post("/v1/workflows", content=flow, headers=YAML).status_code in (200, 201)


def call(served: Served, http: httpx.Client, agent: str, bindings: dict[str, str], **kedge: Any) -> dict[str, Any]:
    """An agent's answer, once all that follows from it has been done."""
    said = {"workflow": "team", "run": "r", "agent": agent, "bindings": bindings, **kedge}
    answer = http.post(CHAT, json={"messages": [], "temperature": 0, "kedge": said})
    assert answer.status_code == 200, answer.text
    served.wait_quiet()
    return answer.json()


def prompts(requests: list[GenerateRequest]) -> list[tuple[str, list[str]]]:
    """Agents with what fills their prompts; a gap for what is yet to come."""
    decode = ByteTokenizer().decode
    return [(one.agent, [decode(s.tokens) or GAP for s in one.segments if s.is_placeholder]) for one in requests]


# what is told ---------------------------------------------------------------------------------------------------------


def test_the_next_agent_is_told_of_while_another_one_speaks_and_again_when_it_has(
    served: Served, http: httpx.Client
) -> None:
    call(served, http, "solver", {"user_question": "2+2?"})
    assert prompts(served.engine.prepared) == [("critic", ["2+2?", GAP]), ("critic", ["2+2?", "four"]),
                                               ("judge", ["four", GAP, "2+2?"])]  # fmt: skip


@pytest.mark.parametrize("reuse", [None, "exact"])
def test_what_is_told_is_what_the_agent_then_asks_for(served: Served, http: httpx.Client, reuse: str | None) -> None:
    said = {"reuse": reuse} if reuse else {}
    for agent in ("solver", "critic", "judge", "solver", "critic", "judge"):
        before = len(served.engine.prepared)
        call(served, http, agent, {"user_question": "2+2?"}, **said)
    assert len(served.engine.prepared) == before, "after the last turn nobody is expected"
    told = {one.segments: one for one in served.engine.prepared}
    for request in served.engine.requests[1:]:
        expected = told[request.segments]
        for name in ("agent", "workflow", "run", "client", "tenant", "reuse", "fixed"):
            assert getattr(expected, name) == getattr(request, name), name


def test_a_text_that_the_client_changed_is_expected_again(served: Served, http: httpx.Client) -> None:
    call(served, http, "solver", {"user_question": "2+2?"})
    call(served, http, "critic", {"user_question": "2+2?", "agent_solver_current": "FOUR"})
    assert prompts(served.engine.prepared[-2:]) == [("judge", ["FOUR", "five", "2+2?"]), ("solver", ["2+2?", GAP])]
    call(served, http, "judge", {"user_question": "2+2?", "agent_solver_current": "FOUR"})
    assert served.engine.requests[-1].segments in [one.segments for one in served.engine.prepared]


def test_the_clients_own_steps_say_who_is_next(served: Served, http: httpx.Client) -> None:
    steps = {"solver": 0, "judge": 1, "critic": 2, "stranger": 1}
    call(served, http, "solver", {"user_question": "2+2?"}, steps=steps, seq=1)
    assert {one.agent for one in served.engine.prepared} == {"judge"}
    assert prompts(served.engine.prepared[-1:]) == [("judge", ["four", GAP, "2+2?"])]
    http.post("/v1/hints", json={"kedge": {"workflow": "team", "run": "r", "seq": 2, "steps": {"solver": 1}}})
    assert prompts(served.engine.prepared[-1:]) == [("solver", ["2+2?", GAP])], "its second turn reads the judge"
    before = len(served.engine.prepared)
    http.post("/v1/hints", json={"kedge": {"workflow": "team", "run": "r", "seq": 1, "steps": {"critic": 1}}})
    assert {one.agent for one in served.engine.prepared[before:]} <= {"solver"}, "a late forecast is none"


@pytest.mark.parametrize("kedge", [{"run": ""}, {"workflow": ""}, {"agent": "nobody"}])
def test_without_a_run_or_a_template_nothing_is_told(served: Served, http: httpx.Client, kedge: dict[str, str]) -> None:
    said = {"workflow": "team", "run": "r", "agent": "solver", **kedge}
    assert http.post(CHAT, json={"messages": [{"role": "user", "content": "2+2?"}], "kedge": said}).status_code == 200
    served.wait_quiet()
    assert served.engine.prepared == []


# bounds and ends ------------------------------------------------------------------------------------------------------


def test_of_a_run_only_the_nearest_agents_are_told(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_runs, "PREPARED_AGENTS", 1)
    call(served, http, "solver", {"user_question": "2+2?"}, steps={"critic": 1, "judge": 1})
    assert {one.agent for one in served.engine.prepared} == {"critic"}
    http.post("/v1/hints", json={"kedge": {"workflow": "team", "run": "r", "steps": {"critic": 1, "judge": 0.5}}})
    assert served.engine.prepared[-1].agent == "judge"


def test_what_is_remembered_of_a_run_is_bounded(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_runs, "ENTRIES", 1)
    call(served, http, "solver", {"user_question": "2+2?"})
    (known,) = served.workflows.client_runs._runs["default"].values()
    assert [str(sample) for sample in known.values] == ["input_user_question@0"]
    call(served, http, "critic", {"user_question": "2+2?"})
    assert len(known.values) == 1


def test_a_run_that_is_over_is_forgotten(served: Served, http: httpx.Client) -> None:
    runs = served.workflows.client_runs
    call(served, http, "solver", {"user_question": "2+2?"})
    assert runs._runs["default"]
    call(served, http, "critic", {"user_question": "2+2?"}, final=True)
    assert not runs._runs["default"]
    (ended,) = {key.run_id for changes, _ in served.engine.forecasts[-1:] for key in changes}
    assert (ended, set(served.engine.forecasts[-1][0].values())) == ("r", {None}), "the engine drops what it prepared"


def test_a_run_that_expires_is_forgotten_for_everybodys_sake(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(served, http, "solver", {"user_question": "2+2?"})
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + client_runs.TTL)
    monkeypatch.setattr(client_runs, "time", later)
    before = len(served.engine.forecasts)
    http.post("/v1/hints", json={"kedge": {"run": "other", "steps": {"a": 1}}})
    gone = {key.agent for changes, _ in served.engine.forecasts[before:] for key, one in changes.items() if one is None}
    assert {"critic", "judge"} <= gone
    assert {key.run_id for key in served.workflows.client_runs._runs["default"]} == {"other"}


# a real model ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with engine_of(tiny_model("llama"), planner={"by_cost": False, "move": "never"}) as built:
        yield built


def answers(engine: LocalEngine, agents: list[str], *, waits: bool, **kedge: Any) -> list[dict[str, Any]]:
    """What agents say; with `waits` the engine has time between two calls."""
    with serving(engine) as running, running.http() as http:
        register(http)
        said = []
        for agent in agents:
            bindings = {"user_question": "How much is 2+2?"}
            if agent == "judge":
                bindings |= {"agent_solver_current": "4", "agent_critic_current": "5"}
            said.append(call(running, http, agent, bindings, **kedge))
            if waits:
                engine.wait_idle(60)
        http.post("/v1/hints", json={"kedge": {"run": kedge["run"], "final": True}})
        return said


def texts(said: list[dict[str, Any]]) -> list[str]:
    return [one["choices"][0]["message"]["content"] for one in said]


def preassembled(said: list[dict[str, Any]]) -> list[int]:
    return [one["kedge"]["receipts"][0]["preassembled"] for one in said]


@pytest.mark.parametrize("reuse", ["exact", "translate"])
def test_a_prompt_is_ready_when_its_agent_calls_and_says_the_same(engine: LocalEngine, reuse: str) -> None:
    agents = ["solver", "critic"]
    plain = answers(engine, agents, waits=True, run=f"off-{reuse}", reuse="off")
    ready = answers(engine, agents, waits=True, run=f"on-{reuse}", reuse=reuse)
    assert preassembled(plain) == [0, 0]
    assert preassembled(ready)[0] == 0
    assert preassembled(ready)[1] == ready[1]["usage"]["prompt_tokens"] - 1, "all but the token that gives the logits"
    assert texts(ready) == texts(plain)
