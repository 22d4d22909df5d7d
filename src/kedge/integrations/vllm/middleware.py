"""Hints in any dialect for vLLM's own server: an ASGI middleware that passes them on to the plug-in.

    vllm serve MODEL --middleware kedge.integrations.vllm.middleware.KedgeMiddleware

Clients send what they send anyway, in headers and bodies (`kedge.hints`). A request's hints are put into the field of
its body that vLLM passes on, `kv_transfer_params.kedge`; those that must be valid are refused where `kedge serve` does
so. Everything else is left as it is, answers included, and the body of a request without hints, or one that cannot be
read, byte for byte. `/kedge/report` is what the plug-in has found in plain traffic, without any text of a prompt.
`POST /v1/hints` takes hints without a prompt, and `GET /v1/guard` shows what is proved, as `kedge serve` does. From the
server's start to its end the quality guard is at work in its process (`kedge.integrations.vllm.guarded_server`).
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge.errors import ConfigError, EngineClosed, KedgeError, Overloaded, RequestError
from kedge.hints import Hints, IgnoredHints, read_hints
from kedge.hints.actions import ActionOutcome, ActionResult
from kedge.hints.without_prompt import RUN_ENDED, UNREPORTED, ends_run, outcomes
from kedge.integrations.vllm.entry_point import NAME, is_plugged
from kedge.integrations.vllm.plugin.hints import KNOWN, ask, salt_of, tell
from kedge.integrations.vllm.plugin.hints import Message as PluginMessage
from kedge.policies.sessions import refused
from kedge.structures.bounded import ENTRIES
from kedge.types import Namespace, RunKey

if TYPE_CHECKING:
    from kedge.integrations.vllm.guarded_server import ServerGuard

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
REPORT_PATH, REPORT_SECONDS = "/kedge/report", 1.0
"""What the plug-in has found in plain traffic, and how many seconds old it may be"""
UNCOUNTED = ("body", "vllm", "kv_hints")
"""Dialects in which nothing is ignored: what Kedge does not know there is vLLM's, and each action gets an outcome"""
HINTS_PATH, GUARD_PATH = "/v1/hints", "/v1/guard"
STATUSES: Mapping[type[KedgeError], int] = {RequestError: 400, Overloaded: 503, EngineClosed: 503, ConfigError: 501}


class KedgeMiddleware:
    """An ASGI application around vLLM's, which adds hints to the bodies of requests, and has a guard for its engine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._guard: ServerGuard | None = None
        self._report: asyncio.Future[Any] | None = None
        self._report_due = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with its hints where it has any. Start the guard with the server, and end it."""
        if scope["type"] == "lifespan" and "app" in scope:
            await self._run(scope, receive, send)
        elif scope.get("method") == "POST" and scope.get("path", "").endswith(PATHS):
            await _run_with_hints(self._app, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run vLLM's application from its start to its end, with routes of Kedge's and a guard."""
        from kedge.integrations.vllm.guarded_server import start_guard

        routes = (GUARD_PATH, "GET", self._proved), (HINTS_PATH, "POST", self._taken), (REPORT_PATH, "GET", self._found)
        scope["app"].router.routes.extend(Route(path, _answer(give), methods=[method]) for path, method, give in routes)
        self._guard = await start_guard(getattr(scope["app"].state, "engine_client", None))

        async def end(message: Message) -> None:
            if self._guard is not None and message["type"].startswith("lifespan.shutdown"):
                await asyncio.to_thread(self._guard.close)
            await send(message)

        await self._app(scope, receive, end)

    async def _found(self, request: Request) -> Any:
        """Return what the plug-in has found in plain traffic, None without one. Whoever asks needs no key, so the
        engine is asked once a second at most.
        """
        if self._report is None or time.monotonic() >= self._report_due:
            self._report_due = time.monotonic() + REPORT_SECONDS
            self._report = asyncio.ensure_future(_report(getattr(request.app.state, "engine_client", None)))
        return await asyncio.shield(self._report)

    async def _proved(self, _: Request) -> dict[str, Any]:
        """Return what the guard knows of all agents, `mode` None without a guard."""
        return {"object": "guard", "mode": None, "agents": [], **(self._guard.calls.stats() if self._guard else {})}

    async def _taken(self, request: Request) -> dict[str, Any]:
        """Return the answer to hints without a prompt, or raise a `KedgeError`. A run ends after its checks."""
        client, body = request.app.state.engine_client, await _body(request)
        if not is_plugged(client.vllm_config):
            found = getattr(client.vllm_config.kv_transfer_config, "kv_connector", None)
            raise ConfigError("kv_connector", found, f"must be {NAME} for hints")
        if (waiting := len(client.engine_core.utility_results)) >= ENTRIES:
            raise Overloaded("hints", waiting, f"at most {ENTRIES} calls wait for vLLM at once")
        hints, ignored = read_hints(body, request.headers)
        given, ended = plugin_hints(hints, ignored), list[ActionOutcome]()
        namespace = Namespace.parse(hints.salt or "default")
        if self._guard is not None and ends_run(hints) and not hints.session:
            del given["final"]
            self._guard.end_run(RunKey(namespace, hints.client, hints.run))
            ended.append(RUN_ENDED)
        taken = await tell(client.engine_core, PluginMessage(given, salt_of(namespace)))
        if taken is None:
            taken = list(refused(hints.turn, UNREPORTED, ActionResult.DEFERRED))
        return {"object": "hints", "hints": hints.to_dict(), "actions": outcomes(body, hints, [*ended, *taken])}


async def _report(client: Any) -> Mapping[str, Any] | None:
    """Return the report of the first engine that answers."""
    with suppress(EngineClosed):
        if client is not None and is_plugged(client.vllm_config):
            return next(iter(await ask(client.engine_core, "report")), None)
    return None


async def _run_with_hints(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run vLLM's application. A body gets its hints when it is read, since vLLM looks at the caller's key before."""
    failed: list[RequestError] = []
    unread = [given := Headers(scope=scope)]
    if "json" not in given.get("content-type", "json") or "content-encoding" in given:
        await app(scope, receive, send)
        return

    async def read() -> Message:
        try:
            return await (_with_hints(Request(scope, receive), unread.pop()) if unread else receive())
        except RequestError as error:
            failed.append(error)
            raise

    async def answer(message: Message) -> None:
        if not failed:
            await send(message)

    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    with suppress(RequestError):  # of `read`, whatever the application makes of it
        await app({**scope, "headers": headers}, read, answer)
    if failed:
        await _failed(failed[0])(scope, receive, send)


async def _with_hints(request: Request, headers: Mapping[str, str]) -> Message:
    """Return a whole body with its hints, or unchanged. Raises `RequestError` for one that cannot be served."""
    try:
        body = await request.body()
    except ClientDisconnect:
        return {"type": "http.disconnect"}
    return {"type": "http.request", "body": add_hints(body, headers) or body, "more_body": False}


def add_hints(body: bytes, headers: Mapping[str, str]) -> bytes | None:
    """Return a JSON body with the hints in it and in `headers`, whose names are in lower case.

    None where it has none, or is no JSON object that could take them: then vLLM gets it as it is. What a cache is to be
    kept apart by goes into vLLM's own field. Raises `RequestError` as `read_hints` does.
    """
    try:
        if not isinstance(fields := json.loads(body), dict):
            return None
        found, ignored = read_hints(fields, headers)
    except (ValueError, RecursionError):
        return None
    given = fields.get("kv_transfer_params") or {}
    own = (given.get("kedge") or {}) if isinstance(given, dict) else None
    hints = plugin_hints(found, ignored, "kedge" if own and fields.get("kedge") is None else "")  # counted twice, else
    if separates := found.salt and "extra_key" in fields:
        fields["cache_salt"] = found.salt
    if hints and isinstance(own, dict):
        fields["kv_transfer_params"] = {**given, "kedge": {**hints, **own}}
    elif not separates:
        return None
    return json.dumps(fields).encode()


def plugin_hints(hints: Hints, ignored: IgnoredHints, counted: str = "") -> dict[str, Any]:
    """Return hints with an effect in the plug-in, and how many were ignored, but for a dialect that is `counted`."""
    found = {name: value for name, value in hints.to_dict().items() if name in KNOWN}
    count = sum(count for (dialect, _), count in ignored.items() if dialect not in (*UNCOUNTED, counted))
    more = {"actions": [one.to_dict() for one in hints.actions], "ignored": count}
    return found | {name: value for name, value in more.items() if value}


def _answer(give: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[JSONResponse]]:
    """Return a route that answers with what `give` returns, as JSON."""

    async def answer(request: Request) -> JSONResponse:
        try:
            return JSONResponse(await give(request), headers={"cache-control": "no-store"})
        except KedgeError as error:
            return _failed(error)

    return answer


def _failed(error: KedgeError) -> JSONResponse:
    """Return the answer that an error is."""
    status = STATUSES.get(type(error), 500)
    data = {"message": str(error), "type": type(error).__name__, "param": error.key, "code": status}
    return JSONResponse({"error": data}, status)


async def _body(request: Request) -> dict[str, Any]:
    """Return the body of a call. Raises `RequestError` for one that is no JSON object."""
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise RequestError("body", "…", f"must be JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("body", type(body).__name__, "must be an object")
    return body
