"""From the page to single calls over HTTP: refusals and failures with their reasons, runs, texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from kedge.engine.echo import EchoEngine
from kedge.errors import ConfigError
from kedge.server.tenancy import _of_section, hashed, load_keys
from kedge.settings import LimitSettings, ServerSettings
from tests.server.conftest import Served, serving
from tests.server.dashboard.pages import SLOW, chat, state

# refused and failed ---------------------------------------------------------------------------------------------------


def test_what_was_refused_is_listed_with_its_reason_and_its_place() -> None:
    with EchoEngine(max_prompt=100) as engine, serving(engine) as running, running.http() as http:
        hints = {"workflow": "flow", "agent": "a", "run": "r"}
        http.post("/v1/completions", json={"prompt": "x" * 500, "kedge": hints})
        http.post("/v1/completions", json={"prompt": "x", "temperature": 9})
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


# details --------------------------------------------------------------------------------------------------------------


def one_call(running: Served, key: str = "none") -> tuple[dict[str, Any], dict[str, Any]]:
    """A run of one call, and that call, as the page fetches them."""
    with running.http(key) as http:
        chat(http, kedge={"run": "mine", "agent": "a"})
        (run,) = state(http)["runs"]
        found = http.get(f"/v1/dashboard/runs/{run['number']}").json()
        return found, http.get(f"/v1/dashboard/calls/{found['calls'][0]['number']}").json()


@pytest.mark.parametrize("kept", [False, True])
def test_from_a_run_to_its_call_and_where_allowed_its_text(kept: bool) -> None:
    with EchoEngine() as engine, serving(engine, ServerSettings(keep_texts=kept)) as running:
        run, call = one_call(running)
    assert (run["status"], len(run["calls"])) == ("running", 1)
    assert {"misses", "parts_ms", "ttft_load", "total_load"} <= call.keys()
    assert call["keeps_texts"] is kept
    assert bool(call["text"]) is kept
    if kept:
        assert "hello" in "".join(piece["text"] for piece in call["text"]["prompt"])
        assert {piece["source"] for piece in call["text"]["prompt"]} == {"computed"}
        assert call["text"]["answer"]


def test_a_tenant_chooses_for_itself_and_sees_no_others_calls(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        f'[tenants.open]\nkeys = ["{hashed("key-a")}"]\nkeep_texts = true\n'
        f'[tenants.shy]\nkeys = ["{hashed("key-b")}"]\nkeep_texts = false\n'
    )
    with EchoEngine() as engine, serving(engine, keys=load_keys(file, None, LimitSettings())) as running:
        assert one_call(running, "key-a")[1]["text"]
        assert not one_call(running, "key-b")[1]["text"]
        with running.http("key-b") as http:
            chat(running.http("key-a"))
            assert [http.get(f"/v1/dashboard/{path}").status_code for path in ("runs/2", "calls/2", "calls/x")] == [
                404,
                404,
                400,
            ]
        assert httpx.get(running.url + "/v1/dashboard/runs/1").status_code == 401


def test_a_wrong_choice_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tenants.a.keep_texts='yes'"):
        list(_of_section("tenants.a", "a", {"keys": [hashed("k")], "keep_texts": "yes"}, LimitSettings()))
