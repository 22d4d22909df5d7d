"""Workflows over HTTP: registered, drawn, run, cancelled, and driven call by call."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kedge.engine.echo import EchoEngine
from kedge.runner.run import run
from kedge.settings import LimitSettings, ServerSettings
from kedge.types import AgentId, ReuseMode
from kedge.workflow.spec import build_workflow
from kedge.workloads.sandbox import SandboxResult
from tests.server.conftest import FLOW, PAIR, PATIENCE, Served, serving, wait_until

ANSWERS = {AgentId("first"): "one", AgentId("last"): "the end"}
QUESTION = {"inputs": {"user_question": "what?"}}
CHAT = "/v1/chat/completions"


@pytest.fixture
def served() -> Iterator[Served]:
    with EchoEngine(ANSWERS) as engine, serving(engine, ServerSettings(tools=True)) as running:
        yield running


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
    ["", "5", "[", "{a: b}", "name: x\nagents: []", "a: &a [*a]", "\xff", "name: x\ngraph: {a: {}}", "[" * 10_000,
     "x" * 300_000, "name: a/b\nagents: [{id: x, user: y}]", "name: x\nagents: [{id: x, user: '{nobody}'}]",
     '{"name": "x", "topology": "debate", "agents": [' + ", ".join(["{}"] * 1025) + "]}"],
    ids=lambda content: content[:20],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["application/json", "application/yaml"])
def test_what_is_no_workflow_is_a_bad_request(http: httpx.Client, content: str, kind: str) -> None:
    answer = http.post("/v1/workflows", content=content.encode("latin-1"), headers={"Content-Type": kind})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert http.get("/v1/workflows").json()["data"] == []


def test_tools_only_where_they_are_allowed() -> None:
    flow = {"name": "t", "agents": [{"id": "a", "user": "x", "tool": "python"}]}
    with EchoEngine() as engine, serving(engine) as running:
        answer = running.http().post("/v1/workflows", json=flow)
    assert answer.status_code == 400 and "runs no tools" in answer.json()["error"]["message"]


# runs -----------------------------------------------------------------------------------------------------------------


def test_a_streamed_run_tells_what_happens_as_it_happens(http: httpx.Client) -> None:
    register(http)
    told = events(http.post("/v1/workflows/pair/runs", json={**QUESTION, "stream": True}).text)
    steps = ["run", "submitted", "answered", "submitted", "answered", "finished"]
    assert [name for name, _ in told if name != "text"] == steps
    assert "".join(data["text"] for name, data in told if name == "text" and data["agent"] == "last") == "the end"
    end = told[-1][1]
    assert (end["answer"], end["agents"][0]["receipt"]["mode"]) == ("the end", "translate")
    wrong = http.post("/v1/workflows/pair/runs", json={**QUESTION, "model": "gpt"}).json()["error"]
    assert (wrong["param"], wrong["code"]) == ("model", None), "which is no model that was not found"


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
    told, done = over_http["agents"], direct.results
    assert over_http["answer"] == direct.text
    assert [(one["text"], one["tool_result"]) for one in told] == [(one.text, one.tool_result) for one in done]


def test_events_can_be_read_again_and_from_where_one_was(http: httpx.Client) -> None:
    register(http)
    path = http.post("/v1/workflows/pair/runs", json=QUESTION).json()["events"]
    whole = http.get(path).text
    assert http.get(path).text == whole
    assert events(http.get(path, headers={"Last-Event-ID": "3"}).text)[1:] == events(whole)[5:]


def test_a_run_that_takes_all_places_leaves_some_to_ask_and_to_follow_it() -> None:
    settings = ServerSettings(max_in_flight=1, limits=LimitSettings(requests_in_flight=1))
    with EchoEngine(delay_s=0.1) as engine, serving(engine, settings) as running, running.http() as http:
        register(http)
        run = http.post("/v1/workflows/pair/runs", json={"inputs": {"user_question": "x" * 999}}).json()
        assert [http.get(path).status_code for path in ("/v1/guard", "/v1/dashboard/engine")] == [200, 200]
        with running.http() as other, other.stream("GET", run["events"]) as followed:
            assert (followed.status_code, http.get(run["events"]).status_code) == (200, 429)
        assert http.post(f"/v1/runs/{run['id']}/cancel").json()["status"] == "running"
        wait_until(lambda: http.get(run["events"]).status_code == 200)


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
    assert http.post(f"/v1/runs/{started['id']}/cancel").status_code == 202
    is_cancelled.set()
    assert events(http.get(started["events"]).text)[-1][0] == "cancelled"
    assert http.get(f"/v1/runs/{started['id']}").json()["status"] == "cancelled"
    assert 'status="cancelled",tenant="default"} 1.0' in http.get("/metrics").text
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
    assert http.post("/v1/workflows/pair/runs", json={**QUESTION, "reuse": {"nobody": "off"}}).status_code == 404
    judged = {"workflow": "pair", "agent": "first", "bindings": {"user_question": "x"}}
    for asked, mode in ((None, "off"), ("translate", "translate")):
        body = {"messages": [], "kedge": {**judged, **({"reuse": asked} if asked else {})}}
        assert http.post(CHAT, json=body).status_code == 200
        assert served.engine.requests[-1].reuse == mode
