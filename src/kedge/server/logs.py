"""Log lines as text or JSON, each with the id of its HTTP call, and a line and trace context for every call."""

from __future__ import annotations

import json
import logging
import time
import uuid
from contextlib import nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from kedge.server.tracing import OpenTelemetry

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the call that is being answered; empty outside of calls and in the engine's threads."""
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
"""Attributes of every record; all others were passed as `extra`."""
TEXT = "%(asctime)s %(levelname)s %(name)s %(request_id)s%(message)s"


class TextLine(logging.Formatter):
    """Formatter of a line of text."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the standard library's name)
        name = request_id.get()
        return TEXT % {**vars(record), "request_id": f"{name} " if name else ""}


class JSONLine(logging.Formatter):
    """Formatter of one JSON object per line: time (UTC), level, logger, message, the call's id if there is one, the
    attributes passed as `extra`, and an exception as text."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if name := request_id.get():
            line["request_id"] = name
        line |= {key: value for key, value in vars(record).items() if key not in _PLAIN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(log_format: Literal["text", "json"], level: str = "INFO") -> None:
    """Send all log records of this process to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(TextLine(TEXT) if log_format == "text" else JSONLine())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


logger = logging.getLogger("kedge.access")
QUIET = frozenset({"/health", "/ready", "/metrics", "/v1/dashboard", "/v1/dashboard/engine"})
"""Paths that are polled; their calls are logged at level DEBUG."""
CLIENT_GONE = 499
"""Status of a call whose client has disconnected before an answer, as in nginx."""


class AccessLogMiddleware:
    """Outermost middleware: it logs each call and names it in the answer's `X-Request-Id` and `Request-Id`."""

    def __init__(self, app: ASGIApp, tracing: OpenTelemetry | None) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), CLIENT_GONE
        name = f"req_{uuid.uuid4().hex}"
        token = request_id.set(name)

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [(header, name.encode()) for header in (b"x-request-id", b"request-id")]  # OpenAI's, Anthropic's
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        try:
            with self._tracing.called(Headers(scope=scope)) if self._tracing else nullcontext():
                await self._app(scope, receive, send_named)
        finally:
            method, ms = scope["method"], round((time.monotonic() - began) * 1e3, 1)
            path = scope.get("raw_path", b"").decode("latin-1").partition("?")[0] or scope["path"]
            tenant = getattr(scope.get("state", {}).get("tenant"), "id", "")
            fields = {"method": method, "path": path, "status": status, "ms": ms, "tenant": tenant}
            level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
            logger.log(level, "%s %s %d in %.1f ms", method, path, status, ms, extra=fields)
            request_id.reset(token)
