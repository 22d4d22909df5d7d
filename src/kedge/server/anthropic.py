"""Anthropic's Messages API: bodies are read as chats, answers are written as content blocks."""

import uuid
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import Field

from kedge.errors import PromptTooLong
from kedge.hints.values import cache_marks
from kedge.server.http import ERRORS, PLACE, STREAMED, Body, JSONAnswer, TypedRoute, accepted, event, read_as, sent_as
from kedge.server.openai import prompts
from kedge.server.openai.generation import answer
from kedge.server.openai.protocol import DROPPED, CallBody, ChatBody, Count
from kedge.server.openai.tool_calls import read_json
from kedge.server.openai.writers import AnswerWriter, ParsedDelta
from kedge.server.service import Service, TheCaller
from kedge.types import Completion, FinishReason

Block = dict[str, Any]
Blocks = Annotated[str | list[Block], accepted("a string or a list of content blocks (objects)")]
NO_EFFECT = ("thinking", "service_tier", "container", "context_management", "mcp_servers", "betas")
"""Fields that neither a chat has nor a hint is"""


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
    strict: bool | None = None


class MessagesBody(CallBody):
    """Body of `/v1/messages`. Fields that it does not list are those of a chat, or hints."""

    sent = {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
    }
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
        others = {name: value for name, value in (self.model_extra or {}).items() if name not in NO_EFFECT}
        tools, contents = self.tools or (), [{"content": one.content} for one in self.messages]
        marked = {"system": self.system, "tools": [one.model_extra for one in tools], "messages": contents}
        messages = [] if self.system is None else [{"role": "system", "content": self.system, PLACE: "system"}]
        for at, one in enumerate(self.messages):
            messages += [{**message, PLACE: f"messages.{at}"} for message in _chat_messages(one)]
        choice, wanted = self.tool_choice or {}, (self.output_config or {}).get("format")
        own = [one for one in tools if one.type in (None, "custom")]
        shown = {"name", "description", "strict"}
        functions = [{**one.model_dump(include=shown), "parameters": one.input_schema} for one in own]
        fields = {
            **others,
            "model": self.model,
            "cache_control": cache_marks({**others, **marked}) or None,
            "messages": messages,
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "tools": [{"type": "function", "function": one} for one in functions] or None,
            "tool_choice": _choice(choice) if own or choice.get("type") == "tool" else None,
            "response_format": {"type": "json_schema", "json_schema": wanted} if wanted else None,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        }
        chat = read_as(ChatBody, fields)
        if messages and (last := chat.messages[-1]).role == "assistant" and not last.tool_calls and last.text.strip():
            chat.continue_final_message = True
        chat.left_out.extend(f"tools.{one.type}" for one in tools if one.type not in (None, "custom"))
        return chat


def _choice(choice: Mapping[str, Any]) -> Any:
    """Return a choice of a tool as chats have it."""
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return "required" if choice.get("type") == "any" else choice.get("type")


def _chat_messages(message: TurnMessage) -> list[dict[str, Any]]:
    """Return a message as a chat has it: results of tools are messages of their own, before the rest."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, calls, rest = list[Block](), list[Block](), list[Block]()
    for block in message.content:
        match block.get("type"):
            case "tool_result":
                given = block.get("content") or ""
                content = [_part(one) for one in given] if isinstance(given, list) else given
                results.append({"role": "tool", "content": content, "tool_call_id": str(block.get("tool_use_id", ""))})
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": str(block.get("id", "")), "function": function})
            case kind if str(kind) not in DROPPED:
                rest.append(_part(block))
    if not rest and not calls:
        return results
    return [*results, {"role": message.role, "content": rest, "tool_calls": calls or None}]


def _part(block: Any) -> Any:
    """Return a block as a part of a message; a document may be a text, or texts, as a search result is."""
    if not isinstance(block, dict) or "text" in block:
        return block
    source = block["source"] if isinstance(block.get("source"), dict) else block
    given = source.get("data") if source.get("type") == "text" else source.get("content")
    parts = given if isinstance(given, list) else [{"text": given}]
    texts: list[Any] = [one.get("text") if isinstance(one, dict) else None for one in parts]
    return {**block, "text": "\n".join(texts)} if all(isinstance(one, str) for one in texts) else block


class MessagesWriter(AnswerWriter):
    """Writer of one message. Its content is a text, unless that is empty, and the uses of tools."""

    is_in_text = False

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.content: list[Block] = []

    def ended(self, completion: Completion) -> dict[str, Any]:
        content = self.content or [{"type": "text", "text": ""}]
        return {**self._message(content, usage_of(completion)), **self._stop_fields(completion)}

    def begin(self) -> bytes:
        counts = {"input_tokens": self.requests[0].prompt_tokens, "output_tokens": 0}
        return _event("message_start", message=self._message([], counts))

    def add(self, at: int, pair: ParsedDelta, kedge: Mapping[str, Any] | None) -> Iterator[bytes]:  # noqa: ARG002 (one choice)
        parsed, delta = pair
        if parsed.content:
            if not self.is_in_text:
                yield self._start({"type": "text", "text": ""})
                self.is_in_text = True
            self.content[-1]["text"] += parsed.content
            yield self._block("delta", delta={"type": "text_delta", "text": parsed.content})
        for call in parsed.calls:
            yield self._stop_text()
            yield self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            self.content[-1]["input"] = read_json(call.arguments)
            yield self._block("delta", delta={"type": "input_json_delta", "partial_json": call.arguments})
            yield self._block("stop")
        if delta.completion:
            yield self._stop_text()
            # what was in the cache is not known before, and clients add up the counts of both events
            counts = {"input_tokens": self.requests[0].prompt_tokens, "output_tokens": len(delta.completion.tokens)}
            yield _event("message_delta", delta=self._stop_fields(delta.completion), usage=counts, kedge=kedge)
            yield _event("message_stop")

    def failed(self, body: Mapping[str, Any]) -> Iterator[bytes]:
        yield event(body, name="error")

    def _stop_text(self) -> bytes:
        was_in_text, self.is_in_text = self.is_in_text, False
        return self._block("stop") if was_in_text else b""

    def _start(self, block: Block) -> bytes:
        self.content.append(block)
        return self._block("start", content_block=block)

    def _block(self, what: str, **data: Any) -> bytes:
        return _event(f"content_block_{what}", index=len(self.content) - 1, **data)

    def _message(self, content: list[Block], counts: dict[str, int]) -> dict[str, Any]:
        head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None, "usage": counts}

    def _stop_fields(self, completion: Completion) -> dict[str, str | None]:
        """Return why an answer ended; of a stop string, which one it was."""
        request, stopped = self.requests[0], None
        if completion.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if request.sampling.stop and completion.finish_reason is FinishReason.STOP:
            said = self.tokenizer.decode(completion.tokens)
            stopped = next((stop for stop in request.sampling.stop if said.startswith(completion.text + stop)), None)
        reason = "tool_use" if any(block["type"] == "tool_use" for block in self.content) else "end_turn"
        return {"stop_reason": reason if stopped is None else "stop_sequence", "stop_sequence": stopped}


def usage_of(completion: Completion) -> dict[str, int]:
    """Return a call's tokens; those from the cache are not among the input tokens."""
    cached = completion.receipt.exact
    return {
        "input_tokens": completion.receipt.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(completion.tokens),
    }


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name=name)


router = APIRouter(tags=["Anthropic"], responses=ERRORS, route_class=TypedRoute)


@router.post("/v1/messages", responses=STREAMED)
async def messages(body: MessagesBody, caller: TheCaller) -> Response:
    """Answer a conversation."""
    return await answer(body, MessagesWriter(caller.service), caller)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: MessagesBody, caller: TheCaller) -> Response:
    """Return how many tokens a conversation's prompt has."""
    service = caller.service
    service.check_model(body.model)

    def count() -> int:
        try:
            return sum(len(one.tokens) for one in prompts.of_chat(service.engine.tokenizer, body.chat()))
        except PromptTooLong as error:
            return error.tokens

    service.admit(caller.tenant, 1)
    try:
        with sent_as(body.sent):
            return JSONAnswer({"input_tokens": await service.threads.work(count)})
    finally:
        caller.tenant.give_back()
