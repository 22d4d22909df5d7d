"""`POST /v1/hints` on vLLM's own server: hints without a prompt, and in the answer what becomes of each.

vLLM has no such route and answers 404 for it, unless it refuses the caller: so it is asked first, without the body.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from kedge.errors import ConfigError, EngineClosed, KedgeError, Overloaded, RequestError
from kedge.hints import ActionOutcome, Hints, read_hints
from kedge.hints.actions import ActionResult
from kedge.hints.without_prompt import UNREPORTED, outcomes
from kedge.policies.sessions import refused
from kedge.types import Namespace

PATH = "/v1/hints"
CONNECTOR = "KedgeConnector"
MAX_BODY_BYTES = 1 << 20
MAX_WAITING = 256
"""Calls that may wait for vLLM at once"""
NOT_FOUND = 404
STATUSES: Mapping[type[KedgeError], int] = {RequestError: 400, Overloaded: 503, EngineClosed: 503, ConfigError: 501}
JSON_HEADERS = [(b"content-type", b"application/json")]

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
ForPlugin = Callable[[Hints], dict[str, Any]]
"""Returns hints as the plug-in reads them."""


async def answer(app: App, scope: Scope, receive: Receive, send: Send, for_plugin: ForPlugin) -> None:
    """Answer a call. `app` is vLLM's, which may refuse it."""
    messages = await _refusal(app, scope)
    for message in messages or await _answered(scope, receive, for_plugin):
        await send(message)


async def _refusal(app: App, scope: Scope) -> list[Message]:
    """Return what vLLM answers to the caller itself, as for a wrong key; empty where it knows no such route."""
    messages: list[Message] = []

    async def nothing() -> Message:
        return {"type": "http.request", "body": b""}

    async def keep(message: Message) -> None:
        messages.append(message)

    await app(dict(scope), nothing, keep)
    return [] if messages and messages[0].get("status") == NOT_FOUND else messages


async def _answered(scope: Scope, receive: Receive, for_plugin: ForPlugin) -> list[Message]:
    try:
        status, data = 200, await _taken(scope, await _body(receive), for_plugin)
    except KedgeError as error:
        status = STATUSES.get(type(error), 500)
        data = {"error": {"message": str(error), "type": type(error).__name__, "param": error.key, "code": status}}
    begin = {"type": "http.response.start", "status": status, "headers": JSON_HEADERS}
    return [begin, {"type": "http.response.body", "body": json.dumps(data).encode()}]


async def _body(receive: Receive) -> dict[str, Any]:
    """Return the body of a call. Raises `RequestError` for one that is no JSON object, or too long."""
    parts, size, has_more = [], 0, True
    while has_more:
        message = await receive()
        parts.append(message.get("body", b""))
        size, has_more = size + len(parts[-1]), message.get("more_body", False)
        if size > MAX_BODY_BYTES:
            raise RequestError("body", f"{size} bytes", f"must have at most {MAX_BODY_BYTES}")
    try:
        body = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise RequestError("body", "…", f"must be JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("body", type(body).__name__, "must be an object")
    return body


async def _taken(scope: Scope, body: dict[str, Any], for_plugin: ForPlugin) -> dict[str, Any]:
    """Pass hints on to the plug-in, and return the answer. Raises a `KedgeError` where they cannot be."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    hints, _ = read_hints(body, headers)
    found = await _ask(scope, Namespace.parse(hints.salt or "default"), for_plugin(hints))
    taken = refused(hints.turn, UNREPORTED, ActionResult.DEFERRED) if found is None else found
    return {"object": "hints", "hints": hints.to_dict(), "actions": outcomes(body, hints, taken)}


async def _ask(scope: Scope, namespace: Namespace, hints: Mapping[str, Any]) -> list[ActionOutcome] | None:
    """Return what the plug-in makes of hints. Raises `ConfigError`, `Overloaded` or `EngineClosed`."""
    client = scope["app"].state.engine_client
    transfer = client.vllm_config.kv_transfer_config
    if getattr(transfer, "kv_connector", None) != CONNECTOR:
        raise ConfigError("kv_connector", getattr(transfer, "kv_connector", None), f"must be {CONNECTOR} for hints")

    from vllm.v1.engine.exceptions import EngineDeadError

    from kedge.integrations.vllm.plugin.metrics import ADVICE_CALLS

    if len(ADVICE_CALLS) >= MAX_WAITING:
        raise Overloaded("hints", len(ADVICE_CALLS), f"at most {MAX_WAITING} calls wait for vLLM at once")
    try:
        return await ADVICE_CALLS.ask(client.engine_core, namespace, hints)
    except EngineDeadError:
        raise EngineClosed("engine", "vllm", "its engine core has died; vLLM's log says why") from None
