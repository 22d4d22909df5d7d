"""Hints in any dialect for vLLM's own server: an ASGI middleware that passes them on to the plug-in.

    vllm serve MODEL --middleware kedge.integrations.vllm.middleware.KedgeMiddleware

Clients send what they send anyway, in headers and bodies (`kedge.hints`). A request's hints are put into the field of
its body that vLLM passes on, `kv_transfer_params.kedge`. Everything else is left as it is, answers included, and the
body of a request without hints, or one that cannot be read, byte for byte. At `/kedge` it shows what the plug-in has
found in plain traffic, at `/kedge/report` the same as JSON; neither has any text of a prompt. `POST /v1/hints` takes
hints without a prompt, as `kedge serve` does.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from kedge.discovery.report import page
from kedge.errors import ConfigError, EngineClosed, KedgeError, Overloaded, RequestError
from kedge.hints import Hints, read_hints
from kedge.hints.actions import ActionResult
from kedge.hints.values import without_infinity
from kedge.hints.without_prompt import UNREPORTED, outcomes
from kedge.policies.sessions import refused
from kedge.types import Namespace

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
PAGE, DATA = "/kedge", "/kedge/report"
"""What the plug-in has found, as a page and as JSON"""
MAX_BODY_BYTES = 64 << 20
"""Bodies that are longer are refused: a field in them that keeps caches apart would do nothing"""
FIELDS = (
    "workflow",
    "run",
    "agent",
    "client",
    "seq",
    "fixed_tokens",
    "reuse",
    "session",
    "parent",
    "returns_in",
    "keep_for",
)
"""Hints that have the same name and form in the plug-in"""

SEPARATING = ("cache_salt", "extra_key")
"""Fields that must be valid, since a cache would be shared that is to be kept apart"""
HINTS_PATH = "/v1/hints"
CONNECTOR = "KedgeConnector"
MAX_HINT_BYTES = 1 << 20
MAX_WAITING = 256
"""Calls that may wait for vLLM at once"""
NOT_FOUND = 404
STATUSES: Mapping[type[KedgeError], int] = {RequestError: 400, Overloaded: 503, EngineClosed: 503, ConfigError: 501}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class KedgeMiddleware:
    """An ASGI application around vLLM's, which adds hints to the bodies of requests."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on, with its hints where it has any; take hints without a prompt; show the page of plain
        traffic.
        """
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in (PAGE, DATA):
            await _show(scope["path"], send)
            return
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith(HINTS_PATH):
            await _answer_hints(self._app, scope, receive, send)
            return
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith(PATHS):
            headers = _headers(scope)
            if "json" in headers.get("content-type", "json") and "content-encoding" not in headers:
                await _run_with_hints(self._app, scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _show(path: str, send: Send) -> None:
    """Answer with what the plug-in has found in plain traffic, as a page or as JSON; of several engines the first's."""
    from kedge.integrations.vllm.plugin.metrics import REPORTS

    report = next((REPORTS[engine] for engine in sorted(REPORTS)), None)
    body, kind = (page(report), b"text/html") if path == PAGE else (json.dumps(report), b"application/json")
    headers = [(b"content-type", kind + b"; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})


def _headers(scope: Mapping[str, Any]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


async def _run_with_hints(app: App, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    """Run vLLM's application. A body gets its hints when it is read, since vLLM looks at the caller's key before."""
    failed: list[RequestError] = []
    unread = [_headers(scope)]

    async def read() -> Message:
        try:
            return await (_with_hints(receive, unread.pop()) if unread else receive())
        except RequestError as error:
            failed.append(error)
            raise

    async def answer(message: Message) -> None:
        if not failed:
            await send(message)

    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    try:
        await app({**scope, "headers": headers}, read, answer)
    except RequestError:
        if not failed:
            raise
    if failed:
        await _send(*_failed(failed[0]), send)


async def _with_hints(receive: Receive, headers: Mapping[str, str]) -> Message:
    """Return a whole body with its hints, or unchanged. Raises `RequestError` for one that cannot be served."""
    body = await _content(receive, MAX_BODY_BYTES)
    if body is None:
        return {"type": "http.disconnect"}
    return {"type": "http.request", "body": add_hints(body, headers) or body, "more_body": False}


async def _content(receive: Receive, most: int) -> bytes | None:
    """Return the bytes of a body, None of a client that has gone. Raises `RequestError` for one that is too long."""
    parts, size, has_more = [], 0, True
    while has_more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size, has_more = size + len(parts[-1]), message.get("more_body", False)
        if size > most:
            raise RequestError("body", f"{size} bytes", f"must have at most {most}")
    return b"".join(parts)


def add_hints(body: bytes, headers: Mapping[str, str]) -> bytes | None:
    """Return a JSON body with the hints in it and in `headers`, whose names are in lower case.

    None where it has none, or is no JSON object that could take them: then vLLM gets it as it is. What a cache is to be
    kept apart by goes into vLLM's own field; raises `RequestError` where it cannot be read.
    """
    try:
        fields = json.loads(body)
        found = read_hints(fields, headers)[0] if isinstance(fields, dict) else Hints()
    except (ValueError, RecursionError, RequestError) as error:
        if isinstance(error, RequestError) and error.key in SEPARATING:
            raise
        return None
    hints = plugin_hints(found)
    if found.salt and "extra_key" in fields:
        fields["cache_salt"] = found.salt
    elif not hints:
        return None
    given = fields.get("kv_transfer_params") or {}
    if not isinstance(given, dict) or not isinstance(own := given.get("kedge", {}), dict):
        return None
    return json.dumps({**fields, "kv_transfer_params": {**given, "kedge": {**hints, **own}}}).encode()


def plugin_hints(hints: Hints) -> dict[str, Any]:
    """Return hints as the plug-in reads them; those without an effect there are left out."""
    found = {name: getattr(hints, name) for name in FIELDS}
    for name, times in (("steps", hints.steps), ("expects", hints.expects)):
        found[name] = times and without_infinity(times)
    found["actions"] = [one.to_dict() for one in hints.actions] or None
    found["final"] = hints.final or None
    return {name: value for name, value in found.items() if value not in ("", None)}


async def _answer_hints(app: App, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
    """Answer hints without a prompt. vLLM has no such route and answers 404 for it, unless it refuses the caller, as
    for a wrong key: so it is asked first, without the body.
    """
    messages: list[Message] = []

    async def nothing() -> Message:
        return {"type": "http.request", "body": b""}

    async def keep(message: Message) -> None:
        messages.append(message)

    await app(dict(scope), nothing, keep)
    if not messages or messages[0].get("status") == NOT_FOUND:
        try:
            status, data = 200, await _taken(scope, await _body(receive))
        except KedgeError as error:
            status, data = _failed(error)
        await _send(status, data, send)
        return
    for message in messages:
        await send(message)


def _failed(error: KedgeError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error."""
    status = STATUSES.get(type(error), 500)
    return status, {"error": {"message": str(error), "type": type(error).__name__, "param": error.key, "code": status}}


async def _send(status: int, data: Mapping[str, Any], send: Send) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(data).encode()})


async def _body(receive: Receive) -> dict[str, Any]:
    """Return the body of a call. Raises `RequestError` for one that is no JSON object, or too long."""
    try:
        body = json.loads(await _content(receive, MAX_HINT_BYTES) or b"")
    except (ValueError, RecursionError) as error:
        raise RequestError("body", "…", f"must be JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("body", type(body).__name__, "must be an object")
    return body


async def _taken(scope: Mapping[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """Pass hints on to the plug-in, and return the answer. Raises a `KedgeError` where they cannot be."""
    hints, _ = read_hints(body, _headers(scope))
    namespace = Namespace.parse(hints.salt or "default")
    client = scope["app"].state.engine_client
    transfer = client.vllm_config.kv_transfer_config
    if getattr(transfer, "kv_connector", None) != CONNECTOR:
        raise ConfigError("kv_connector", getattr(transfer, "kv_connector", None), f"must be {CONNECTOR} for hints")

    from vllm.v1.engine.exceptions import EngineDeadError

    from kedge.integrations.vllm.plugin.metrics import ADVICE_CALLS

    if len(ADVICE_CALLS) >= MAX_WAITING:
        raise Overloaded("hints", len(ADVICE_CALLS), f"at most {MAX_WAITING} calls wait for vLLM at once")
    try:
        found = await ADVICE_CALLS.ask(client.engine_core, namespace, plugin_hints(hints))
    except EngineDeadError:
        raise EngineClosed("engine", "vllm", "its engine core has died; vLLM's log says why") from None
    taken = refused(hints.turn, UNREPORTED, ActionResult.DEFERRED) if found is None else found
    return {"object": "hints", "hints": hints.to_dict(), "actions": outcomes(body, hints, taken)}
