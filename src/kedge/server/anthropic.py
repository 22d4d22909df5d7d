"""Anthropic's Messages API: bodies are read as chats, answers are written as content blocks."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from kedge.errors import PromptTooLong
from kedge.hints.values import cache_marks
from kedge.server.http import (
    BODY_ERRORS,
    ERRORS,
    EVENTS,
    JSON,
    Body,
    JSONAnswer,
    StreamEvent,
    TypedRoute,
    accepted,
    answers,
    read_as,
    sent_as,
)
from kedge.server.openai import prompts
from kedge.server.openai.protocol import DROPPED, CalledTool, ChatBody, ChatMessage, Count, Function, Tool
from kedge.server.openai.single import AnswerWriter, answer
from kedge.server.openai.tool_calls import ParsedText, ToolCall, read_json
from kedge.server.service import TheService, TheTenant
from kedge.server.workflows.server_runs import TheWorkflows
from kedge.types import Completion, FinishReason, GenerateRequest

Block = dict[str, Any]
Blocks = Annotated[str | list[Block], accepted("a string or a list of content blocks (objects)")]
NO_EFFECT = ("thinking", "service_tier", "container", "context_management", "mcp_servers", "betas")
"""Fields that neither a chat has nor a hint is"""

SENT = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}
"""Field of a chat -> the field that it is read from"""


class TurnMessage(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class OfferedTool(Body):
    """A tool that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesBody(Body):
    """Body of `/v1/messages`. Fields that it does not list are those of a chat, or hints."""

    model: str | None = None
    messages: list[TurnMessage]
    max_tokens: Count | None = None
    system: Blocks | None = None
    stop_sequences: list[str] | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    """With a `format` that has a JSON `schema`"""

    def chat(self) -> ChatBody:
        """Return the same call as a chat. Raises `RequestError` naming what this server cannot read."""
        others = {name: value for name, value in (self.model_extra or {}).items() if name not in NO_EFFECT}
        marks = cache_marks(
            {
                **others,
                "system": self.system,
                "tools": [one.model_extra for one in self.tools or ()],
                "messages": [{"content": one.content} for one in self.messages],
            }
        )
        messages = []
        if self.system is not None:
            messages.append(_message("system", self.system, "system"))
        for at, one in enumerate(self.messages):
            messages += _chat_messages(one, f"messages.{at}.content")
        choice = self.tool_choice or {}
        wanted = (self.output_config or {}).get("format")
        own = [one for one in self.tools or () if one.type in (None, "custom")]
        chat = read_as(
            ChatBody,
            {
                **others,
                "model": self.model,
                "cache_control": marks or None,
                "messages": messages,
                "max_completion_tokens": self.max_tokens,
                "stop": self.stop_sequences or None,
                "tools": [_tool(one) for one in own] or None,
                "tool_choice": _choice(choice) if own or choice.get("type") == "tool" else None,
                "response_format": {"type": "json_schema", "json_schema": wanted} if wanted else None,
                "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
                "continue_final_message": messages[-1:] != [] and _is_begun(messages[-1]) or None,
            },
        )
        return chat.skip(f"tools.{one.type}" for one in self.tools or () if one not in own)


def _is_begun(message: ChatMessage) -> bool:
    """Return whether a message is the beginning of the answer."""
    return message.role == "assistant" and not message.tool_calls and bool(message.text.strip())


def _choice(choice: Mapping[str, Any]) -> Any:
    """Return a choice of a tool as chats have it."""
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return "required" if choice.get("type") == "any" else choice.get("type")


def _chat_messages(message: TurnMessage, place: str) -> list[ChatMessage]:
    """Return a message as a chat has it: results of tools are messages of their own, before the rest."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    results = [_result(one, place) for one in message.content if one.get("type") == "tool_result"]
    calls = [_call(one, place) for one in message.content if one.get("type") == "tool_use"]
    rest = [one for one in message.content if one.get("type") not in ("tool_result", "tool_use", *DROPPED)]
    if not rest and not calls:
        return results
    return [*results, _message(message.role, [_part(one) for one in rest], place, tool_calls=calls or None)]


def _message(role: str, content: str | Sequence[Block], place: str, **more: Any) -> ChatMessage:
    return read_as(ChatMessage, {"role": role, "content": content, **more}, place)


def _part(block: Block) -> Block:
    """Return a block as a part of a message; a document may be a text."""
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "text" and "text" not in block:
        return {**block, "text": source.get("data")}
    return block


def _call(block: Block, place: str) -> CalledTool:
    fields = {"name": block.get("name"), "arguments": block.get("input")}
    return read_as(CalledTool, {"id": str(block.get("id", "")), "function": fields}, f"{place}.tool_use")


def _result(block: Block, place: str) -> ChatMessage:
    content = block.get("content") or ""
    if isinstance(content, list):
        content = [_part(one) if isinstance(one, dict) else one for one in content]
    return _message("tool", content, f"{place}.tool_result", tool_call_id=str(block.get("tool_use_id", "")))


def _tool(tool: OfferedTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return Tool(type="function", function=function)


class MessagesWriter(AnswerWriter):
    """Writer of one message. Its content is a text, unless that is empty, and the uses of tools."""

    def __init__(self, model: str) -> None:
        self._id, self._model = f"msg_{uuid.uuid4().hex}", model
        self._blocks = self._calls = 0
        self._in_text = False
        self._counts: dict[str, int] = {}

    def whole(self, parsed: ParsedText, completion: Completion) -> dict[str, Any]:
        self._calls += len(parsed.calls)
        text = [{"type": "text", "text": parsed.content}] if parsed.content or not parsed.calls else []
        content = [*text, *({**_tool_use(call), "input": read_json(call.arguments)} for call in parsed.calls)]
        return {**self._message(content, usage_of(completion)), **self._stop_fields(completion)}

    def begin(self, request: GenerateRequest) -> Iterator[StreamEvent]:
        self._counts = {"input_tokens": request.prompt_tokens, "output_tokens": 0}
        yield _event("message_start", message=self._message([], self._counts))

    def add(self, parsed: ParsedText) -> Iterator[StreamEvent]:
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

    def end(self, completion: Completion, kedge: Mapping[str, Any]) -> Iterator[StreamEvent]:
        yield from self._stop_text()
        # what was in the cache is not known before, and clients add up the counts of both events
        counts = {**self._counts, "output_tokens": len(completion.tokens)}
        yield _event("message_delta", delta=self._stop_fields(completion), usage=counts, kedge=kedge)
        yield _event("message_stop")

    def failed(self, error: Mapping[str, Any]) -> Iterator[StreamEvent]:
        yield _event("error", error={"type": "api_error", "message": error["message"]})

    def _stop_text(self) -> Iterator[StreamEvent]:
        if self._in_text:
            self._in_text = False
            yield self._stop()

    def _start(self, block: dict[str, Any]) -> StreamEvent:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> StreamEvent:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _stop(self) -> StreamEvent:
        return _event("content_block_stop", index=self._blocks - 1)

    def _message(self, content: list[dict[str, Any]], counts: dict[str, int]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None, "usage": counts}

    def _stop_fields(self, completion: Completion) -> dict[str, str | None]:
        if completion.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif self.stopped_by is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": self.stopped_by}


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


def _event(name: str, **data: Any) -> StreamEvent:
    return StreamEvent(name, {"type": name, **data})


router = APIRouter(tags=["Anthropic"], responses=ERRORS, route_class=TypedRoute)
ANSWERS = answers(200, kinds=(*JSON, *EVENTS)) | BODY_ERRORS


@router.post("/v1/messages", response_model=None, responses=ANSWERS)
async def messages(
    body: MessagesBody, request: Request, service: TheService, workflows: TheWorkflows, tenant: TheTenant
) -> Response:
    """Answer a conversation."""
    with sent_as(SENT):
        chat = await service.threads.work(body.chat)
        return await answer(chat, MessagesWriter(service.model_name), request, service, workflows, tenant)


@router.post("/v1/messages/count_tokens", response_model=None, responses=answers(200) | BODY_ERRORS)
async def count_tokens(body: MessagesBody, service: TheService, tenant: TheTenant) -> Response:  # noqa: ARG001
    """Return how many tokens a conversation's prompt has."""
    service.check_model(body.model)

    def count() -> int:
        chat = body.chat()
        try:
            return sum(len(one.tokens) for one in prompts.of_chat(service.engine.tokenizer, chat))
        except PromptTooLong as error:
            return error.tokens

    with sent_as(SENT):
        return JSONAnswer({"input_tokens": await service.threads.work(count)})
