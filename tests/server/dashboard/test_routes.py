"""The dashboard over HTTP: the page and its files, whose state the events tell, and how many may listen."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import httpx
import pytest

from kedge.engine.echo import EchoEngine
from kedge.engine.local.engine import LocalEngine
from kedge.server.dashboard import routes as dashboard
from kedge.server.dashboard.history import AgentName
from kedge.server.dashboard.routes import MAX_WATCHERS
from kedge.server.tenancy import KeyRing, hashed, load_keys
from kedge.settings import LimitSettings
from kedge.types import AgentId, Namespace, TenantId, WorkflowId
from tests.engine.local.conftest import engine_of, tiny_model
from tests.server.conftest import FLOW, serving, wait_until
from tests.server.test_local import TEMPLATE

EVENTS = "/v1/dashboard/events"
SLOW = {
    "name": "slow",
    "agents": [{"id": "first", "user": "Q: {user_question}"}, {"id": "last", "user": "A: {agent_first_current}"}],
}


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
    assert mine["engine"].keys() == {"cached", "pools", "guard"}
    empty = {"waiting": 0, "running": 0, "requests": 0, "agents": [], "runs": [], "receipts": [], "workflows": []}
    assert {name: theirs[name] for name in empty} == empty
    assert not any(theirs["tokens"].values())
    assert theirs["engine"] == {"cached": [], "pools": [], "guard": []}


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
        engine._thread.post(release.wait)
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
        "pools": [Namespace(TenantId("acme")), Namespace(TenantId("acme"), "0123")],
        "cached": [{"workflow": "flow", "agent": "solver", "device": 1, "host": 0}],
        "guard": None,
    }
