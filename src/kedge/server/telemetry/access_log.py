"""Request ids, access log and trace context of HTTP calls."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge.server.telemetry.logs import request_id
from kedge.server.telemetry.tracing import Tracing

logger = logging.getLogger("kedge.access")
QUIET = frozenset({"/health", "/ready", "/metrics"})
"""Paths that machines poll; their calls are logged at level DEBUG."""
ABANDONED = 499
"""Status that is logged if an answer never began, as in nginx."""


class AccessLogMiddleware:
    """Outermost middleware: it logs each call and names it in the answer's `X-Request-Id`."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), ABANDONED
        name = f"req_{uuid.uuid4().hex}"
        token = request_id.set(name)

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            await send(message)

        try:
            with self._tracing.called(scope["path"], _Incoming(scope)):
                await self._app(scope, receive, send_named)
        finally:
            _log(scope, status, time.monotonic() - began)
            request_id.reset(token)


def _log(scope: Scope, status: int, seconds: float) -> None:
    path = scope.get("raw_path", b"").decode("latin-1").partition("?")[0] or scope["path"]
    level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
    tenant = getattr(scope.get("state", {}).get("tenant"), "id", "")
    method, ms = scope["method"], round(seconds * 1e3, 1)
    fields = {"method": method, "path": path, "status": status, "ms": ms, "tenant": tenant}
    logger.log(level, "%s %s %d in %.1f ms", method, path, status, ms, extra=fields)


class _Incoming(Mapping[str, str]):
    """Request headers as a mapping of text, with case-insensitive names, for trace propagation."""

    def __init__(self, scope: Scope) -> None:
        self._headers = Headers(scope=scope)

    def __getitem__(self, name: str) -> str:
        return self._headers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers.keys())

    def __len__(self) -> int:
        return len(self._headers)
