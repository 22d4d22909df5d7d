"""Middleware: the check of `Host` headers, and limits on the size and the duration of bodies."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge.checks import parse_host
from kedge.errors import Unauthenticated
from kedge.server.http import CallFailure, answer_error, refusal

ANY = "*"
PROBES = frozenset({"/health", "/ready"})
"""Paths that accept every `Host`: they reveal nothing, and probes use addresses that are not known beforehand."""
_HEADER = re.compile(r"(\[[^\[\]]+\]|[^\[\]:]+)(?::[0-9]*)?")


class TrustedHosts:
    """Trusted host names and addresses, with any port: the loopback interface's, the allowed ones, and the one that the
    server is bound to. If it is bound to every address (`0.0.0.0`, `::`), every address is trusted."""

    def __init__(self, bound: str, allowed: Iterable[str]) -> None:
        own = parse_host(bound or "0.0.0.0")
        self._known = {own, "localhost", *map(parse_host, allowed)}
        self._any_address = not isinstance(own, str) and own.is_unspecified

    def trusts(self, values: Sequence[str]) -> bool:
        """Return whether a call's `Host` headers are exactly one, and trusted."""
        if ANY in self._known:
            return True
        found = _HEADER.fullmatch(values[0]) if len(values) == 1 else None
        if found is None:
            return False
        host = parse_host(found[1])
        if isinstance(host, str):
            return host in self._known
        return host.is_loopback or self._any_address or host in self._known


class HostCheck:
    """Middleware that refuses calls whose `Host` is not trusted (421), against DNS rebinding.

    A web page can point its own host name at 127.0.0.1; its scripts would then have the rights of a page of this
    server. Such a call has the page's name in `Host`, so names must be known. An address proves that no name was
    redirected.

    Starlette's `TrustedHostMiddleware` supports neither networks (127.0.0.0/8) nor exempt paths, splits IPv6 addresses
    at their colons in older versions, and answers in plain text.
    """

    def __init__(self, app: ASGIApp, hosts: TrustedHosts) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).getlist("host")
        if self._hosts.trusts(given):
            await self._app(scope, receive, send)
            return
        why = f"Host={', '.join(given)!r}: is not a name of this server (kedge serve --allowed-host NAME adds one)"
        await refusal(scope["path"], 421, why, "untrusted_host", param="Host")(scope, receive, send)


MAX_DRAINED = 16
"""A body over the limit is read up to this many times the limit before the refusal, so that its sender reads it."""
BODY_SECONDS = 60.0


class BodySizeLimit:
    """Middleware that reads the bodies of callers who are known, and refuses those that are too large (413), too slow
    (408) or of two lengths (400).
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app, self._max_bytes = app, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            is_head = scope.get("method") == "HEAD"  # the server leaves the body out
            await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            scope["app"].state.service.keys.of_headers(headers)
        except Unauthenticated as error:
            await (await answer_error(Request(scope), error))(scope, receive, send)
            return
        if "transfer-encoding" in headers and "content-length" in headers:
            await _refuse(400, "has two lengths", "invalid_request", scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(receive)
        except TimeoutError:
            await _refuse(408, "the body did not come in time", "request_timeout", scope, receive, send)
            return
        if body is None:
            return
        if len(body) > self._max_bytes:
            reason = f"a body has at most {self._max_bytes} bytes"
            await _refuse(413, reason, "request_too_large", scope, receive, send)
            return
        await self._app(scope, _replayed(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the body, or a little more than is allowed of it; None if the client has disconnected."""
        body, size = bytearray(), 0
        while (message := await receive())["type"] == "http.request":
            chunk = message.get("body", b"")
            size += len(chunk)
            if len(body) <= self._max_bytes:
                body += chunk
            if not message.get("more_body") or size > MAX_DRAINED * self._max_bytes:
                return bytes(body)
        return None


async def _refuse(status: int, reason: str, code: str, scope: Scope, receive: Receive, send: Send) -> None:
    route = f"{scope['method']} {scope['path']}"
    scope["app"].state.service.report_failure(None, CallFailure(status, code, reason, route))
    await refusal(scope["path"], status, reason, code)(scope, receive, send)


def _replayed(body: bytes, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message
