"""Hints in any dialect reach the plug-in through vLLM's own server, and nothing else of a request changes.

Hints without a prompt: who may send them, what is refused, and how answers are joined.
"""

import asyncio
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.testclient import TestClient
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.v1.engine.exceptions import EngineDeadError

from kedge.errors import EngineClosed
from kedge.hints import ActionOutcome
from kedge.hints.actions import ActionResult
from kedge.integrations.vllm.middleware import PATHS, KedgeMiddleware
from kedge.integrations.vllm.plugin import hints
from kedge.integrations.vllm.plugin.hints import read_hints
from kedge.structures.bounded import ENTRIES
from kedge.types import ReuseMode, TurnHints
from tests.coding_clients import CLAUDE_CODE, CODEX, SESSION, SUBAGENT, claude_code, codex

CHAT = PATHS[0]
OF_SUBAGENT = TurnHints(f"{SESSION}/agent-7", f"{SESSION}/main", keep_for=300)


class Upstream:
    """vLLM's application: it records what reaches it."""

    def __init__(self) -> None:
        self.body, self.headers = b"", dict[str, str]()
        self.after: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        message = await receive()
        self.body = message.get("body", b"")
        while message.get("more_body"):
            message = await receive()
            self.body += message.get("body", b"")
        self.after = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})


def called(
    vllm: Any,
    body: bytes,
    headers: Mapping[str, str],
    path: str = CHAT,
    pieces: int = 1,
    method: str = "POST",
    **scope: Any,
) -> tuple[list[Any], Any]:
    """Call the middleware before an application: what it sends, and what is left to read of the body's pieces."""
    size = -(-len(body) // pieces) or 1
    chunks = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    messages = [
        {"type": "http.request", "body": chunk, "more_body": at + 1 < len(chunks)} for at, chunk in enumerate(chunks)
    ]
    left, sent = iter([*messages, {"type": "http.disconnect"}]), list[Any]()

    async def receive() -> Any:
        return next(left)

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    given = {"type": "http", "method": method, "path": path, "headers": raw, **scope}
    asyncio.run(KedgeMiddleware(vllm)(given, receive, send))
    return sent, left


def passed(
    body: bytes, headers: Mapping[str, str] | None = None, path: str = CHAT, *, pieces: int = 1, method: str = "POST"
) -> Upstream:
    """Return what vLLM gets of a request that comes in so many pieces."""
    upstream = Upstream()
    sent = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    called(upstream, body, sent, path, pieces, method)
    assert int(upstream.headers.get("content-length", len(upstream.body))) == len(upstream.body)
    assert upstream.after == {"type": "http.disconnect"}
    return upstream


async def fastapi_like(_: Any, receive: Any, send: Any) -> None:
    """An application that answers as FastAPI does where a body cannot be read."""
    try:
        await receive()
    except Exception:
        await send({"type": "http.response.start", "status": 422, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


async def careless(_: Any, receive: Any, __: Any) -> None:
    await receive()


def refused(body: bytes) -> str:
    """Return the field that a refusal of the body names, whatever vLLM makes of it."""
    fields = []
    for app in (fastapi_like, careless):
        sent, _ = called(app, body, {})
        assert [one.get("status") for one in sent] == [400, None]
        fields.append(json.loads(sent[1]["body"])["error"]["param"])
    assert len(set(fields)) == 1
    return str(fields[0])


@pytest.mark.parametrize(
    ("path", "body", "headers", "expected"),
    [
        (PATHS[3], claude_code("any", 32000), CLAUDE_CODE, TurnHints(SESSION, keep_for=300)),
        (PATHS[3], claude_code("any", 32000), SUBAGENT, OF_SUBAGENT),
        (PATHS[2], codex("any"), CODEX, TurnHints(CODEX["thread-id"], CODEX["x-codex-parent-thread-id"])),
        (CHAT, {"session_id": "s"}, {"x-dynamo-session-final": "true"}, TurnHints("s", is_last=True)),
        (CHAT, {"agent_hints": {"agent_id": "a", "expected_tool_duration_ms": 900}}, {}, TurnHints(returns_in=0.9)),
    ],
    ids=["claude code", "its subagent", "codex", "dynamo", "sglang"],
)
@pytest.mark.parametrize("pieces", [1, 7])
def test_the_plugin_reads_what_clients_send(
    path: str, body: dict[str, Any], headers: dict[str, str], expected: TurnHints, pieces: int
) -> None:
    upstream = passed(json.dumps(body).encode(), headers, path, pieces=pieces)
    call = read_hints("r", [1, 2], None, json.loads(upstream.body)["kv_transfer_params"], ReuseMode.EXACT)
    assert call and not call.ignored and call.request.turn == expected
    assert {key: value for key, value in json.loads(upstream.body).items() if key != "kv_transfer_params"} == body


def test_actions_are_passed_on_with_what_becomes_of_them() -> None:
    action = {"action_id": "1", "action_type": "kv.fetch@1.0", "payload": {"session_id": "next"}}
    upstream = passed(json.dumps({"kv_hints": {"actions": [action, 3]}}).encode())
    call = read_hints("r", [1, 2], None, json.loads(upstream.body)["kv_transfer_params"], ReuseMode.EXACT)
    assert call and not call.ignored and call.request.turn == TurnHints(expects={"next": 0.0})
    assert [(one["action_id"], one["outcome"]) for one in call.actions] == [("1", "deferred"), ("", "rejected")]


def test_what_a_client_sends_for_the_plugin_itself_wins() -> None:
    given = {"kedge": {"agent": "mine", "segments": []}, "do_remote_prefill": False}
    body = json.dumps({"session_id": "s", "kedge": {"agent": "other"}, "kv_transfer_params": given}).encode()
    passed_on = json.loads(passed(body).body)["kv_transfer_params"]
    merged = {"agent": "mine", "segments": [], "session": "s", "run": "s"}
    assert passed_on == {"kedge": merged, "do_remote_prefill": False}


@pytest.mark.parametrize(
    ("body", "headers", "path", "method"),
    [
        (b'{"prompt":  "x"}', {}, CHAT, "POST"),
        (b'{"session_id": ', {}, CHAT, "POST"),
        (b"\xff\xfe", {}, CHAT, "POST"),
        (b"[" * 100_000, {}, CHAT, "POST"),
        (b'["session_id"]', {"x-session-id": "s"}, CHAT, "POST"),
        (b'{"session_id": "s", "kv_transfer_params": 5}', {}, CHAT, "POST"),
        (b'{"session_id": "s", "kv_transfer_params": {"kedge": 5}}', {}, CHAT, "POST"),
        (b'{"session_id": "s"}', {}, "/v1/embeddings", "POST"),
        (b'{"session_id": "s"}', {}, CHAT, "PUT"),
        (b'{"session_id": "s"}', {"content-encoding": "gzip"}, CHAT, "POST"),
        (b'{"session_id": "s"}', {"content-type": "text/plain"}, CHAT, "POST"),
        (b"", {}, CHAT, "POST"),
    ],
)
def test_what_has_no_hints_or_cannot_be_read_is_passed_on_byte_for_byte(
    body: bytes, headers: dict[str, str], path: str, method: str
) -> None:
    assert passed(body, headers, path, method=method).body == body


def test_a_long_body_keeps_its_cache_apart() -> None:
    body = json.dumps({"extra_key": "k", "prompt": "x" * (5 << 20)}).encode()
    assert json.loads(passed(body, pieces=9).body)["cache_salt"] == json.loads(passed(body).body)["cache_salt"]


def test_no_body_is_read_before_vllm_has_looked_at_the_callers_key() -> None:
    async def locked(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})

    sent, left = called(locked, b"{}", {})
    assert [one["status"] for one in sent] == [401] and next(left)["body"] == b"{}"


@pytest.mark.parametrize(
    "given", [{}, {"extra_key": ["k", "l"]}, {"cache_salt": "s"}, {"kv_transfer_params": {"kedge": 5}}]
)
def test_what_separates_caches_reaches_vllms_own_field(given: dict[str, Any]) -> None:
    salt = json.loads(passed(json.dumps({"extra_key": "k", **given}).encode()).body)["cache_salt"]
    assert all(part in salt for part in ("k", *given.get("cache_salt", "")))


BAD = {"reuse": "fast", "guard": "offf", "fidelity": "superb", "bindings": 5}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *((name, {name: bad}) for name in ("cache_salt", "extra_key") for bad in (7, "", [], {}, "x" * 5000)),
        *((f"kedge.{name}", {"kedge": {"agent": "a", name: bad}}) for name, bad in BAD.items()),
        *((f"kedge.{name}", {"kv_transfer_params": {"kedge": {name: bad}}}) for name, bad in BAD.items()),
        ("session_id", {"session_id": 7}),
    ],
)
def test_what_must_be_valid_is_refused_as_kedges_server_does(name: str, fields: dict[str, Any]) -> None:
    assert refused(json.dumps({"prompt": "x", **fields}).encode()) == name


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"kedge": {"agent": "a", "agnet": "b", "keep_for": "long"}, "agent_hints": {"agent_id": 7}}, 3),
        ({"kv_transfer_params": {"kedge": {"agnet": "b", "keep_for": "long"}, "do_remote_prefill": False}}, 2),
        ({"kedge": {"agent": "a"}, "kv_transfer_params": {"kedge": {"agnet": "b"}}, "stream": True}, 1),
        ({"kedge": 5}, 1),
    ],
)
def test_what_is_ignored_is_counted_once(fields: dict[str, Any], count: int) -> None:
    params = json.loads(passed(json.dumps(fields).encode()).body)["kv_transfer_params"]
    call = read_hints("r", [1, 2], None, params, ReuseMode.EXACT)
    assert call is not None and call.ignored == count


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["kedge", "cache_control", "nvext", "agent_hints", "x", "steps"]), inner, max_size=4
        )
    ),
    max_leaves=10,
)


@given(JSON, st.dictionaries(st.sampled_from(["x-session-id", "thread-id", "x-dynamo-session-final"]), st.text(
    st.characters(min_codepoint=32, max_codepoint=126), max_size=9)))  # fmt: skip
def test_no_body_fails_or_loses_anything(body: Any, headers: dict[str, str]) -> None:
    passed_on = json.loads(passed(json.dumps(body).encode(), headers).body)
    if isinstance(body, dict):
        passed_on = {key: value for key, value in passed_on.items() if key != "kv_transfer_params"}
    assert passed_on == body


# hints without a prompt -----------------------------------------------------------------------------------------------

KEY = "secret"


class Engines:
    """vLLM's client for so many engines, which answer what `outcomes` says, by engine; None: not at all."""

    def __init__(self, *outcomes: Any) -> None:
        self.core_engines, self.outcomes = list(range(len(outcomes))), outcomes
        self.told: list[Any] = []
        self.utility_results: dict[int, Any] = {}

    async def _call_utility_async(self, method: str, what: str, *given: Any, engine: int) -> Any:
        assert method == "kedge"
        self.told.append((engine, what, *given))
        found = self.outcomes[engine]
        if found is None:
            await asyncio.Event().wait()
        if isinstance(found, Exception):
            raise found
        return found if what == "report" else [[one.to_dict() for one in found]]


def vllm_with(engines: Engines, connector: str | None = "KedgeConnector") -> Starlette:
    """An application with vLLM's own check of keys, and a client for these engines."""
    app = Starlette(middleware=[Middleware(KedgeMiddleware), Middleware(AuthenticationMiddleware, tokens=[KEY])])
    config = SimpleNamespace(kv_transfer_config=connector and SimpleNamespace(kv_connector=connector))
    model = SimpleNamespace(max_logprobs=0)
    app.state.engine_client = SimpleNamespace(vllm_config=config, model_config=model, engine_core=engines)
    return app


def asked(app: Starlette, body: bytes, key: str = KEY) -> tuple[int, Any]:
    """The status and the answer to hints without a prompt."""
    with TestClient(app) as client:
        got = client.post("/v1/hints", content=body, headers={"authorization": f"Bearer {key}"})
    return got.status_code, got.json()


def test_vllm_refuses_a_caller_without_its_key() -> None:
    engines = Engines([])
    app = vllm_with(engines)
    assert asked(app, b'{"kedge": {"session": "s", "keep_for": 5}}', key="wrong")[0] == 401
    with TestClient(app) as client:
        assert client.get("/v1/guard").status_code == 401 and client.get("/kedge/report").status_code == 200
        known = client.get("/v1/guard", headers={"authorization": f"Bearer {KEY}"}).json()
    assert known == {"object": "guard", "mode": None, "agents": []}
    assert [what for _, what in engines.told] == ["report"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"[" * 100_000, "body"),
        (b"\xff", "body"),
        (b'"' + b"x" * (1 << 20) + b'"', "body"),
        (b'{"kedge": {"bindings": 5}}', "kedge.bindings"),
    ],
)
def test_a_body_that_cannot_be_read_is_named(body: bytes, param: str) -> None:
    status, data = asked(vllm_with(Engines([])), body)
    assert (status, data["error"]["param"], data["error"]["type"]) == (400, param, "RequestError")


@pytest.mark.parametrize("connector", [None, "OtherConnector"])
def test_without_the_plugin_nothing_is_promised(connector: str | None) -> None:
    status, data = asked(vllm_with(Engines([]), connector), b"{}")
    assert (status, data["error"]["param"]) == (501, "kv_connector")


def test_of_several_engines_the_one_that_knows_the_session_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "TIMEOUT", 0.05)
    unknown = ActionOutcome("expects", "x", session="s")
    known = ActionOutcome("expects", "y", ActionResult.APPLIED, "s")
    other = ActionOutcome("keep_for", "z", ActionResult.DEFERRED)
    engines = Engines([unknown, other], [other, known], None, RuntimeError("vLLM has logged it"))
    message = hints.Message({"session": "s"}, "a/b")
    found = asyncio.run(hints.tell(engines, message))
    assert found is not None and sorted(found) == sorted([known, other])
    assert engines.told == [(number, "tell", [message]) for number in range(4)]
    assert asyncio.run(hints.tell(Engines(None), message)) is None
    with pytest.raises(EngineClosed):
        asyncio.run(hints.tell(Engines([], EngineDeadError()), message))


def test_the_report_of_plain_traffic_is_the_first_engines_and_made_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hints, "TIMEOUT", 0.05)
    engines = Engines(None, {"mode": "observe"}, {"mode": "other"})
    with TestClient(vllm_with(engines)) as client:
        assert [client.get("/kedge/report").json() for _ in range(2)] == [{"mode": "observe"}] * 2
    assert len(engines.told) == 3
    for other in (None, "OtherConnector"):
        with TestClient(vllm_with(engines, other)) as client:
            assert client.get("/kedge/report").json() is None
            assert client.get("/kedgehog").status_code == 404, "other paths are vLLM's"


def test_calls_that_wait_for_vllm_are_bounded() -> None:
    engines = Engines([])
    engines.utility_results = dict.fromkeys(range(ENTRIES))
    status, data = asked(vllm_with(engines), b'{"kedge": {"session": "s", "keep_for": 5}}')
    assert (status, data["error"]["type"]) == (503, "Overloaded")
