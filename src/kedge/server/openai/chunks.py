"""Stream chunks as bytes. Nearly all differ only in a short text, so the JSON around it is encoded once."""

from __future__ import annotations

from typing import Any

from kedge.server.http.sse import dumps, event
from kedge.server.openai.responses import Choice, Format

MARK = "\ue000kedge\ue000"
"""Placeholder for the text while the JSON around it is encoded; private-use characters, so that it is unique."""


class ChunkEncoder:
    """Encoder of one stream's chunks, which share additional fields."""

    def __init__(self, form: Format, **fields: Any) -> None:
        self._form, self._fields = form, fields
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, choice: Choice) -> bytes:
        """Return the server-sent event of a chunk with this choice."""
        text = self._form.only_text(choice)
        if text is None:
            return event(self._form.chunk(choice, **self._fields))
        around = self._around.get(choice["index"])
        if around is None:
            around = self._around[choice["index"]] = self._learn(choice)
        return around[0] + dumps(text) + around[1]

    def _learn(self, choice: Choice) -> tuple[bytes, bytes]:
        whole = event(self._form.chunk(self._form.with_text(choice, MARK), **self._fields))
        before, after = whole.split(dumps(MARK))
        return before, after
