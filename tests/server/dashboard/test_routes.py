"""The dashboard over HTTP: the page, what each tenant is told, and the reports on plain traffic and the guard."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from kedge.engine.echo import EchoEngine
from kedge.engine.local.engine import LocalEngine
from kedge.guard import DecisionKind
from kedge.reuse.guard.comparison import DecisionComparison
from kedge.server.tenancy import hashed, load_keys
from kedge.settings import EngineSettings, LimitSettings, ServerSettings
from kedge.types import AgentId, GenerateRequest, ReuseMode, SampleId, Segment, TenantId, WorkflowId
from tests.cli.commands import kedge, shown
from tests.engine.local.conftest import engine_of, tiny_model
from tests.server.conftest import FLOW, PAIR, TEMPLATE, YAML, Served, serving, wait_until

STATE = "/v1/dashboard"
KEYS = f"acme:{hashed('key-a')},other:{hashed('key-b')},*:{hashed('key-o')}"


def state(http: httpx.Client, since: int = 0) -> dict[str, Any]:
    return http.get(STATE, params={"since": since}).raise_for_status().json()  # type: ignore[no-any-return]


def inside(http: httpx.Client) -> dict[str, Any]:
    return http.get(f"{STATE}/engine").raise_for_status().json()  # type: ignore[no-any-return]


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


# what the tenant did --------------------------------------------------------------------------------------------------


def test_a_call_is_told_once_and_a_page_asks_for_what_is_new() -> None:
    with EchoEngine() as engine, serving(engine) as running, running.http() as http:
        first = state(http)
        assert (first["calls"], first["runs"], first["failures"], first["workflows"]) == ([], [], [], [])
        assert first["health"] == {"state": "healthy", "reason": ""}
        about = {"model": "kedge-nano", "open": True, "started": running.service.started}
        assert about.items() <= first["server"].items()
        chat(http)
        later = state(http, first["version"])
        (call,) = later["calls"]
        assert (call["agent"], call["state"], call["answer_tokens"]) == ("", "done", 4)
        assert state(http, later["version"])["calls"] == []


def test_a_run_with_its_graph_its_agents_and_its_end() -> None:
    with EchoEngine(delay_s=0.02) as engine, serving(engine) as running, running.http() as http:
        http.post("/v1/workflows", content=FLOW, headers=YAML).raise_for_status()
        inputs = {"user_question": "what is it?"}
        run = http.post("/v1/workflows/pair/runs", json={"inputs": inputs}).json()["id"]
        wait_until(lambda: [one["state"] for one in state(http)["calls"]] == ["running"])
        seen = state(http)
        wait_until(lambda: state(http)["runs"][0]["status"] != "running")
        ended = state(http)
    assert seen["runs"] == [{"id": run, "workflow": "pair", "status": "running", "reason": None}]
    assert [(one["run"], one["agent"]) for one in seen["calls"]] == [(run, "first")]
    assert {"run": run, "agent": "last", "steps": 1} in seen["steps"]
    edges = [{"from": "first", "to": "last", "loop": False}]
    assert seen["workflows"] == [{"name": "pair", "columns": [["first"], ["last"]], "edges": edges, "titles": {}}]
    assert (ended["runs"][0]["status"], ended["steps"]) == ("finished", [])
    assert [(one["agent"], one["state"]) for one in ended["calls"]] == [("first", "done"), ("last", "done")]


def test_a_run_that_the_client_drives_is_followed_until_it_says_final(http: httpx.Client) -> None:
    hints = {"workflow": "graph", "run": "mine", "agent": "a", "client": "me", "steps": {"a": 0, "b": 1}}
    chat(http, kedge=hints)
    told = state(http)
    assert {"id": "me/mine", "status": "running"} in told["runs"]
    assert {"run": "me/mine", "agent": "b", "steps": 1} in told["steps"]
    http.post("/v1/hints", json={"kedge": {"run": "mine", "client": "me", "final": True}}).raise_for_status()
    assert not [one for part in ("runs", "steps") for one in state(http)[part] if "me/mine" in one.values()]


# failures and health --------------------------------------------------------------------------------------------------


def test_what_was_refused_is_listed_with_its_reason_and_its_place() -> None:
    config = ServerSettings(max_body_bytes=1000)
    with EchoEngine(max_prompt=100) as engine, serving(engine, config) as running, running.http() as http:
        hints = {"workflow": "flow", "agent": "a", "run": "r"}
        http.post("/v1/completions", json={"prompt": "x" * 500, "kedge": hints})
        http.post("/v1/completions", json={"prompt": "x", "temperature": -9})
        http.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"})
        http.get("/nowhere")
        http.get("/v1/dashboard/calls/7")
        http.post("/v1/completions", json={"prompt": "x" * 2000})
        told = state(http)["failures"]
    assert [one["status"] for one in told] == [413, 400, 400, 400]
    assert {one["kind"] for one in told} == {"refused"}
    too_long = told[-1]
    assert (too_long["code"], too_long["route"]) == ("context_length_exceeded", "POST /v1/completions")
    assert {name: too_long[name] for name in hints} == hints
    assert "100" in too_long["reason"]


def test_a_run_that_fails_is_listed_with_its_reason() -> None:
    with EchoEngine(lambda _: "x" * 500, max_prompt=100) as engine, serving(engine) as running, running.http() as http:
        http.post("/v1/workflows", json=PAIR).raise_for_status()
        http.post("/v1/workflows/pair/runs", json={"inputs": {"user_question": "?"}, "stream": True})
        told = state(http)
    (run,), (listed,) = told["runs"], told["failures"]
    assert (listed["run"], listed["workflow"], listed["kind"]) == (run["id"], "pair", "refused")
    assert (run["status"], run["reason"]) == ("failed", listed["reason"])


def test_a_stream_that_breaks_off_is_listed_and_the_engine_is_told_as_failed() -> None:
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
        told = state(running.http())
    (broken,) = told["failures"]
    assert (broken["kind"], broken["code"], broken["route"]) == ("failed", "engine_closed", "POST /v1/completions")
    assert told["health"] == {"state": "failed", "reason": "boom"}


def test_a_server_that_ends_or_has_no_room_says_so() -> None:
    config = ServerSettings(max_in_flight=1)
    with EchoEngine(lambda _: "a" * 500, delay_s=0.02) as engine, serving(engine, config) as running:
        body = {"prompt": "x", "max_tokens": 500, "stream": True}
        with running.http() as http, http.stream("POST", "/v1/completions", json=body):
            full = state(running.http())["health"]
            refused = running.http().post("/v1/completions", json={"prompt": "y"})
        running.wait_quiet()
        assert running.http().post("/v1/completions", json={**body, "max_tokens": 1}).status_code == 200
        running.wait_quiet()
        after = state(running.http())
        running.service.is_ending = True
        ending = state(running.http())["health"]
    assert (refused.status_code, after["failures"][0]["code"]) == (503, "overloaded")
    assert full == {"state": "overloaded", "reason": "all 1 places for generations and runs are taken"}
    assert after["health"]["state"] == "healthy"
    assert ending["state"] == "shutting down"


# texts ----------------------------------------------------------------------------------------------------------------


def text_of_the_only_call(running: Served, key: str = "none") -> dict[str, Any]:
    with running.http(key) as http:
        chat(http)
        (call,) = state(http)["calls"]
        return http.get(f"{STATE}/calls/{call['number']}").json()  # type: ignore[no-any-return]


def test_a_tenant_chooses_for_itself_and_sees_no_others_calls(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        f'[tenants.open]\nkeys = ["{hashed("key-a")}"]\nkeep_texts = true\n'
        f'[tenants.shy]\nkeys = ["{hashed("key-b")}"]\nkeep_texts = false\n'
    )
    for kept in (False, True):  # where a tenant does not say, the setting does
        keys = load_keys(file, f"other:{hashed('key-c')}", LimitSettings())
        with EchoEngine() as engine, serving(engine, ServerSettings(keep_texts=kept), keys) as running:
            assert bool(text_of_the_only_call(running, "key-c")["text"]) == kept
            assert not text_of_the_only_call(running, "key-b")["text"]
            text = text_of_the_only_call(running, "key-a")["text"]
            assert "hello" in "".join(piece["text"] for piece in text["prompt"]) and text["answer"]
            assert {piece["source"] for piece in text["prompt"]} == {"computed"}
            with running.http("key-b") as http:
                chat(running.http("key-a"))
                assert [http.get(f"{STATE}/calls/{number}").status_code for number in ("2", "x")] == [404, 400]


# the engine's insides -------------------------------------------------------------------------------------------------


@contextmanager
def tiny_engine(**settings: Any) -> Iterator[LocalEngine]:
    with engine_of(tiny_model("llama"), **settings) as engine:
        engine.tokenizer.inner.chat_template = TEMPLATE
        yield engine


def test_with_keys_everyone_sees_what_is_theirs_and_no_totals() -> None:
    with tiny_engine() as engine, serving(engine, keys=load_keys(None, KEYS, LimitSettings())) as running:
        with running.http("key-a") as acme, running.http("key-b") as other:
            chat(acme, "a secret", kedge={"agent": "spy", "fixed_messages": 1, "run": "r"})
            mine, theirs, held = state(acme), state(other), [inside(http) for http in (acme, other)]
        for path in (STATE, f"{STATE}/engine", f"{STATE}/calls/1"):
            assert running.http("wrong").get(path).status_code == running.http("key-o").get(path).status_code == 401
        assert httpx.get(running.url + "/").status_code == 200
    assert len(mine["calls"]) == 1 and mine["runs"]
    assert held[0].keys() == {"cached", "pools", "guard"} and held[0]["cached"]
    assert not any(theirs[name] for name in ("calls", "runs", "steps", "failures", "workflows"))
    assert held[1] == {"cached": [], "pools": [], "guard": []}


def test_an_engine_that_can_be_looked_into_shows_tiers_and_fixed_prompts() -> None:
    with tiny_engine() as engine, serving(engine) as running, running.http() as http:
        chat(http, "x" * 200, kedge={"agent": "solver", "fixed_tokens": 100})
        engine.wait_idle()
        seen = inside(http)
        assert seen["cached"] == [{"workflow": "", "agent": "solver", "fixed": 100, "device": 96, "host": 0}]
        assert seen["tiers"]["device"]["cached"] > 0
        assert sum(seen["tiers"]["device"].values()) * engine.config.block_size == engine.capacity
        assert sum(seen["prefetch"].values()) == 0
        assert seen["pools"] == []
        engine.close()
        assert inside(http) == {"closed": True}


# reports --------------------------------------------------------------------------------------------------------------

SYSTEM = "You are a careful solver of riddles. Think of every word, and answer in one line only. "


@pytest.fixture(scope="module")
def seen() -> Iterator[Served]:
    with LocalEngine(config=EngineSettings()) as engine, serving(engine) as running:
        client = running.client()
        model = client.models.list().data[0].id
        for number in range(5):
            messages = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"{number}. What has {number + 7} legs and sleeps? Tell me now."},
            ]
            client.chat.completions.create(model=model, messages=messages, max_tokens=4)  # type: ignore[arg-type]
        yield running


def test_the_report_has_what_was_found_and_no_text(seen: Served) -> None:
    with seen.http() as http:
        shown = http.get("/kedge/report")
    report = shown.json()
    assert (report["mode"], report["requests"], report["known_agents"]) == ("observe", 5, 3)
    (agent,) = report["agents"]
    assert agent["calls"] == 3 and agent["fixed_tokens"] >= 16
    assert "riddles" not in shown.text


def test_an_engine_that_looks_at_nothing_has_an_empty_report_and_no_guard() -> None:
    with EchoEngine() as engine, serving(engine) as running, running.http() as http:
        assert http.get("/kedge/report").json() is None
        assert http.get("/v1/guard").json() == EMPTY
        assert "kedge:guard" not in http.get("/metrics").text
        failed = kedge("inspect", "--from-traffic", running.url)
        assert failed.exit_code == 2 and "nothing to report yet" in " ".join(failed.output.split())


def test_inspect_reads_a_running_server(seen: Served) -> None:
    text = shown("inspect", "--from-traffic", seen.url, width=80)
    assert "plain traffic (observe): requests 5, agents" in text and "nothing was found" in text
    assert max(map(len, text.splitlines())) <= 80


def test_inspect_says_how_a_key_is_given() -> None:
    keys = load_keys(None, f"a:{hashed('k')}", LimitSettings())
    with EchoEngine() as engine, serving(engine, keys=keys) as running:
        failed = kedge("inspect", "--from-traffic", running.url, KEDGE_API_KEY=None)
    assert failed.exit_code == 2 and "answers 401 (--api-key)" in " ".join(failed.output.split())


@pytest.mark.parametrize("url", ["ftp://nowhere", "http://127.0.0.1:9", "localhost:8000", "http://exa mple"])
def test_a_server_that_cannot_be_read_is_named(url: str) -> None:
    failed = kedge("inspect", "--from-traffic", url)
    assert failed.exit_code == 2 and url in failed.output.replace("\n", "")


CLEAN, CHANGED = (DecisionComparison({DecisionKind.FAR: kl > 0}, kl) for kl in (0.0, 1.0))
EMPTY = {"object": "guard", "mode": None, "max_changed": None, "agents": []}


def test_a_tenant_sees_its_own_agents_only_and_the_operator_counts_without_names() -> None:
    keys = load_keys(None, KEYS, LimitSettings())
    with tiny_engine(guard={"mode": "on"}) as engine, serving(engine, keys=keys) as running:
        for tenant, seen in (("acme", CLEAN), ("third", CHANGED)):
            value = Segment((1, 2), "user_question", SampleId.parse("input_user_question@0"))
            whose = {"tenant": TenantId(tenant), "workflow": WorkflowId("w"), "agent": AgentId(f"spy-of-{tenant}")}
            asked = GenerateRequest((value,), reuse=ReuseMode.TRANSLATE, **whose)
            engine._guard.guard.observe(asked, (value.name,), seen)
        mine, none = (running.http(key).get("/v1/guard").json() for key in ("key-a", "key-b"))
        own, whole = (running.http(key).get("/metrics").text for key in ("key-a", "key-o"))
        assert running.http("wrong").get("/v1/guard").status_code == 401
    (record,) = mine["agents"]
    assert (record["agent"], record["checks"], record["state"]) == ("spy-of-acme", 1, "shadow")
    assert mine.keys() == EMPTY.keys() and "third" not in str(mine)
    assert none["agents"] == [] and none["mode"] == "on"
    assert "kedge:guard" not in own
    assert 'kedge:guard_placeholders{state="shadow"} 2.0' in whole and "spy" not in whole


@pytest.mark.parametrize(
    ("field", "own", "asked", "expected"),
    [
        ("guard", None, "off", "off"),
        ("guard", "shadow", None, "shadow"),
        ("guard", "shadow", "on", "on"),
        ("fidelity", "any", None, math.inf),
        ("fidelity", None, "strict", 0.0003),
        ("fidelity", 0.5, "any", math.inf),
        ("pick", "Pick:", None, "Pick:"),
        ("pick", "Pick:", "So:", "So:"),
    ],
)
def test_what_a_call_asks_for_overrides_what_its_agent_has(field: str, own: Any, asked: Any, expected: Any) -> None:
    flow = {**PAIR, "agents": [{**one, field: own} if own else one for one in PAIR["agents"]]}
    with EchoEngine() as engine, serving(engine) as running, running.http() as http:
        assert http.post("/v1/workflows", json=flow).status_code == 201
        kedge = {"workflow": "pair", "agent": "first", "bindings": {"user_question": "why?"}, field: asked}
        answer = http.post("/v1/chat/completions", json={"messages": [], "kedge": kedge})
        assert answer.status_code == 200, answer.text
        receipt = answer.json()["kedge"]["receipts"][0]
        assert (receipt["guard"], receipt["fidelity"]) == ([], None), "this engine translates nothing"
        assert getattr(engine.requests[-1].guard, "mode" if field == "guard" else field) == expected
        http.post("/v1/workflows/pair/runs", json={"inputs": {"user_question": "why?"}, "stream": True}).read()
        assert field != "pick" or {one.guard.pick for one in engine.requests[1:]} == {own or ""}
        unset = "" if field == "pick" else None
        assert [one[field] for one in http.get("/v1/workflows/pair").json()["agents"]] == [own or unset] * 2


def test_a_runs_mode_is_that_of_agents_without_their_own() -> None:
    first, *others = PAIR["agents"]
    flow = {**PAIR, "agents": [{**first, "guard": "on"}, *others]}
    with EchoEngine() as engine, serving(engine) as running, running.http() as http:
        http.post("/v1/workflows", json=flow)
        inputs = {"inputs": {"user_question": "why?"}, "guard": "off", "stream": True}
        http.post(f"/v1/workflows/{PAIR['name']}/runs", json=inputs).read()
        modes = {one.agent: one.guard.mode for one in engine.requests}
        assert http.post(f"/v1/workflows/{PAIR['name']}/runs", json={**inputs, "guard": "maybe"}).status_code == 400
    assert modes == {first["id"]: "on", **{one["id"]: "off" for one in others}}
