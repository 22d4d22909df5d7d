"""Hints over HTTP: a client is told what was understood, and hints without a prompt have bounds of their own."""

from __future__ import annotations

import httpx
import pytest

from kedge.engine.echo import EchoEngine
from kedge.server.tenancy import KeyRing
from kedge.server.workflows import client_runs
from kedge.settings import LimitSettings
from kedge.types import Namespace, RunId, RunKey, TenantId, TurnHints
from tests.server.conftest import Served, serving


def test_a_client_is_told_what_was_understood(http: httpx.Client, served: Served) -> None:
    body = {"prompt": "x", "kedge": {"agent": "a", "mood": 1}, "priority": 2, "shape": "round"}
    answer = http.post("/v1/completions", json=body, headers={"X-Session-Id": "s"}).json()
    assert answer["kedge"]["hints"] == {"agent": "a", "session": "s", "run": "s", "priority": -2.0}
    text = http.get("/metrics").text
    for dialect in ("kedge", "body"):
        assert f'dialect="{dialect}",model_name="kedge-nano",reason="unknown",tenant="default"}} 1.0' in text
    assert served.engine.requests[-1].agent == "a"


MARK = {"type": "ephemeral", "ttl": "1h"}
PART = {"type": "text", "text": "hi", "cache_control": MARK}
TOOL = {"name": "t", "input_schema": {"type": "object"}, "cache_control": MARK}
HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART]}]}),
        ("/v1/chat/completions", {"messages": [HI], "nvext": {"cache_control": MARK}}),
        ("/v1/responses", {"input": "hi", "prompt_cache_retention": "24h"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [PART]}], "max_tokens": 5}),
        ("/v1/messages", {"messages": [HI], "system": [PART], "max_tokens": 5}),
        ("/v1/messages", {"messages": [HI], "tools": [TOOL], "tool_choice": {"type": "none"}, "max_tokens": 5}),
        ("/v1/messages", {"messages": [HI], "cache_control": MARK, "max_tokens": 5}),
    ],
)
def test_every_protocol_asks_in_its_own_words_that_a_session_is_kept(
    http: httpx.Client, served: Served, path: str, body: dict[str, object]
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["kedge"]["hints"]["keep_for"] == 3600
    assert served.engine.requests[-1].turn.keep_for == 3600


def test_an_answer_says_what_became_of_each_action(http: httpx.Client, served: Served) -> None:
    actions = [
        {"action_id": "1", "action_type": "kv.retain@1.0", "action_version": "1.0", "payload": {"duration": 60}},
        {"action_id": "2", "action_type": "kv.fetch", "action_version": "1.0", "payload": {"session_id": "next"}},
        {"action_id": "3", "action_type": "launder", "action_version": "1.0", "payload": {}},
    ]
    said = {"protocol_version": "1", "message_id": "m", "actions": actions}
    answer = http.post("/v1/completions", json={"prompt": "x", "kv_hints": said}).json()["kedge"]
    assert [one["outcome"] for one in answer["actions"]] == ["applied", "deferred", "rejected"]
    assert served.engine.requests[-1].turn == TurnHints(keep_for=60.0, expects={"next": 0.0})
    assert 'dialect="kv_hints",model_name="kedge-nano",reason="unsupported",tenant="default"} 1.0' in (
        http.get("/metrics").text
    )


def test_what_goes_with_a_request_is_not_accepted_without_one(http: httpx.Client) -> None:
    said = {"session": "s", "keep_for": 5, "expects": {"t": None}}
    assert http.post("/v1/hints", json={"kedge": said}).json()["hints"] == {"session": "s", "run": "s"}


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
