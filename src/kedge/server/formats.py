"""The objects that both kinds of completion are answered with, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kedge.types import Completion


@dataclass(frozen=True)
class Format(ABC):
    """One answer's envelope and its choices."""

    model: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.prefix}-{uuid.uuid4().hex}")

    def whole(self, completions: list[Completion], **fields: Any) -> dict[str, Any]:
        """A whole answer."""
        choices = [self.choice(at, completion) for at, completion in enumerate(completions)]
        return self._envelope(self.kind, choices, fields)

    def chunk(self, *choices: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """A chunk of a stream."""
        return self._envelope(self.chunk_kind, list(choices), fields)

    def _envelope(self, kind: str, choices: list[dict[str, Any]], fields: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **fields}

    @abstractmethod
    def choice(self, at: int, completion: Completion) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def opening(self, at: int) -> dict[str, Any] | None:
        """What comes before a choice's first text, if anything."""

    @abstractmethod
    def delta(self, at: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        """More of a choice; with its last chunk comes the reason why it ended."""


class ChatFormat(Format):
    """Of `/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, at: int, completion: Completion) -> dict[str, Any]:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return {"index": at, "message": message, "logprobs": None, "finish_reason": completion.finish_reason}

    def opening(self, at: int) -> dict[str, Any] | None:
        return self._delta(at, {"role": "assistant", "content": ""}, None)

    def delta(self, at: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        return self._delta(at, {"content": text} if text else {}, finish_reason)

    def _delta(self, at: int, delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
        return {"index": at, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


class CompletionFormat(Format):
    """Of `/v1/completions`."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def choice(self, at: int, completion: Completion) -> dict[str, Any]:
        return self.delta(at, completion.text, completion.finish_reason)

    def opening(self, at: int) -> dict[str, Any] | None:  # noqa: ARG002 (a text has none)
        return None

    def delta(self, at: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": at, "text": text, "logprobs": None, "finish_reason": finish_reason}
