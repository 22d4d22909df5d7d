"""The dashboard over HTTP: the page and its files, whose state the events tell, and how many may listen."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from kedge.engine.echo import EchoEngine
from kedge.engine.local.engine import LocalEngine
from kedge.errors import ConfigError
from kedge.server.dashboard import routes as dashboard
from kedge.server.dashboard.health import OVERLOAD_SECONDS, SILENT_SECONDS, health
from kedge.server.dashboard.records import AgentName
from kedge.server.dashboard.routes import MAX_WATCHERS
from kedge.server.tenancy import KeyRing, _of_section, hashed, load_keys
from kedge.settings import LimitSettings, ServerSettings
from kedge.types import AgentId, Namespace, TenantId, WorkflowId
from tests.engine.local.conftest import engine_of, tiny_model
from tests.server.conftest import FLOW, Served, serving, wait_until
from tests.server.test_local import TEMPLATE

EVENTS = "/v1/dashboard/events"
SLOW = {
    "name": "slow",
    "agents": [{"id": "first", "user": "Q: {user_question}"}, {"id": "last", "user": "A: {agent_first_current}"}],
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "PACE", 0.01)
    monkeypatch.setattr(dashboard, "REST", 0.05)
    monkeypatch.setattr(dashboard, "LOOK_SECONDS", 0.0)


@contextmanager
def states(http: httpx.Client) -> Iterator[Iterator[dict[str, Any]]]:
    """The states that one open page gets."""
    with http.stream("GET", EVENTS) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))


def state(http: httpx.Client) -> dict[str, Any]:
    with states(http) as coming:
        return next(coming)


def seen(http: httpx.Client) -> dict[str, Any]:
    """The first state in which the engine has answered: a busy one is not waited for."""
    with states(http) as coming:
        return next(one for one in coming if one["engine"])


def chat(http: httpx.Client, text: str = "hello", **fields: Any) -> None:
    body = {"model": "kedge-nano", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
    http.post("/v1/chat/completions", json=body).raise_for_status()


# the page -------------------------------------------------------------------------------------------------------------


def test_the_page_and_all_that_it_loads_come_from_here(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    loaded = re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text)
    scripts = [
        file.name for file in (files("kedge.server.dashboard") / "static").iterdir() if file.name.endswith(".js")
    ]
    for path in (*loaded, *(f"/static/{name}" for name in scripts)):
        answer = http.get(path)
        assert answer.status_code == 200, path
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert not re.search(r"""(?:from|import|url\(|src=|href=)\s*["']?https?:""", answer.text), path
    assert len(loaded) == 4


@pytest.mark.parametrize("name", ["app.py", "..%2fapp.py", "%00.js", ".js", "index.html%00", "__init__.py"])
def test_no_other_file_is_served(http: httpx.Client, name: str) -> None:
    answer = http.get(f"/static/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"]


# the events -----------------------------------------------------------------------------------------------------------


def test_a_state_comes_at_once_and_another_when_something_has_changed() -> None:
    with EchoEngine() as engine, serving(engine) as running, running.http() as http, states(http) as coming:
        first = next(coming)
        assert (first["requests"], first["runs"], first["receipts"], first["workflows"]) == (0, [], [], [])
        assert first["server"] == {"model": "kedge-nano", "version": first["server"]["version"], "open": True}
        chat(running.http())
        later = next(state for state in coming if state["requests"])
        assert later["receipts"][0]["agent"] == ""
        assert sum(later["tokens"].values()) == sum(later["receipts"][0]["tokens"].values()) > 0


def test_a_run_with_its_graph_its_agents_and_its_end() -> None:
    with EchoEngine(delay_s=0.02) as engine, serving(engine) as running, running.http() as http:
        http.post("/v1/workflows", content=FLOW, headers={"Content-Type": "application/yaml"}).raise_for_status()
        with states(http) as coming:
            inputs = {"user_question": "what is it?"}
            started = running.http().post("/v1/workflows/pair/runs", json={"inputs": inputs}).json()
            seen = next(
                one for one in coming if one["runs"] and one["runs"][0]["agents"]["first"]["state"] == "running"
            )
            ended = next(one for one in coming if one["runs"][0]["status"] != "running")
    (run,) = seen["runs"]
    assert (run["id"], run["workflow"], run["status"]) == (started["id"], "pair", "running")
    assert run["agents"]["last"] == {"state": "expected", "calls": 0, "steps": 1}
    assert seen["workflows"] == [
        {
            "name": "pair",
            "columns": [["first"], ["last"]],
            "edges": [{"from": "first", "to": "last", "loop": False}],
            "titles": {},
        }
    ]
    (run,) = ended["runs"]
    assert run["status"] == "finished"
    assert {agent: place["calls"] for agent, place in run["agents"].items()} == {"first": 1, "last": 1}
    assert [one["agent"] for one in ended["receipts"]] == ["last", "first"]


def test_a_run_that_fails_says_so() -> None:
    with EchoEngine(lambda _: "x" * 500, max_prompt=100) as engine, serving(engine) as running, running.http() as http:
        http.post("/v1/workflows", json=SLOW).raise_for_status()
        http.post("/v1/workflows/slow/runs", json={"inputs": {"user_question": "?"}, "stream": True})
        (run,) = state(http)["runs"]
    assert run["status"] == "failed"


def test_a_run_that_the_client_drives_is_followed_until_it_says_final(http: httpx.Client) -> None:
    hints = {"workflow": "graph", "run": "mine", "agent": "a", "client": "me", "steps": {"a": 0, "b": 1}}
    chat(http, kedge=hints)
    (run,) = [one for one in state(http)["runs"] if one["workflow"] == "graph"]
    assert (run["id"], run["status"], run["agents"]["b"]["steps"]) == ("me/mine", "running", 1)
    http.post("/v1/hints", json={"kedge": {"run": "mine", "client": "me", "final": True}}).raise_for_status()
    (run,) = [one for one in state(http)["runs"] if one["workflow"] == "graph"]
    assert run["status"] == "ended"


# the engine's state ---------------------------------------------------------------------------------------------------


def test_the_engines_state_is_sent_when_it_changes_and_says_why() -> None:
    with EchoEngine() as engine, serving(engine) as running, running.http() as http, states(http) as coming:
        assert next(coming)["health"] == {"state": "healthy", "reason": "", "silent_s": 0.0}
        engine.fail(RuntimeError("boom"))
        failed = next(one["health"] for one in coming if one["health"]["state"] != "healthy")
        assert (failed["state"], failed["reason"]) == ("failed", "boom")


def test_a_server_that_ends_says_so_in_a_last_state() -> None:
    with EchoEngine() as engine, serving(engine) as running, running.http() as http, states(http) as coming:
        next(coming)
        running.service.is_ending = True
        *_, last = coming
    assert last["health"]["state"] == "shutting down"


def test_a_server_without_room_is_overloaded() -> None:
    config = ServerSettings(max_in_flight=1)
    with EchoEngine(lambda _: "a" * 500, delay_s=0.02) as engine, serving(engine, config) as running:
        body = {"prompt": "x", "max_tokens": 500, "stream": True}
        with running.http() as http, http.stream("POST", "/v1/completions", json=body):
            full = state(running.http())["health"]
            refused = running.http().post("/v1/completions", json={"prompt": "y"})
        running.wait_quiet()
        after = state(running.http())
    assert refused.status_code == 503
    assert (full["state"], full["reason"]) == ("overloaded", "all 1 places for generations and runs are taken")
    assert (after["health"]["state"], after["failures"]["refused"]) == ("overloaded", 1)
    assert after["health"]["reason"] == "calls were refused for want of room"


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({}, "healthy"),
        ({"silent_s": SILENT_SECONDS + 1}, "overloaded"),
        ({"overload_age_s": OVERLOAD_SECONDS + 1}, "healthy"),
        ({"is_closed": True, "silent_s": SILENT_SECONDS + 1}, "closed"),
    ],
)
def test_what_makes_an_engine_overloaded_or_closed(served: Served, known: dict[str, Any], expected: str) -> None:
    told = health(served.service, **{"is_closed": False, "silent_s": 0.0, "overload_age_s": None, **known})
    assert told.state == expected


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


# tenants --------------------------------------------------------------------------------------------------------------


def keys() -> KeyRing:
    names = {"acme": "key-a", "other": "key-b", "*": "key-o"}
    return load_keys(None, ",".join(f"{name}:{hashed(key)}" for name, key in names.items()), LimitSettings())


def test_with_keys_everyone_sees_what_is_theirs_and_no_totals() -> None:
    with tiny_engine() as engine, serving(engine, keys=keys()) as running:
        with running.http("key-a") as acme, running.http("key-b") as other:
            chat(acme, "a secret", kedge={"agent": "spy", "fixed_messages": 1, "run": "r"})
            mine, theirs = seen(acme), seen(other)
        for key in ("wrong", "key-o"):
            assert running.http(key).get(EVENTS).status_code == 401
        assert httpx.get(running.url + EVENTS).status_code == 401
        assert httpx.get(running.url + "/").status_code == 200
    assert mine["requests"] == 1
    assert mine["engine"].keys() == {"cached", "pools"}
    empty = {"waiting": 0, "running": 0, "requests": 0, "agents": [], "runs": [], "receipts": [], "workflows": []}
    assert {name: theirs[name] for name in empty} == empty
    assert not any(theirs["tokens"].values())
    assert theirs["engine"] == {"cached": [], "pools": []}


def test_a_tenant_may_open_only_so_many_pages_and_gone_ones_do_not_count() -> None:
    with EchoEngine() as engine, serving(engine) as running:
        opened = [running.http() for _ in range(MAX_WATCHERS)]
        answers = [http.send(http.build_request("GET", EVENTS), stream=True) for http in opened]
        assert {answer.status_code for answer in answers} == {200}
        with running.http() as http:
            refused = http.get(EVENTS)
            assert refused.status_code == 429
            assert "pages" in refused.json()["error"]["message"]
            answers.pop().close()
            opened.pop().close()
            watchers = running.app.state.dashboard._watchers
            wait_until(lambda: watchers["default"] == MAX_WATCHERS - 1)
            assert state(http)["requests"] == 0
        for answer in answers:
            answer.close()
        wait_until(lambda: not watchers["default"])


# the engine's insides -------------------------------------------------------------------------------------------------


@contextmanager
def tiny_engine(**settings: Any) -> Iterator[LocalEngine]:
    with engine_of(tiny_model("llama"), **settings) as engine:
        engine.tokenizer.inner.chat_template = TEMPLATE
        yield engine


def test_an_engine_that_can_be_looked_into_shows_tiers_and_fixed_prompts() -> None:
    with tiny_engine() as engine, serving(engine) as running, running.http() as http:
        chat(http, "x" * 200, kedge={"agent": "solver", "fixed_tokens": 100})
        engine.wait_idle()
        with states(http) as coming:
            seen = next(one["engine"] for one in coming if one["engine"].get("cached"))
    assert seen["cached"] == [{"workflow": "", "agent": "solver", "device": 96, "host": 0}]
    assert seen["tiers"]["device"]["cached"] > 0
    assert sum(seen["tiers"]["device"].values()) * engine.config.block_size == engine.capacity
    assert sum(seen["prefetch"].values()) == 0
    assert seen["pools"] == []


def test_an_engine_that_has_stopped_is_told_as_stopped() -> None:
    with tiny_engine() as engine, serving(engine) as running, running.http() as http:
        engine.close()
        assert state(http)["engine"] == {"closed": True}


def test_an_engine_that_cannot_be_looked_into_shows_the_rest(http: httpx.Client) -> None:
    assert state(http)["engine"] == {}


def test_a_busy_engine_holds_nobody_up() -> None:
    with tiny_engine() as engine, serving(engine) as running, running.http() as http:
        chat(http)
        release = threading.Event()
        engine._mailbox.post(release.wait)
        try:
            assert state(http)["requests"] == 1
        finally:
            release.set()


def test_the_engine_is_asked_for_the_tenants_own_with_all_its_salts() -> None:
    class Fake:
        def inspect_tenants(self, owns: Any, prompts: Any) -> dict[str, Any]:
            asked = [Namespace.parse(name) for name in ("acm", "acme", "acme/0123", "acme2", "other")]
            return {
                "pools": [name for name in asked if owns(name)],
                "prompts": [{"device": 1, "host": 0} for _ in prompts],
            }

    name = AgentName(WorkflowId("flow"), AgentId("solver"))
    told = dashboard._look(
        Fake(), TenantId("acme"), {name: (Namespace(TenantId("acme"), "0123"), (1, 2))}, with_totals=False
    )
    assert told == {
        "pools": [Namespace.parse("acme"), Namespace.parse("acme/0123")],
        "cached": [{"workflow": "flow", "agent": "solver", "device": 1, "host": 0}],
    }
