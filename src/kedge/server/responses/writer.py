"""Answers of `/v1/responses`, whole and as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from kedge.server.openai.single import AnswerEvent, AnswerWriter
from kedge.server.openai.tool_calls import ParsedText, ToolCall
from kedge.server.receipts import usage
from kedge.server.responses.protocol import ResponsesBody
from kedge.types import Completion, FinishReason, GenerateRequest

Item = dict[str, Any]


class ResponsesWriter(AnswerWriter):
    """Writer of one response. Its items are a message, unless that is empty, and the calls of tools."""

    def __init__(self, body: ResponsesBody, model: str) -> None:
        self._id, self._created = _new_id("resp"), int(time.time())
        self._body, self._model = body, model
        self._items: list[Item] = []
        self._message: Item | None = None
        self._events = 0

    def whole(self, parsed: ParsedText, completion: Completion) -> dict[str, Any]:
        for _ in (*self.add(parsed), *self._close(completion)):
            pass  # the events of a stream that nobody reads; they leave the items behind
        return self._response(_status(completion), completion)

    def begin(self, request: GenerateRequest) -> Iterator[AnswerEvent]:  # noqa: ARG002 (all events have the request)
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def add(self, parsed: ParsedText) -> Iterator[AnswerEvent]:
        if parsed.content:
            yield from self._open()
            assert self._message is not None
            self._message["content"][0]["text"] += parsed.content
            yield self._event("response.output_text.delta", **self._place(), delta=parsed.content, logprobs=[])
        for call in parsed.calls:
            yield from self._call(call)

    def end(self, completion: Completion, kedge: Mapping[str, Any]) -> Iterator[AnswerEvent]:
        yield from self._close(completion)
        status = _status(completion)
        yield self._event(f"response.{status}", response={**self._response(status, completion), "kedge": kedge})

    def failed(self, error: Mapping[str, Any]) -> AnswerEvent:
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    # items ----------------------------------------------------------------------------------------------------

    def _open(self) -> Iterator[AnswerEvent]:
        """Begin a message, if none has begun."""
        if self._message is None:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": "message", "id": _new_id("msg"), "role": "assistant", "status": "in_progress"}
            self._message = {**item, "content": [part]}
            self._items.append(self._message)
            yield self._item_event("added", {**item, "content": []})
            yield self._event("response.content_part.added", **self._place(), part=dict(part))

    def _close(self, completion: Completion) -> Iterator[AnswerEvent]:
        """End the message; an answer without calls has one, even if it is empty."""
        if not self._items:
            yield from self._open()
        if self._message is not None:
            message, (part,) = self._message, self._message["content"]
            message["status"] = _status(completion)
            yield self._event("response.output_text.done", **self._place(), text=part["text"], logprobs=[])
            yield self._event("response.content_part.done", **self._place(), part=part)
            yield self._item_event("done", message)

    def _call(self, call: ToolCall) -> Iterator[AnswerEvent]:
        item = {"type": "function_call", "id": _new_id("fc"), "call_id": call.id, "name": call.name}
        self._items.append({**item, "arguments": call.arguments, "status": "completed"})
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        yield self._item_event("added", {**item, "arguments": "", "status": "in_progress"})
        yield self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **place, arguments=call.arguments, name=call.name)
        yield self._item_event("done", self._items[-1])

    def _place(self) -> dict[str, Any]:
        assert self._message is not None
        at = next(at for at, item in enumerate(self._items) if item is self._message)
        return {"item_id": self._message["id"], "output_index": at, "content_index": 0}

    def _item_event(self, what: str, item: Item) -> AnswerEvent:
        at = next(at for at, one in enumerate(self._items) if one["id"] == item["id"])
        return self._event(f"response.output_item.{what}", output_index=at, item=item)

    def _event(self, kind: str, /, **data: Any) -> AnswerEvent:
        self._events += 1
        return AnswerEvent(kind, {"type": kind, "sequence_number": self._events - 1, **data})

    def _response(self, status: str, completion: Completion | None = None) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": (body.model_extra or {}).get("metadata") or {},
            "model": self._model,
            "output": list(self._items),
            "parallel_tool_calls": (body.model_extra or {}).get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": (body.model_extra or {}).get("temperature"),
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": (body.model_extra or {}).get("top_p"),
            "usage": _usage(completion) if completion else None,
        }


def _status(completion: Completion) -> str:
    return "incomplete" if completion.finish_reason is FinishReason.LENGTH else "completed"


def _usage(completion: Completion) -> dict[str, Any]:
    counts = usage([completion], 1)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
