"""Hints in any dialect reach the plug-in through vLLM's own server, and nothing else of a request changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.discovery import PlainRequests
from kedge.integrations.vllm import middleware
from kedge.integrations.vllm.middleware import PATHS, KedgeMiddleware
from kedge.integrations.vllm.plugin.hints import read_hints
from kedge.settings import DiscoverySettings
from kedge.types import ReuseMode, TurnHints
from tests.coding_clients import CLAUDE_CODE, CODEX, SESSION, SUBAGENT, claude_code, codex, with_other_ids

CHAT = PATHS[0]


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


def passed(
    body: bytes, headers: Mapping[str, str] | None = None, path: str = CHAT, *, pieces: int = 1, method: str = "POST"
) -> Upstream:
    """Return what vLLM gets of a request that comes in so many pieces."""
    upstream = Upstream()
    sent = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in sent.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    size = -(-len(body) // pieces) or 1
    chunks = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    messages = [
        {"type": "http.request", "body": chunk, "more_body": at + 1 < len(chunks)} for at, chunk in enumerate(chunks)
    ]
    left = iter([*messages, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(left)

    async def send(_: Any) -> None:
        pass

    asyncio.run(KedgeMiddleware(upstream)(scope, receive, send))
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
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body}

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        asyncio.run(
            KedgeMiddleware(app)({"type": "http", "method": "POST", "path": CHAT, "headers": []}, receive, send)
        )
        assert [one.get("status") for one in sent] == [400, None]
        fields.append(json.loads(sent[1]["body"])["error"]["param"])
    assert len(set(fields)) == 1
    return str(fields[0])


def hints_of(upstream: Upstream) -> Any:
    return json.loads(upstream.body)["kv_transfer_params"]["kedge"]


@pytest.mark.parametrize(
    ("path", "body", "headers", "expected"),
    [
        (PATHS[3], claude_code("any", 32000), CLAUDE_CODE, TurnHints(SESSION, keep_for=300)),
        (
            PATHS[3],
            claude_code("any", 32000),
            SUBAGENT,
            TurnHints(f"{SESSION}/agent-7", f"{SESSION}/main", keep_for=300),
        ),
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


@pytest.mark.parametrize("case", with_other_ids("any"))
def test_of_several_ids_one_is_the_session(case: str) -> None:
    path, body, headers, session = with_other_ids("any")[case]
    given = hints_of(passed(json.dumps(body).encode(), headers, path)) if session else {}
    assert (given.get("session", ""), given.get("run", "")) == (session, session)


def test_all_hints_of_the_kedge_field_are_passed_on() -> None:
    kedge = {
        "workflow": "w", "run": "r", "agent": "a", "client": "c", "seq": 4, "steps": {"a": 0, "b": None},
        "fixed_tokens": 3, "reuse": "exact", "session": "s", "parent": "p", "returns_in": 2, "final": True,
        "keep_for": 60, "expects": {"next": 0, "done": None},
    }  # fmt: skip
    assert hints_of(passed(json.dumps({"kedge": kedge}).encode())) == kedge


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
        (b'{"kedge": {"reuse": "fast"}}', {}, CHAT, "POST"),
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
    sent: list[Any] = []

    async def locked(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message["status"])

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    asyncio.run(KedgeMiddleware(locked)(scope, None, send))  # type: ignore[arg-type]
    assert sent == [401]


@pytest.mark.parametrize(
    "given", [{"extra_key": "k"}, {"extra_key": ["k", "l"]}, {"extra_key": "k", "cache_salt": "s"}]
)
def test_what_separates_caches_reaches_vllms_own_field(given: dict[str, Any]) -> None:
    salt = json.loads(passed(json.dumps({"prompt": "x", **given}).encode()).body)["cache_salt"]
    assert all(part in salt for part in ("k", *given.get("cache_salt", "")))


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("bad", [7, "", [], {}, "x" * 5000])
def test_what_cannot_separate_caches_is_refused(name: str, bad: object) -> None:
    assert refused(json.dumps({"prompt": "x", name: bad}).encode()) == name


def test_other_protocols_are_left_alone() -> None:
    seen = []

    async def app(scope: Any, *_: Any) -> None:
        seen.append(scope)

    asyncio.run(KedgeMiddleware(app)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == [{"type": "lifespan"}]


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["kedge", "session_id", "nvext", "agent_hints", "x", "steps"]), inner, max_size=4
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


def test_the_report_of_plain_traffic_is_given_and_other_paths_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from kedge.integrations.vllm.plugin import metrics

    monkeypatch.setattr(metrics, "REPORTS", {1: PlainRequests(DiscoverySettings()).report()})
    assert json.loads(shown("/kedge/report"))["mode"] == "observe"
    assert shown("/kedgehog") == b""


def shown(path: str) -> bytes:
    """What the middleware answers itself."""
    sent: list[Any] = []

    async def call() -> None:
        async def keep(message: Any) -> None:
            sent.append(message)

        async def never() -> Any:
            raise AssertionError("a report reads no body")

        async def passed_on(*_: Any) -> None:
            """Vllm's application, which sends nothing here."""

        scope = {"type": "http", "method": "GET", "path": path, "headers": []}
        await middleware.KedgeMiddleware(passed_on)(scope, never, keep)

    asyncio.run(call())
    return b"".join(one.get("body", b"") for one in sent)
