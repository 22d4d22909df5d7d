"""A stream's chunks as bytes. Nearly all say a little text and nothing else: what stands around it is encoded once."""

from __future__ import annotations

from typing import Any

from kedge.server.openai.responses import Choice, Format
from kedge.server.sse import dumps, event

MARK = "\ue000kedge\ue000"
"""Stands for the text while what is around it is encoded; private characters, so that nothing else contains it."""


class ChunkEncoder:
    """Encodes the chunks of one stream, each with the same additional fields."""

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
