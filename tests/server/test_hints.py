"""Every dialect says the same thing, and nothing that a client says is an error or goes uncounted."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from kedge.engine.echo import EchoEngine
from kedge.errors import RequestError
from kedge.server.hints import RULES, Hints, IgnoredReason, read_hints
from kedge.server.tenancy import KeyRing
from kedge.server.workflows import client_runs
from kedge.settings import LimitSettings
from kedge.types import Namespace, ReuseMode, RunId, RunKey, TenantId
from tests.server.conftest import Served, serving


def hints(body: dict[str, Any] | None = None, **headers: str) -> Hints:
    return read_hints(body or {}, {name.replace("_", "-"): value for name, value in headers.items()})[0]


def ignored(body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[tuple[str, IgnoredReason], int]:
    return {key: count for key, count in read_hints(body, headers or {})[1].items() if count}


def test_the_kedge_field() -> None:
    said = {
        "workflow": "team", "run": "r", "agent": "a", "client": "c", "seq": 3, "steps": {"a": 0, "b": 1.5, "z": None},
        "fixed_tokens": 10, "fixed_messages": 1, "reuse": "off", "bindings": {"q": "x"}, "final": True,
    }  # fmt: skip
    assert hints({"kedge": said}) == Hints(
        workflow="team", run="r", agent="a", client="c", seq=3, steps={"a": 0, "b": 1.5, "z": math.inf},
        fixed_tokens=10, fixed_messages=1, reuse=ReuseMode.OFF, bindings={"q": "x"}, final=True,
    )  # fmt: skip
    assert not ignored({"kedge": said})


@pytest.mark.parametrize("carrier", ["kv_transfer_params", "vllm_xargs", "custom_params"])
def test_the_kedge_field_rides_in_what_other_servers_pass_through(carrier: str) -> None:
    assert hints({carrier: {"kedge": {"agent": "a"}}}).agent == "a"
    assert hints({carrier: {"kedge": {"agent": "a"}}, "kedge": {"agent": "b"}}).agent == "b"
    assert sum(ignored({carrier: {"kedge": {}, "other": 1}}).values()) == 1


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({"user": "u"}, {}, Hints(end_user="u")),
        ({"safety_identifier": "s", "user": "u"}, {}, Hints(end_user="s")),
        ({"session_id": "s", "request_id": "x"}, {}, Hints(session="s", run="s", request_id="x")),
        ({"cache_salt": "s"}, {}, Hints(salt="s")),
        ({"rid": "x", "extra_key": "k"}, {}, Hints(request_id="x", salt="k")),
        ({"extra_key": ["k", "l"]}, {}, Hints(salt="k\x1fl")),
        ({"priority": 3}, {}, Hints(priority=-3)),
        ({"nvext": {"agent_hints": {"priority": 3, "osl": 9}}}, {}, Hints(priority=3, output_tokens=9)),
        ({"metadata": {"langgraph_node": "n", "thread_id": "t"}}, {}, Hints(agent="n", run="t")),
        ({"metadata": {"workflow_name": "w", "group_id": "g"}}, {}, Hints(workflow="w", run="g")),
        ({}, {"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p"}, Hints(session="s", run="s", parent="p")),
        ({}, {"x-dynamo-session-final": "true"}, Hints(final=True)),
        ({}, {"x-claude-code-session-id": "s"}, Hints(session="s", run="s")),
        ({}, {"session-id": "s", "x-parent-session-id": "p"}, Hints(session="s", run="s", parent="p")),
        ({}, {"x-session-id": "s"}, Hints(session="s", run="s")),
        ({}, {"x-session-affinity": "s"}, Hints(session="s", run="s")),
        ({"kedge": {"run": "r"}, "session_id": "s"}, {"x-session-id": "t"}, Hints(run="r", session="s")),
    ],
)
def test_dialects(body: dict[str, Any], headers: dict[str, str], expected: Hints) -> None:
    assert read_hints(body, headers)[0] == expected
    assert not ignored(body, headers)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: ".".join(rule.path))
def test_a_value_that_cannot_be_meant_is_ignored_and_counted(rule: Any) -> None:
    value: Any = {"no": ["thing"]}
    for key in reversed(rule.path):
        value = {key: value}
    said, counted = read_hints(value, value)
    assert said == Hints()
    assert counted[rule.dialect, IgnoredReason.BAD_VALUE] >= 1


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"kedge": 5}, {("kedge", IgnoredReason.BAD_VALUE): 1}),
        ({"kedge": {"mood": 1, "tone": 2}}, {("kedge", IgnoredReason.UNKNOWN): 2}),
        ({"shape": 1}, {("body", IgnoredReason.UNKNOWN): 1}),
        ({"nvext": {"x": 1, "agent_hints": {"y": 1}}}, {("dynamo", IgnoredReason.UNKNOWN): 2}),
        ({"nvext": 7}, {("dynamo", IgnoredReason.UNKNOWN): 1}),
        ({"kv_hints": {"actions": [{}, {}]}}, {("kv_hints", IgnoredReason.UNSUPPORTED): 2}),
        ({"kv_hints": "x"}, {("kv_hints", IgnoredReason.UNSUPPORTED): 1}),
        ({"kedge": {"run": "x" * 257}}, {("kedge", IgnoredReason.BAD_VALUE): 1}),
        ({"kedge": {"run": "\ud800"}}, {("kedge", IgnoredReason.BAD_VALUE): 1}),
        ({"kedge": {"steps": {"a": float("nan")}}}, {("kedge", IgnoredReason.BAD_VALUE): 1}),
        ({"kedge": {"fixed_tokens": True}}, {("kedge", IgnoredReason.BAD_VALUE): 1}),
    ],
)
def test_what_is_ignored_is_counted(body: dict[str, Any], expected: dict[tuple[str, IgnoredReason], int]) -> None:
    assert ignored(body) == expected
    assert hints(body) == Hints()


@pytest.mark.parametrize("said", [{"reuse": "fast"}, {"reuse": 1}, {"bindings": []}, {"bindings": {"a": 1}}])
def test_what_changes_the_answer_must_be_right(said: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="kedge."):
        hints({"kedge": said})


def test_what_was_understood_is_told_but_no_secret() -> None:
    told = hints({"cache_salt": "secret", "kedge": {"steps": {"a": None}, "seq": 0, "bindings": {"q": "x"}}}).to_dict()
    assert told == {"steps": {"a": None}, "seq": 0}


def test_a_client_is_told_what_was_understood(http: httpx.Client, served: Served) -> None:
    body = {"prompt": "x", "kedge": {"agent": "a", "mood": 1}, "priority": 2, "shape": "round"}
    answer = http.post("/v1/completions", json=body, headers={"X-Session-Id": "s"}).json()
    assert answer["kedge"]["hints"] == {"agent": "a", "session": "s", "run": "s", "priority": -2.0}
    text = http.get("/metrics").text
    for dialect in ("kedge", "body"):
        assert f'dialect="{dialect}",model_name="kedge-nano",reason="unknown",tenant="default"}} 1.0' in text
    assert served.engine.requests[-1].agent == "a"


def test_forecasts_that_are_ignored_are_counted(http: httpx.Client, served: Served) -> None:
    for seq in (5, 5, -1):
        said = {"run": "f", "client": "c", "seq": seq, "steps": {"a": 0, "b": 1}}
        assert http.post("/v1/hints", json={"kedge": said}).status_code == 200
    forecasts = {key.run_id: one.forecast for key, one in served.workflows.client_runs.board._runs.items()}
    assert forecasts["f"].seq == 5
    text = http.get("/metrics").text
    assert 'kedge:ignored_forecasts_total{reason="stale"} 1.0' in text
    assert 'kedge:ignored_forecasts_total{reason="negative sequence number"} 1.0' in text
    http.post("/v1/hints", json={"kedge": {"run": "f", "client": "c", "final": True}})
    (run,) = served.workflows.client_runs.board._runs
    assert run == RunKey(Namespace(TenantId("default")), "c", RunId("f"))
    assert served.workflows.client_runs.board.forecast(run).next_runs == {}


def test_hints_without_a_prompt_have_a_limit_of_their_own() -> None:
    keys = KeyRing({}, LimitSettings(tokens_per_minute=1, hints_per_minute=10))
    with EchoEngine() as engine, serving(engine, keys=keys) as running, running.http() as http:
        allowed = running.service.meter(keys.authenticate(None)).hints
        allowed.clock = lambda: allowed.filled_at  # time stands still
        for left in (7, 4, 1, -2):
            said = {"run": "r", "steps": {"a": 9 - left, "b": 1}}
            assert http.post("/v1/hints", json={"kedge": said}).status_code == 200
            assert allowed.level == left
        refused = http.post("/v1/hints", json={"kedge": {"run": "r", "final": True}})
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert refused.headers["retry-after"] == "18"
        assert len(engine.forecasts) == 4, "what is refused changes nothing"
        assert http.post("/v1/completions", json={"prompt": "x", "kedge": {"run": "r"}}).status_code == 200


def test_hints_are_limited_where_nobody_set_a_limit() -> None:
    with EchoEngine() as engine, serving(engine) as running, running.http() as http:
        allowed = running.service.meter(KeyRing({}, LimitSettings()).authenticate(None)).hints
        allowed.clock = lambda: allowed.filled_at  # time stands still
        steps = {f"agent-{at}": at for at in range(4096)}
        answers = [http.post("/v1/hints", json={"kedge": {"run": "r", "steps": steps}}).status_code for _ in range(5)]
    assert answers == [200, 200, 200, 429, 429]


@pytest.mark.parametrize(("limit", "wanted"), [("MAX_RUNS", {"run": "c"}), ("MAX_FORECAST_AGENTS", {"run": "b"})])
def test_hints_without_a_prompt_push_no_run_out(
    limit: str, wanted: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_runs, limit, 2)
    with EchoEngine() as engine, serving(engine) as running, running.http() as http:
        for run in "ab":
            assert http.post("/v1/hints", json={"kedge": {"run": run, "steps": {run: 1}}}).status_code == 200
        runs = running.workflows.client_runs._of(Namespace(TenantId("default")))
        known = list(runs)
        refused = http.post("/v1/hints", json={"kedge": {**wanted, "steps": {"c": 1, "d": 2}}})
        assert (refused.status_code, list(runs)) == (429, known)
        assert 590 < int(refused.headers["retry-after"]) <= 600
        assert http.post("/v1/hints", json={"kedge": {"steps": {"c": 1, "d": 2}}}).status_code == 200, "of no run"
        assert http.post("/v1/hints", json={"kedge": {"run": "a", "final": True}}).status_code == 200
        assert http.post("/v1/hints", json={"kedge": {**wanted, "steps": {"c": 1, "d": 2}}}).status_code == 200
