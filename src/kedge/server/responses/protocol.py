"""Bodies of `/v1/responses`, read as chats."""

from __future__ import annotations

from typing import Annotated, Any

from kedge.errors import RequestError
from kedge.server.http.bodies import Body, accepted, read_as
from kedge.server.openai.messages import CalledFunction, CalledTool, ChatMessage, Function, Tool
from kedge.server.openai.protocol import ChatBody, Count

TEXTS = frozenset({"input_text", "output_text", "text"})
"""Types of parts that are text"""
NO_EFFECT = (
    "store", "include", "reasoning", "truncation", "service_tier", "background", "stream_options", "max_tool_calls",
    "text", "instructions", "input", "max_output_tokens", "tools", "tool_choice", "previous_response_id",
)  # fmt: skip
"""Fields that a chat does not have; all others are passed on."""
Input = Annotated[str | list[dict[str, Any]], accepted("a string or a list of items (objects)")]


class ResponsesBody(Body):
    """Body of `/v1/responses`. Fields that it does not list are those of a chat, or hints."""

    input: Input
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    background: bool | None = None

    def chat(self) -> ChatBody:
        """Return the same call as a chat. Raises `RequestError` naming what this server cannot read."""
        self._refuse()
        others = {name: value for name, value in (self.model_extra or {}).items() if name not in NO_EFFECT}
        return read_as(
            ChatBody,
            {
                **others,
                "messages": self._messages(),
                "max_completion_tokens": self.max_output_tokens,
                "tools": [_tool(one) for one in self.tools or ()] or None,
                "tool_choice": _choice(self.tool_choice),
                "response_format": _format((self.text or {}).get("format")),
            },
        )

    def _refuse(self) -> None:
        if not self.input:
            raise RequestError("input", self.input, "must have a text or at least one item")
        if self.previous_response_id is not None:
            why = "this server stores no responses: send the whole conversation as `input`"
            raise RequestError("previous_response_id", self.previous_response_id, why)
        if self.background:
            raise RequestError("background", self.background, "this server stores no responses")

    def _messages(self) -> list[ChatMessage]:
        messages = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for at, item in enumerate(items):
            _add(messages, item, f"input.{at}")
        return messages


def _choice(choice: Any) -> Any:
    """Return a choice of a tool as chats have it; they have a function's name one level deeper."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, dict):
        raise RequestError("tool_choice.type", choice.get("type"), "must be function")
    return choice


def _format(given: Any) -> Any:
    """Return a format of the text as chats have it; they have a schema one level deeper."""
    if isinstance(given, dict) and given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": given}
    return given


def _add(messages: list[ChatMessage], item: dict[str, Any], place: str) -> None:
    """Add an item to a conversation; calls belong to the message before them, if that is the assistant's."""
    match item.get("type", "message"):
        case "message":
            messages.append(_message(item, place))
        case "function_call":
            call = CalledTool(id=_text(item, "call_id", place), function=_function(item, place))
            if messages and messages[-1].role == "assistant":
                messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
            else:
                messages.append(ChatMessage(role="assistant", tool_calls=[call]))
        case "function_call_output":
            output = _content(item.get("output"), f"{place}.output")
            messages.append(ChatMessage(role="tool", content=output, tool_call_id=_text(item, "call_id", place)))
        case "reasoning":
            pass
        case other:
            why = "must be message, function_call, function_call_output or reasoning"
            raise RequestError(f"{place}.type", other, why)


def _message(item: dict[str, Any], place: str) -> ChatMessage:
    role: Any = item.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise RequestError(f"{place}.role", role, "must be system, developer, user or assistant")
    return ChatMessage(role=role, content=_content(item.get("content"), f"{place}.content"))


def _function(item: dict[str, Any], place: str) -> CalledFunction:
    return CalledFunction(name=_text(item, "name", place), arguments=_text(item, "arguments", place))


def _content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(place, content, "must be a string or a list of text parts")
    return "".join(_part(part, f"{place}.{at}") for at, part in enumerate(content))


def _part(part: Any, place: str) -> str:
    if not isinstance(part, dict) or part.get("type") not in TEXTS:
        kind = part.get("type") if isinstance(part, dict) else part
        raise RequestError(f"{place}.type", kind, f"must be {', '.join(sorted(TEXTS))}: this server reads text only")
    return _text(part, "text", place)


def _text(item: dict[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{place}.{name}", value, "must be a string")
    return value


def _tool(tool: dict[str, Any]) -> Tool:
    if tool.get("type") != "function":
        raise RequestError("tools.type", tool.get("type"), "must be function: this server runs no tools itself")
    fields = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return Tool(type="function", function=read_as(Function, fields))
