"""Middleware that limits the size and the duration of request bodies."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge.server.failures import CallFailure
from kedge.server.http.errors import refusal

MAX_DRAINED = 16
"""A body over the limit is read up to this many times the limit before the refusal, so that its sender reads it."""
BODY_SECONDS = 60.0


class BodySizeLimit:
    """Middleware that refuses bodies that are too large (413) or too slow (408)."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app, self._max_bytes = app, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
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
    await refusal(status, reason, code)(scope, receive, send)


def _replayed(body: bytes, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message
