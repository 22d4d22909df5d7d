"""Answers of `/v1/messages`, whole and as events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from kedge.server.openai.single import AnswerEvent, AnswerWriter
from kedge.server.openai.tool_calls import ParsedText, ToolCall, read_json
from kedge.types import Completion, FinishReason, GenerateRequest


class MessagesWriter(AnswerWriter):
    """Writer of one message. Its content is a text, unless that is empty, and the uses of tools."""

    def __init__(self, model: str) -> None:
        self._id, self._model = f"msg_{uuid.uuid4().hex}", model
        self._blocks = self._calls = 0
        self._in_text = False

    def whole(self, parsed: ParsedText, completion: Completion) -> dict[str, Any]:
        self._calls += len(parsed.calls)
        text = [{"type": "text", "text": parsed.content}] if parsed.content or not parsed.calls else []
        content = [*text, *({**_tool_use(call), "input": read_json(call.arguments)} for call in parsed.calls)]
        return {**self._message(content, usage_of(completion)), "stop_reason": self._stop_reason(completion)}

    def begin(self, request: GenerateRequest) -> Iterator[AnswerEvent]:
        counts = {"input_tokens": request.prompt_tokens, "output_tokens": 0}
        yield _event("message_start", message=self._message([], counts))

    def add(self, parsed: ParsedText) -> Iterator[AnswerEvent]:
        if parsed.content:
            if not self._in_text:
                yield self._start({"type": "text", "text": ""})
                self._in_text = True
            yield self._delta({"type": "text_delta", "text": parsed.content})
        for call in parsed.calls:
            yield from self._stop_text()
            self._calls += 1
            yield self._start({**_tool_use(call), "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            yield self._stop()

    def end(self, completion: Completion, kedge: Mapping[str, Any]) -> Iterator[AnswerEvent]:
        yield from self._stop_text()
        delta = {"stop_reason": self._stop_reason(completion), "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage=usage_of(completion), kedge=kedge)
        yield _event("message_stop")

    def failed(self, error: Mapping[str, Any]) -> AnswerEvent:
        return _event("error", error={"type": "api_error", "message": error["message"]})

    def _stop_text(self) -> Iterator[AnswerEvent]:
        if self._in_text:
            self._in_text = False
            yield self._stop()

    def _start(self, block: dict[str, Any]) -> AnswerEvent:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> AnswerEvent:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _stop(self) -> AnswerEvent:
        return _event("content_block_stop", index=self._blocks - 1)

    def _message(self, content: list[dict[str, Any]], counts: dict[str, int]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None, "usage": counts}

    def _stop_reason(self, completion: Completion) -> str:
        if completion.finish_reason is FinishReason.LENGTH:
            return "max_tokens"
        return "tool_use" if self._calls else "end_turn"


def usage_of(completion: Completion) -> dict[str, int]:
    """Return a call's tokens; those from the cache are not among the input tokens."""
    cached = completion.receipt.exact
    return {
        "input_tokens": completion.receipt.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(completion.tokens),
    }


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _event(name: str, **data: Any) -> AnswerEvent:
    return AnswerEvent(name, {"type": name, **data})
