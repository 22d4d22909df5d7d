"""Workflows over HTTP: registered, drawn, run, cancelled, and driven call by call."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kedge.engine.echo import EchoEngine
from kedge.runner.run import run
from kedge.settings import ServerSettings
from kedge.types import AgentId, Namespace, ReuseMode, RunKey, SampleId, TenantId, ValueKind
from kedge.workflow.export import export
from kedge.workflow.spec import build_workflow
from kedge.workloads.sandbox import SandboxResult
from tests.server.conftest import FLOW, PATIENCE, Served, serving, wait_until

PAIR: dict[str, Any] = {
    "name": "pair",
    "agents": [
        {"id": "first", "system": "You begin.", "user": "Q: {user_question}"},
        {"id": "last", "system": "You end.", "user": "Q: {user_question} A: {agent_first_current}"},
    ],
}
ANSWERS = {AgentId("first"): "one", AgentId("last"): "the end"}
QUESTION = {"inputs": {"user_question": "what?"}}
CHAT = "/v1/chat/completions"


@pytest.fixture
def served() -> Iterator[Served]:
    with EchoEngine(ANSWERS) as engine, serving(engine, ServerSettings(tools=True)) as running:
        yield running


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with served.http() as opened:
        yield opened


def register(http: httpx.Client, flow: dict[str, Any] = PAIR, **params: Any) -> None:
    answer = http.post("/v1/workflows", json=flow, params=params)
    assert answer.status_code in (200, 201), answer.text


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    blocks = [dict(line.split(": ", 1) for line in block.split("\n")) for block in text.strip().split("\n\n")]
    return [(block["event"], json.loads(block["data"])) for block in blocks]


# registering ----------------------------------------------------------------------------------------------------------


def test_yaml_and_json_are_the_same_workflow(http: httpx.Client) -> None:
    first = http.post("/v1/workflows", content=FLOW, headers={"Content-Type": "application/yaml"})
    again = http.post("/v1/workflows", json=PAIR)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json() == http.get("/v1/workflows/pair").json()
    assert http.get("/v1/workflows").json()["data"] == [first.json()]
    assert [agent["waits_for"] for agent in first.json()["agents"]] == [[], ["first"]]
    assert http.delete("/v1/workflows/pair").json()["deleted"] is True
    assert http.get("/v1/workflows/pair").status_code == 404


@pytest.mark.parametrize(
    "content",
    ["", "5", "[", "{a: b}", "name: x\nagents: []", "a: &a [*a]", "\xff", "name: x\ngraph: {a: {}}", "[" * 10_000]
    + ["name: a/b\nagents: [{id: x, user: y}]", "name: x\nagents: [{id: x, user: '{nobody}'}]", "x" * 300_000],
    ids=lambda content: content[:20],
)
@pytest.mark.parametrize("kind", ["application/json", "application/yaml"])
def test_what_is_no_workflow_is_a_bad_request(http: httpx.Client, content: str, kind: str) -> None:
    answer = http.post("/v1/workflows", content=content.encode("latin-1"), headers={"Content-Type": kind})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert http.get("/v1/workflows").json()["data"] == []


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ('"temperature": NaN', "temperature"),
        ('"max_tokens": 2147483648', "max_tokens"),
        ('"system": "\\ud800"', "system"),
    ],
)
def test_an_agent_that_no_engine_could_run_is_refused_at_registration(
    http: httpx.Client, said: str, param: str
) -> None:
    flow = f'{{"name": "n", "agents": [{{"id": "a", "user": "{{user_question}}", {said}}}]}}'
    answer = http.post("/v1/workflows", content=flow, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"agent a: {param}")
    assert ": must be " in answer.json()["error"]["message"]
    assert http.get("/v1/workflows").json()["data"] == []


def test_a_judge_must_be_an_agent(http: httpx.Client) -> None:
    assert http.post("/v1/workflows", json=PAIR, params={"judge": "nobody"}).status_code == 404


def test_tools_only_where_they_are_allowed() -> None:
    flow = {"name": "t", "agents": [{"id": "a", "user": "x", "tool": "python"}]}
    with EchoEngine() as engine, serving(engine) as running:
        answer = running.http().post("/v1/workflows", json=flow)
    assert answer.status_code == 400
    assert "runs no tools" in answer.json()["error"]["message"]


def test_the_graph_is_text_for_mermaid(http: httpx.Client) -> None:
    register(http, {**PAIR, "name": "<b>&"})
    answer = http.get("/v1/workflows/<b>&/graph")
    assert answer.headers["content-type"].startswith("application/vnd.mermaid")
    assert answer.text == export(build_workflow({**PAIR, "name": "<b>&"}))


# runs -----------------------------------------------------------------------------------------------------------------


def test_a_streamed_run_tells_what_happens_as_it_happens(http: httpx.Client) -> None:
    register(http)
    told = events(http.post("/v1/workflows/pair/runs", json={**QUESTION, "stream": True}).text)
    assert [name for name, _ in told if name != "text"] == [
        "run", "submitted", "answered", "submitted", "answered", "finished"
    ]  # fmt: skip
    assert "".join(data["text"] for name, data in told if name == "text" and data["agent"] == "last") == "the end"
    assert told[-1][1]["answer"] == "the end"
    receipt = told[-1][1]["agents"][0]["receipt"]
    assert receipt["mode"] == "translate"


def test_a_run_gives_what_kedge_run_gives(http: httpx.Client, served: Served) -> None:
    tool = {"id": "b", "user": "{agent_a_current}", "tool": "python"}
    flow = {"name": "t", "agents": [{"id": "a", "user": "print({{}}) {user_question}"}, tool,
            {"id": "c", "user": "{condition_b_current}|{agent_a_history_1}"}], "turns": 2}  # fmt: skip
    register(http, flow)
    run_id = http.post("/v1/workflows/t/runs", json={"inputs": {"user_question": "print(6*7)"}}).json()["id"]
    wait_until(lambda: http.get(f"/v1/runs/{run_id}").json()["status"] != "running")
    over_http = http.get(f"/v1/runs/{run_id}").json()
    with EchoEngine(ANSWERS) as engine:
        direct = run(engine, build_workflow(flow), {"user_question": "print(6*7)"})
        assert [r.tokens for r in engine.requests] == [r.tokens for r in served.engine.requests]
    assert over_http["answer"] == direct.text
    assert [(one["text"], one["tool_result"]) for one in over_http["agents"]] == [
        (one.text, one.tool_result) for one in direct.results
    ]


def test_events_can_be_read_again_and_from_where_one_was(http: httpx.Client) -> None:
    register(http)
    path = http.post("/v1/workflows/pair/runs", json=QUESTION).json()["events"]
    whole = http.get(path).text
    assert http.get(path).text == whole
    rest = http.get(path, headers={"Last-Event-ID": "3"}).text
    assert events(rest)[1:] == events(whole)[5:]


@pytest.mark.parametrize("body", [{"reuse": "fast"}, {"reuse": {"first": "x"}}, {"turns": 1}, {"stream": "yes"}])
def test_wrong_fields(http: httpx.Client, body: dict[str, Any]) -> None:
    register(http)
    assert http.post("/v1/workflows/pair/runs", json={**QUESTION, **body}).status_code == 400
    assert http.post("/v1/workflows/none/runs", json=QUESTION).status_code == 404
    assert http.post("/v1/workflows/pair/runs", json={**QUESTION, "reuse": {"nobody": "off"}}).status_code == 404


def test_a_tool_that_fails_is_named_in_the_error(http: httpx.Client) -> None:
    late = {"id": "a", "user": "{user_question}", "tool": "python", "tool_seconds": 1e-9}
    register(http, {"name": "t", "agents": [late]})
    told = events(http.post("/v1/workflows/t/runs", json={**QUESTION, "stream": True}).text)
    assert told[-1][0] == "failed"
    assert told[-1][1]["error"]["message"].startswith("agent a: tool='answer_as_python': ran longer than")


def test_a_run_is_cancelled() -> None:
    with EchoEngine(delay_s=0.01) as engine, serving(engine) as running, running.http() as http:
        register(http)
        started = http.post("/v1/workflows/pair/runs", json={"inputs": {"user_question": "x" * 2000}}).json()
        wait_until(lambda: bool(engine.in_flight))
        assert http.post(f"/v1/runs/{started['id']}/cancel").status_code == 202
        told = events(http.get(started["events"]).text)
        assert told[-1][0] == "cancelled"
        assert http.get(f"/v1/runs/{started['id']}").json()["status"] == "cancelled"
        assert not engine.in_flight
        running.wait_quiet()
        assert (
            'kedge:runs_total{model_name="kedge-nano",status="cancelled",tenant="default"} 1.0'
            in http.get("/metrics").text
        )


def test_a_run_that_is_cancelled_while_a_tool_works_calls_nobody_else(
    http: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_working, is_cancelled = threading.Event(), threading.Event()

    def work(_: str) -> SandboxResult:
        is_working.set()
        return SandboxResult("1\n", None if is_cancelled.wait(PATIENCE) else "TimeoutError")

    monkeypatch.setattr("kedge.workloads.sandbox.run_python", work)
    slow = {"id": "a", "user": "{user_question}", "tool": "python", "tool_seconds": PATIENCE}
    register(http, {"name": "t", "agents": [slow, {"id": "b", "user": "{condition_a_current}"}]})
    started = http.post("/v1/workflows/t/runs", json=QUESTION).json()
    assert is_working.wait(PATIENCE)
    http.post(f"/v1/runs/{started['id']}/cancel")
    is_cancelled.set()
    assert events(http.get(started["events"]).text)[-1][0] == "cancelled"
    assert len(served.engine.requests) == 1


# modes ----------------------------------------------------------------------------------------------------------------


def modes(served: Served, http: httpx.Client, **body: Any) -> list[ReuseMode]:
    before = len(served.engine.requests)
    http.post("/v1/workflows/pair/runs", json={**QUESTION, **body, "stream": True})
    return [request.reuse for request in served.engine.requests[before:]]


def test_who_says_how_far_an_agent_leans_on_others(served: Served, http: httpx.Client) -> None:
    register(http)
    assert modes(served, http) == ["translate", "translate"]
    assert modes(served, http, reuse="off") == ["off", "off"]
    register(http, reuse="exact")
    assert modes(served, http) == ["exact", "exact"]
    assert modes(served, http, reuse="translate") == ["translate", "translate"]
    own = {**PAIR, "agents": [{**PAIR["agents"][0], "reuse": "off"}, PAIR["agents"][1]]}
    register(http, own, reuse="exact")
    assert modes(served, http) == ["off", "exact"]
    assert modes(served, http, reuse={"first": "translate"}) == ["translate", "exact"]


def test_a_judge_is_never_translated_unless_named(served: Served, http: httpx.Client) -> None:
    register(http, judge="last")
    assert modes(served, http) == ["translate", "exact"]
    assert modes(served, http, reuse="translate") == ["translate", "exact"]
    assert modes(served, http, reuse={"last": "translate"}) == ["translate", "translate"]
    assert modes(served, http, reuse="off") == ["off", "exact"], "as an agent whose file says so"
    judged = {"workflow": "pair", "agent": "last", "bindings": {"user_question": "x", "agent_first_current": "y"}}
    for asked, mode in ((None, "exact"), ("translate", "translate"), ("off", "off")):
        body = {"messages": [], "kedge": {**judged, **({"reuse": asked} if asked else {})}}
        assert http.post(CHAT, json=body).status_code == 200
        assert served.engine.requests[-1].reuse == mode


# call by call ---------------------------------------------------------------------------------------------------------


def call(http: httpx.Client, agent: str, bindings: dict[str, str], **said: Any) -> httpx.Response:
    kedge = {"workflow": "pair", "agent": agent, "bindings": bindings, **said}
    return http.post(CHAT, json={"model": "kedge-nano", "messages": [], "kedge": kedge})


def test_bindings_fill_an_agents_template(served: Served, http: httpx.Client) -> None:
    register(http)
    answer = call(http, "last", {"user_question": "<|eos|>", "agent_first_current": "yes"}).json()
    assert answer["choices"][0]["message"]["content"] == "the end"
    request = served.engine.requests[-1]
    assert [segment.name for segment in request.segments] == [
        "p0", "user_question", "p1", "agent_first_current", "p2"
    ]  # fmt: skip
    assert 257 not in request.tokens
    assert (request.workflow, request.agent, request.reuse) == ("pair", "last", "translate")
    assert (request.produces, request.sampling.temperature, request.sampling.max_tokens) == (None, 0.0, 256)


def test_a_run_remembers_what_its_agents_said(served: Served, http: httpx.Client) -> None:
    register(http)
    call(http, "first", {"user_question": "what?"}, run="r", client="c")
    first = served.engine.requests[-1]
    assert (str(first.produces), first.run) == ("agent_first@0", "r")
    for bindings in ({"user_question": "what?"}, {"user_question": "what?", "agent_first_current": "one"}):
        assert call(http, "last", bindings, run="r", client="c").status_code == 200
        segment = served.engine.requests[-1].segments[3]
        assert (segment.sample, segment.tokens) == (SampleId.parse("agent_first@0"), tuple(b"one"))
        assert served.engine.requests[-1].run == "r"
        run = RunKey(first.namespace, "c", first.run)
        served.workflows.client_runs.of(first.tenant)[run].turns["last"] = 0
    call(http, "last", {"user_question": "what?", "agent_first_current": "two"}, run="r", client="c")
    other = served.engine.requests[-1].segments[3]
    assert other.sample[:3] == (ValueKind.AGENT, "first", 0) and other.sample.digest
    assert other.tokens == tuple(b"two")


def test_other_runs_clients_and_ended_runs_know_nothing(served: Served, http: httpx.Client) -> None:
    register(http)
    call(http, "first", {"user_question": "what?"}, run="r")
    for said in ({}, {"run": "s"}, {"run": "r", "client": "c"}):
        answer = call(http, "last", {"user_question": "what?"}, **said)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "kedge.bindings"
    assert call(http, "last", {"user_question": "what?"}, run="r", final=True).status_code == 200
    served.wait_quiet()
    assert call(http, "last", {"user_question": "what?"}, run="r").status_code == 400


def test_a_turn_that_could_not_begin_did_not_happen(served: Served, http: httpx.Client) -> None:
    register(http)
    assert call(http, "first", {}, run="r").status_code == 400
    call(http, "first", {"user_question": "x"}, run="r")
    assert served.engine.requests[-1].produces == SampleId(ValueKind.AGENT, "first")


@pytest.mark.parametrize(
    ("agent", "bindings", "status"),
    [
        ("nobody", {}, 404),
        ("first", {}, 400),
        ("first", {"user_question": "x", "other": "y"}, 400),
        ("first", {"user_question": "\ud800"}, 400),
    ],
)
def test_wrong_bindings(http: httpx.Client, agent: str, bindings: dict[str, str], status: int) -> None:
    register(http)
    kedge = {"workflow": "pair", "agent": agent, "bindings": bindings}
    content = json.dumps({"messages": [], "kedge": kedge})
    assert http.post(CHAT, content=content, headers={"Content-Type": "application/json"}).status_code == status


def test_the_engine_is_told_who_is_next_and_what_is_fixed(served: Served, http: httpx.Client) -> None:
    register(http)
    call(http, "first", {"user_question": "x"}, run="r", client="c")
    served.wait_quiet()
    request, key = served.engine.requests[-1], (Namespace(TenantId("default")), "c", "r")
    assert (request.client, request.run) == ("c", "r")
    assert request.fixed == len(request.segments[0].tokens)
    changes, begins = served.engine.forecasts[0]
    assert {agent: one.steps for agent, one in changes.items()} == {(*key, "first"): 0, (*key, "last"): 1}
    assert begins[(*key, "first")] == request.segments[0].tokens
    assert served.engine.forecasts[-1][0][*key, "last"].steps == 0


def test_a_forecast_of_a_clients_own_reaches_the_engine(served: Served, http: httpx.Client) -> None:
    http.post("/v1/hints", json={"kedge": {"run": "r", "seq": 1, "steps": {"a": 2}}})
    assert {key.agent: one.steps for key, one in served.engine.forecasts[-1][0].items()} == {"a": 2}
    http.post("/v1/hints", json={"kedge": {"run": "r", "final": True}})
    assert list(served.engine.forecasts[-1][0].values()) == [None]


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
