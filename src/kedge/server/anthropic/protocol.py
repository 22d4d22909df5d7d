"""Bodies of `/v1/messages`, read as chats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from kedge.errors import RequestError
from kedge.hints.cache_marks import cache_marks
from kedge.server.http.bodies import Body, accepted, read_as
from kedge.server.openai.messages import CalledFunction, CalledTool, ChatMessage, Function, Tool
from kedge.server.openai.protocol import ChatBody, Count

Block = dict[str, Any]
Blocks = Annotated[str | list[Block], accepted("a string or a list of content blocks (objects)")]
DROPPED = ("thinking", "redacted_thinking")
"""Blocks of earlier answers that are not read again"""
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


class MessagesBody(Body):
    """Body of `/v1/messages`. Fields that it does not list are those of a chat, or hints."""

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
        choice = self.tool_choice or {}
        wanted = (self.output_config or {}).get("format")
        return read_as(
            ChatBody,
            {
                **others,
                "cache_control": marks or None,
                "messages": self._messages(),
                "max_completion_tokens": self.max_tokens,
                "stop": self.stop_sequences or None,
                "tools": [_tool(one) for one in self.tools or ()] or None,
                "tool_choice": _choice(choice),
                "response_format": {"type": "json_schema", "json_schema": wanted} if wanted else None,
                "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            },
        )

    def _messages(self) -> list[ChatMessage]:
        messages = []
        if self.system is not None:
            messages.append(ChatMessage(role="system", content=_text_of(self.system, "system")))
        for at, one in enumerate(self.messages):
            messages += _chat_messages(one, f"messages.{at}.content")
        return messages


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
    skipped = ("tool_result", "tool_use", *DROPPED)
    texts = [one for one in message.content if one.get("type") not in skipped]
    if not texts and not calls:
        return results
    text = _text_of(texts, place) if texts else None
    return [*results, ChatMessage(role=message.role, content=text, tool_calls=calls or None)]


def _call(block: Block, place: str) -> CalledTool:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
        raise RequestError(place, "tool_use", "must have a `name` and an object `input`")
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return CalledTool(id=str(block.get("id", "")), function=CalledFunction(name=block["name"], arguments=arguments))


def _result(block: Block, place: str) -> ChatMessage:
    content = _text_of(block.get("content") or "", f"{place}.content")
    return ChatMessage(role="tool", content=content, tool_call_id=str(block.get("tool_use_id", "")))


def _text_of(content: str | Sequence[Any], place: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text(block, place) for block in content)


def _text(block: Any, place: str) -> str:
    text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
    if not isinstance(text, str):
        kind = block.get("type") if isinstance(block, dict) else block
        raise RequestError(place, kind, "must be text: this server reads text only")
    return text


def _tool(tool: OfferedTool) -> Tool:
    if tool.type not in (None, "custom"):
        raise RequestError("tools.type", tool.type, "must be custom: this server runs no tools itself")
    return Tool(
        type="function", function=Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
    )
