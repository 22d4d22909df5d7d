"""Refused and failed calls and runs, and their reasons."""

from __future__ import annotations

from kedge.engine.echo import EchoEngine
from kedge.server.dashboard.history import History
from kedge.server.http import CallFailure
from kedge.settings import ServerSettings
from kedge.types import TenantId
from tests.server.conftest import serving
from tests.server.dashboard.test_history import ACME, Clock
from tests.server.dashboard.test_routes import SLOW, state


def test_failures_are_counted_and_like_ones_share_a_line() -> None:
    clock = Clock()
    history = History(clock)
    for number in range(3):
        history.failed(ACME, CallFailure(429, "rate_limit_exceeded", f"tokens_per_minute={number}", "POST /v1/x"))
        clock.now += 1
    history.failed(ACME, CallFailure(503, "engine_closed", "x", run="r"))
    told = history.state(ACME)["failures"]
    assert (told["refused"], told["failed"]) == (3, 1)
    failed, refused = told["list"]
    assert (refused["count"], refused["age_s"], refused["reason"]) == (3, 1.0, "tokens_per_minute=2")
    assert (failed["kind"], failed["run"], failed["reason"]) == ("failed", "r", "x")
    assert history.state(TenantId("other"))["failures"] == {"refused": 0, "failed": 0, "list": []}


def test_only_a_refusal_for_want_of_room_is_overload() -> None:
    clock = Clock()
    history = History(clock)
    history.failed(ACME, CallFailure(429, "rate_limit_exceeded", "…"))
    assert history.seconds_since_overload(ACME) is None
    history.failed(ACME, CallFailure(503, "overloaded", "…"))
    clock.now += 4
    assert history.seconds_since_overload(ACME) == 4
    assert history.state(ACME)["failures"]["refused"] == 2


def test_what_was_refused_is_listed_with_its_reason_and_its_place() -> None:
    with EchoEngine(max_prompt=100) as engine, serving(engine) as running, running.http() as http:
        hints = {"workflow": "flow", "agent": "a", "run": "r"}
        http.post("/v1/completions", json={"prompt": "x" * 500, "kedge": hints})
        http.post("/v1/completions", json={"prompt": "x", "temperature": -9})
        http.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"})
        http.get("/nowhere")
        http.get("/v1/dashboard/runs/7")
        told = state(http)["failures"]
    assert (told["refused"], told["failed"]) == (3, 0)
    too_long = told["list"][-1]
    assert (too_long["code"], too_long["route"]) == ("context_length_exceeded", "POST /v1/completions")
    assert {name: too_long[name] for name in hints} == hints
    assert "100" in too_long["reason"]
    assert [one["count"] for one in told["list"]] == [2, 1]


def test_a_run_that_fails_is_listed_with_its_reason() -> None:
    with EchoEngine(lambda _: "x" * 500, max_prompt=100) as engine, serving(engine) as running, running.http() as http:
        http.post("/v1/workflows", json=SLOW).raise_for_status()
        http.post("/v1/workflows/slow/runs", json={"inputs": {"user_question": "?"}, "stream": True})
        told = state(http)
    (run,), (listed,) = told["runs"], told["failures"]["list"]
    assert (listed["run"], listed["workflow"], listed["kind"]) == (run["id"], "slow", "refused")
    assert listed["reason"] == run["reason"]


def test_a_stream_that_breaks_off_is_listed_as_failed() -> None:
    body = {"prompt": "x", "max_tokens": 400, "stream": True}
    with (
        EchoEngine(lambda _: "x" * 500, delay_s=0.01) as engine,
        serving(engine) as running,
        running.http() as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        engine.fail(RuntimeError("boom"))
        list(lines)
        (broken,) = state(running.http())["failures"]["list"]
    assert (broken["kind"], broken["code"], broken["route"]) == ("failed", "engine_closed", "POST /v1/completions")


def test_a_body_that_is_too_large_is_listed_where_no_keys_are_asked_for() -> None:
    config = ServerSettings(max_body_bytes=100)
    with EchoEngine() as engine, serving(engine, config) as running, running.http() as http:
        http.post("/v1/completions", json={"prompt": "x" * 500})
        (listed,) = state(http)["failures"]["list"]
    assert (listed["status"], listed["code"]) == (413, "request_too_large")
