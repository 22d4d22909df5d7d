"""JSON answers and server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def dumps(data: object) -> bytes:
    """Return JSON in UTF-8. A lone surrogate, which UTF-8 cannot encode, becomes a question mark."""
    return _encoder.encode(data).encode("utf-8", "replace")


def event(data: object, *, name: str = "", number: int | None = None) -> bytes:
    """Return a server-sent event with JSON data, which contains no line breaks."""
    head = f"event: {name}\n" if name else ""
    head += f"id: {number}\n" if number is not None else ""
    return head.encode() + b"data: " + dumps(data) + b"\n\n"


class JSONAnswer(Response):
    """Answer with a JSON body, see `dumps`."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


class EventStream(StreamingResponse):
    """Answer of server-sent events. `on_end` is called exactly once, even if the stream never began."""

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
