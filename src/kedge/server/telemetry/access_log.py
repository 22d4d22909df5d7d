"""Every call has an id, a line in the log, and a place in its caller's trace."""

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
"""Asked for every few seconds, by machines: logged as details."""
ABANDONED = 499
"""The status that is logged where an answer never began; nginx's word for it."""


class Observed:
    """The outermost layer of the application. An answer's `X-Request-Id` names its call."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), ABANDONED
        name = f"req_{uuid.uuid4().hex}"
        token = request_id.set(name)

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            await send(message)

        try:
            with self._tracing.called(scope["path"], _Incoming(scope)):
                await self._app(scope, receive, tell)
        finally:
            _log(scope, status, time.monotonic() - began)
            request_id.reset(token)


def _log(scope: Scope, status: int, seconds: float) -> None:
    path = scope.get("raw_path", b"").decode("latin-1").partition("?")[0] or scope["path"]
    level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
    tenant = getattr(scope.get("state", {}).get("tenant"), "id", "")
    told = {"method": scope["method"], "path": path, "status": status, "ms": round(seconds * 1e3, 1), "tenant": tenant}
    logger.log(level, "%s %s %d in %.1f ms", scope["method"], path, status, seconds * 1e3, extra=told)


class _Incoming(Mapping[str, str]):
    """Headers as a carrier of trace contexts reads them: as text, by names in any case."""

    def __init__(self, scope: Scope) -> None:
        self._headers = Headers(scope=scope)

    def __getitem__(self, name: str) -> str:
        return self._headers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers.keys())

    def __len__(self) -> int:
        return len(self._headers)
