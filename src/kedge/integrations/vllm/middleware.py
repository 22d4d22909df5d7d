"""Hints in any dialect for vLLM's own server: an ASGI middleware that passes them on to the plug-in.

    vllm serve MODEL --middleware kedge.integrations.vllm.middleware.KedgeMiddleware

Clients send what they send anyway, in headers and bodies (`kedge.hints`). A request's hints are put into the field of
its body that vLLM passes on, `kv_transfer_params.kedge`. Everything else is left as it is, answers included, and a
request without hints or with a body that cannot be read byte for byte. At `/kedge` it shows what the plug-in has found
in plain traffic, at `/kedge/report` the same as JSON; neither has any text of a prompt. `POST /v1/hints` takes hints
without a prompt, as `kedge serve` does.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from kedge.discovery.report import page
from kedge.errors import RequestError
from kedge.hints import Hints, read_hints
from kedge.hints.values import without_infinity
from kedge.integrations.vllm import hint_route

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
PAGE, DATA = "/kedge", "/kedge/report"
"""What the plug-in has found, as a page and as JSON"""
MAX_BODY_BYTES = 4 << 20
"""Bodies that are longer are passed on unread: they are read before vLLM checks the caller's key, in its event loop"""
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
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].endswith(hint_route.PATH):
            await hint_route.answer(self._app, scope, receive, send, plugin_hints)
            return
        if _has_json_body(scope):
            scope, receive = await _with_hints(scope, receive)
        await self._app(scope, receive, send)


async def _show(path: str, send: Send) -> None:
    """Answer with what the plug-in has found in plain traffic, as a page or as JSON; of several engines the first's."""
    from kedge.integrations.vllm.plugin.metrics import REPORTS

    report = next((REPORTS[engine] for engine in sorted(REPORTS)), None)
    body, kind = (page(report), b"text/html") if path == PAGE else (json.dumps(report), b"application/json")
    headers = [(b"content-type", kind + b"; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})


def _has_json_body(scope: Mapping[str, Any]) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(PATHS):
        return False
    headers = _headers(scope)
    return "json" in headers.get("content-type", "json") and "content-encoding" not in headers


def _headers(scope: Mapping[str, Any]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


async def _with_hints(scope: MutableMapping[str, Any], receive: Receive) -> tuple[MutableMapping[str, Any], Receive]:
    """Return a request as it is passed on: with its hints, or unchanged."""
    messages, size = [await receive()], 0
    while messages[-1]["type"] == "http.request":
        size += len(messages[-1].get("body", b""))
        if size > MAX_BODY_BYTES:
            break
        if not messages[-1].get("more_body", False):
            body = b"".join(one.get("body", b"") for one in messages)
            passed_on = add_hints(body, _headers(scope))
            if passed_on is not None:
                return _resized(scope, len(passed_on)), _replayed([{**messages[-1], "body": passed_on}], receive)
            break
        messages.append(await receive())
    return scope, _replayed(messages, receive)


def _resized(scope: MutableMapping[str, Any], size: int) -> MutableMapping[str, Any]:
    others = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    return {**scope, "headers": [*others, (b"content-length", str(size).encode())]}


def _replayed(messages: list[Message], receive: Receive) -> Receive:
    """Return a `receive` that gives these messages first."""
    left = iter(messages)

    async def replay() -> Message:
        message = next(left, None)
        return await receive() if message is None else message

    return replay


def add_hints(body: bytes, headers: Mapping[str, str]) -> bytes | None:
    """Return a JSON body with the hints in it and in `headers`, whose names are in lower case.

    None where it has none, or is no JSON object that could take them: then vLLM gets it as it is.
    """
    try:
        fields = json.loads(body)
        hints = plugin_hints(read_hints(fields, headers)[0]) if isinstance(fields, dict) else {}
    except (ValueError, RecursionError, RequestError):
        return None
    given = fields.get("kv_transfer_params") or {} if hints else None
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
