"""Runs that clients drive call by call: templates that the server fills, and prompts that are expected."""

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kedge.engine.echo import ByteTokenizer, EchoEngine
from kedge.hints import Hints
from kedge.server import client_runs
from kedge.types import AgentId, GenerateRequest, Namespace, RunId, RunKey, SampleId, TenantId, ValueKind
from tests.server.conftest import FLOW, YAML, Served, serving, wait_until

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
    said = {"solver": "four", "critic": "five", "judge": "six", "first": "one", "last": "the end"}
    with EchoEngine(said) as engine, serving(engine) as running:
        yield running


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with served.http() as opened:
        for flow in (TEAM, FLOW):
            opened.post("/v1/workflows", content=flow, headers=YAML).raise_for_status()
        yield opened


def asked(http: httpx.Client, agent: str, bindings: dict[str, str], **said: Any) -> httpx.Response:
    """What an agent of the pair is answered."""
    kedge = {"workflow": "pair", "agent": agent, "bindings": bindings, **said}
    return http.post(CHAT, json={"model": "kedge-nano", "messages": [], "kedge": kedge})


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


# templates ------------------------------------------------------------------------------------------------------------


def test_bindings_fill_an_agents_template(served: Served, http: httpx.Client) -> None:
    answer = asked(http, "last", {"user_question": "<|eos|>", "agent_first_current": "yes"}).json()
    assert answer["choices"][0]["message"]["content"] == "the end"
    request = served.engine.requests[-1]
    names = [segment.name for segment in request.segments]
    assert names == ["p0", "user_question", "p1", "agent_first_current", "p2"]
    assert 257 not in request.tokens
    assert (request.workflow, request.agent, request.reuse) == ("pair", "last", "translate")
    assert (request.produces, request.sampling.temperature, request.sampling.max_tokens) == (None, 0.0, 256)


def test_a_run_remembers_what_its_agents_said(served: Served, http: httpx.Client) -> None:
    asked(http, "first", {"user_question": "what?"}, run="r", client="c")
    first = served.engine.requests[-1]
    assert (str(first.produces), first.run) == ("agent_first@0", "r")
    for bindings in ({"user_question": "what?"}, {"user_question": "what?", "agent_first_current": "one"}):
        assert asked(http, "last", bindings, run="r", client="c").status_code == 200
        segment = served.engine.requests[-1].segments[3]
        assert (segment.sample, segment.tokens) == (SampleId.parse("agent_first@0"), tuple(b"one"))
        assert served.engine.requests[-1].run == "r"
        run = RunKey(first.namespace, "c", first.run)
        served.service.client_runs.by_tenant[first.tenant][run].turns["last"] = 0
    asked(http, "last", {"user_question": "what?", "agent_first_current": "two"}, run="r", client="c")
    other = served.engine.requests[-1].segments[3]
    assert other.sample[:3] == (ValueKind.AGENT, "first", 0) and other.sample.digest
    assert other.tokens == tuple(b"two")


def test_other_runs_clients_and_ended_runs_know_nothing(served: Served, http: httpx.Client) -> None:
    asked(http, "first", {"user_question": "what?"}, run="r")
    for said in ({}, {"run": "s"}, {"run": "r", "client": "c"}):
        answer = asked(http, "last", {"user_question": "what?"}, **said)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "kedge.bindings"
    assert asked(http, "last", {"user_question": "what?"}, run="r", final=True).status_code == 200
    served.wait_quiet()
    assert asked(http, "last", {"user_question": "what?"}, run="r").status_code == 400


@pytest.mark.parametrize(
    ("agent", "bindings", "status"),
    [
        ("nobody", {}, 404),
        ("first", {}, 400),
        ("first", {"user_question": "x", "other": "y"}, 400),
        ("first", {"user_question": "\ud800"}, 400),
    ],
)
def test_a_turn_that_could_not_begin_did_not_happen(
    served: Served, http: httpx.Client, agent: str, bindings: dict[str, str], status: int
) -> None:
    kedge = {"workflow": "pair", "agent": agent, "bindings": bindings, "run": "r"}
    content = json.dumps({"messages": [], "kedge": kedge})
    assert http.post(CHAT, content=content, headers={"Content-Type": "application/json"}).status_code == status
    asked(http, "first", {"user_question": "x"}, run="r")
    assert served.engine.requests[-1].produces == SampleId(ValueKind.AGENT, "first")


def test_a_call_without_a_whole_answer_did_not_happen() -> None:
    """It may be made again, ends no run, and an empty answer is one."""
    said, question = {"first": "one" * 99, "last": "the end"}, {"user_question": "what?"}
    with EchoEngine(said, delay_s=0.01) as engine, serving(engine) as running, running.http() as http:
        http.post("/v1/workflows", content=FLOW, headers=YAML).raise_for_status()
        kedge = {"workflow": "pair", "agent": "first", "bindings": question, "run": "r", "final": True}
        with http.stream("POST", CHAT, json={"messages": [], "kedge": kedge, "stream": True}) as begun:
            next(begun.iter_lines())
            (run,) = running.service.client_runs.by_tenant["default"].values()
        wait_until(lambda: not run.turns["first"])
        said["first"] = ""
        assert [asked(http, agent, question, run="r").status_code for agent in said] == [200, 200]
        assert prompts(engine.requests)[-1] == ("last", ["what?"])


def test_the_engine_is_told_who_is_next_and_what_is_fixed(served: Served, http: httpx.Client) -> None:
    asked(http, "first", {"user_question": "x"}, run="r", client="c")
    served.wait_quiet()
    request, key = served.engine.requests[-1], (Namespace(TenantId("default")), "c", "r")
    assert (request.client, request.run) == ("c", "r")
    assert request.fixed == len(request.segments[0].tokens)
    changes, begins = served.engine.forecasts[0]
    assert {agent: one.steps for agent, one in changes.items()} == {(*key, "first"): 0, (*key, "last"): 1}
    assert begins[(*key, "first")] == request.segments[0].tokens
    assert served.engine.forecasts[-1][0][*key, "last"].steps == 0


@pytest.mark.parametrize(
    ("said", "fixed"),
    [({"fixed_tokens": 7}, 7), ({"fixed_messages": 1}, 17), ({"fixed_messages": 9}, None), ({}, None)],
)
def test_the_fixed_boundary_reaches_the_engine(
    served: Served, http: httpx.Client, said: dict[str, int], fixed: int | None
) -> None:
    messages = [{"role": "system", "content": "12345678"}, {"role": "user", "content": "x"}]
    http.post(CHAT, json={"messages": messages, "kedge": {"agent": "a", **said}})
    assert served.engine.requests[-1].fixed == fixed


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
    (known,) = served.service.client_runs.by_tenant["default"].values()
    assert [str(sample) for sample in known.values] == ["input_user_question@0"]
    call(served, http, "critic", {"user_question": "2+2?"})
    assert len(known.values) == 1
    for name in ("a", "b"):  # any name, registered or not
        known.call(AgentId(name), fills=False)
    assert [*known.called] == ["b"]


def test_a_run_that_is_over_is_forgotten(served: Served, http: httpx.Client) -> None:
    runs = served.service.client_runs
    call(served, http, "solver", {"user_question": "2+2?"})
    assert runs.by_tenant["default"]
    call(served, http, "critic", {"user_question": "2+2?"}, final=True)
    assert not runs.by_tenant["default"]
    (ended,) = {key.run_id for changes, _ in served.engine.forecasts[-1:] for key in changes}
    assert (ended, set(served.engine.forecasts[-1][0].values())) == ("r", {None}), "the engine drops what it prepared"


def test_a_run_that_expires_is_forgotten_for_everybodys_sake(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = served.service.client_runs
    call(served, http, "solver", {"user_question": "2+2?"})
    neighbour = Namespace(TenantId("neighbour"))
    assert runs.touch(neighbour, Hints(run=RunId("r")), None)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + runs.board.ttl)
    monkeypatch.setattr(client_runs, "time", later)
    before = len(served.engine.forecasts)
    http.post("/v1/hints", json={"kedge": {"run": "other", "steps": {"a": 1}}})
    gone = {key.agent for changes, _ in served.engine.forecasts[before:] for key, one in changes.items() if one is None}
    assert {"critic", "judge"} <= gone
    assert {key.run_id for key in runs.by_tenant["default"]} == {"other"}
    assert not runs.by_tenant[neighbour.tenant]
