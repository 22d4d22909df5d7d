"""OpenAI's Responses API, without responses that are stored: bodies are read as chats, answers are written as items."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Annotated, Any

from fastapi import APIRouter, Response

from kedge.checks import brief
from kedge.errors import PromptTooLong, RequestError
from kedge.server.http import ERRORS, EVENTS, PLACE, STREAMED, TypedRoute, accepted, dumps, event, read_as, usage
from kedge.server.openai.generation import answer, failure
from kedge.server.openai.protocol import CallBody, ChatBody, Count, Function, Tool
from kedge.server.openai.tool_calls import ToolCall, read_json
from kedge.server.openai.writers import AnswerWriter, ParsedDelta
from kedge.server.service import Service, TheCaller
from kedge.types import Completion, FinishReason

NO_EFFECT = ("store", "include", "truncation", "service_tier", "stream_options", "max_tool_calls")
"""Fields that neither a chat has nor a hint is; all others that the body does not list are passed on"""
Input = Annotated[str | list[dict[str, Any]], accepted("a string or a list of items (objects)")]


class ResponsesBody(CallBody):
    """Body of `/v1/responses`. Fields that it does not list are those of a chat, or hints."""

    sent = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }
    input: Input
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None

    def chat(self) -> ChatBody:
        others, unstored = self.model_extra or {}, "nothing is stored here: send the whole conversation as `input`"
        for name, why in (
            ("previous_response_id", f"the previous response was not found: {unstored}"),
            ("conversation", unstored),
            ("top_logprobs", "this server's responses have no log-probabilities"),
        ):
            if others.get(name):
                raise RequestError(name, brief(others[name]), why)
        if not self.input:
            raise RequestError("input", self.input, "must have a text or at least one item")
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        skipped = [f"tools.{one.kind}" for one in self.offered if not one.tool]
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        for at, item in enumerate(items):
            if not self._add(messages, item, f"input.{at}"):
                skipped.append(f"input.{brief(item.get('type'))}")
        choice = _choice(self.tool_choice, self.offered)
        if choice is None and self.tool_choice is not None:
            skipped.append("tool_choice")
        wanted, effort = (self.text or {}).get("format"), (self.reasoning or {}).get("effort")
        if isinstance(wanted, dict) and wanted.get("type") == "json_schema":  # chats have it one level deeper
            wanted = {"type": "json_schema", "json_schema": wanted}
        fields = {
            **{name: value for name, value in others.items() if name not in NO_EFFECT},
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": [one.tool for one in self.offered if one.tool] or None,
            "tool_choice": choice,
            "response_format": wanted,
            "reasoning_effort": effort if isinstance(effort, str) else None,
        }
        chat = read_as(ChatBody, fields)
        chat.left_out.extend(skipped)
        return chat

    def _add(self, messages: list[dict[str, Any]], item: dict[str, Any], place: str) -> bool:
        """Add an item to the messages of a chat; calls belong to the message before them, if that is the assistant's.
        Returns whether it is one that a chat can have.
        """
        match item.get("type", "message"):
            case "message":
                if "content" not in item:
                    raise RequestError(f"{place}.content", None, "must be a string or a list of parts")
                messages.append({"role": item.get("role"), "content": item["content"], PLACE: place})
            case "function_call" | "custom_tool_call" | "local_shell_call" as kind:
                name = "local_shell" if kind == "local_shell_call" else _text(item, "name", place)
                tool = self.named.get((name, space)) if isinstance(space := item.get("namespace"), str) else None
                given: Any = {"input": item.get("input")}
                if kind != "custom_tool_call":
                    given = item.get("arguments" if kind == "function_call" else "action")
                function = {"name": tool.called if tool else name, "arguments": given}
                call = {"id": _text(item, "call_id", place), "function": function}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", PLACE: place})
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                number = _text(item, "call_id" if "call_id" in item else "id", place)
                result = item.get("output") or ""
                if isinstance(result, dict):  # of clients before outputs were texts
                    result = json.dumps(result, ensure_ascii=False)
                messages.append({"role": "tool", "content": result, "tool_call_id": number, PLACE: place})
            case "reasoning":
                pass
            case _:
                return False
        return True

    @cached_property
    def offered(self) -> list[NamedTool]:
        """The tools, with those in a namespace each by itself. Raises `RequestError`."""
        offered, taken = list[NamedTool](), set[str]()
        for tool in self.tools or ():
            is_space = tool.get("type") == "namespace" and isinstance(tool.get("tools"), list)
            space = str(tool.get("name", "")) if is_space else ""
            for one in tool["tools"] if is_space else (tool,):
                kind = one.get("type") if isinstance(one, dict) else None
                if kind not in ("function", "custom"):
                    offered.append(NamedTool(str(brief(kind)), ""))
                    continue
                name = str(one.get("name", ""))
                is_taken = bool(space) and name in taken
                taken.add(name)
                function = read_as(Function, _function(one, f"{space}__{name}" if is_taken else name), "tools")
                offered.append(NamedTool(kind, name, space, Tool(type="function", function=function)))
        return offered

    @cached_property
    def named(self) -> dict[str | tuple[str, str], NamedTool]:
        """The tools by what the model calls them, and by name and namespace."""
        return {key: one for one in self.offered for key in (one.called, (one.name, one.namespace))}


@dataclass(frozen=True)
class NamedTool:
    """A tool that a body offers; `tool` is how a chat has it, None where it has none like it."""

    kind: str
    name: str
    namespace: str = ""
    tool: Tool | None = None

    @property
    def called(self) -> str:
        """What the model calls it."""
        return self.tool.function.name if self.tool and self.tool.function else ""


CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Parameters of the function that stands for a custom tool, whose input is a text"""


def _function(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a function or a custom tool as the function that a chat offers."""
    given = {"parameters": CUSTOM} if tool["type"] == "custom" else {}
    fields = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
    return {**fields, **given, "name": name}


def _choice(choice: Any, offered: Sequence[NamedTool]) -> Any:
    """Return a choice of a tool as chats have it; None for one that is left out."""
    if not isinstance(choice, dict):
        return choice if any(one.tool for one in offered) or choice == "none" else None
    if choice.get("type") not in ("function", "custom"):
        return None
    wanted = choice.get("name"), choice.get("namespace", "")
    named = (one.called for one in offered if wanted == (one.name, choice.get("namespace", one.namespace)))
    return {"type": "function", "function": {"name": next(named, choice.get("name"))}}


def _text(item: dict[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{place}.{name}", brief(value), "must be a string")
    return value


ECHOED: Mapping[str, Any] = {
    **dict.fromkeys(("instructions", "max_output_tokens", "temperature", "top_p")), "metadata": {}, "tools": [],
    "parallel_tool_calls": True, "tool_choice": "auto", "text": {"format": {"type": "text"}},
}  # fmt: skip
"""Fields of a body that its response repeats, and their defaults"""


class ResponsesWriter(AnswerWriter):
    """Writer of one response. Its items are messages, unless they are empty, and the calls of tools."""

    def __init__(self, service: Service, asked: ResponsesBody) -> None:
        super().__init__(service)
        self._id, self._created, self._asked = _new_id("resp"), int(time.time()), asked
        given = {**(asked.model_extra or {}), **dict(asked)}
        self._echoed = {name: default if given.get(name) is None else given[name] for name, default in ECHOED.items()}
        for name, value in self._echoed.items():
            try:  # as deep in the stack as it will be sent
                dumps(reduce(lambda inner, _: [inner], range(64), value))
            except RecursionError:
                raise RequestError(name, "…", "nests too deeply") from None
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        """Whether the last item is a message that goes on"""
        self._events = 0

    def ended(self, completion: Completion) -> dict[str, Any]:
        return self._response(_status(completion), completion)

    def begin(self) -> bytes:
        response = self._response("in_progress")
        return b"".join(self._event(f"response.{name}", response=response) for name in ("created", "in_progress"))

    def add(self, at: int, pair: ParsedDelta, kedge: Mapping[str, Any] | None) -> Iterator[bytes]:  # noqa: ARG002 (one choice)
        parsed, delta = pair
        if parsed.content:
            yield from self._open()
            self._items[-1]["content"][0]["text"] += parsed.content
            yield self._event("response.output_text.delta", **self._place(), delta=parsed.content, logprobs=[])
        for call in parsed.calls:
            yield from self._close("completed")  # clients keep items in the order in which they end
            yield from self._call(call)
        if delta.completion:
            status = _status(delta.completion)
            if not self._items:  # an answer without calls has a message, even if it is empty
                yield from self._open()
            yield from self._close(status)
            response = {**self._response(status, delta.completion), "kedge": kedge}
            yield self._event(f"response.{status}", response=response)

    def failed(self, body: Mapping[str, Any]) -> Iterator[bytes]:
        if not self._events:
            yield self.begin()
        error = {**body["error"], "code": body["error"]["code"] or "invalid_prompt"}  # Codex retries on any other code
        yield self._event("error", code=error["code"], message=error["message"], param=error["param"], error=error)
        yield self._event("response.failed", response={**self._response("failed"), "error": error})

    # items ----------------------------------------------------------------------------------------------------

    def _open(self) -> Iterator[bytes]:
        """Begin a message, if none is open."""
        if not self._is_open:
            self._is_open = True
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": "message", "id": _new_id("msg"), "role": "assistant", "status": "in_progress"}
            self._items.append({**item, "content": [part]})
            yield self._item_event("added", {**item, "content": []})
            yield self._event("response.content_part.added", **self._place(), part=dict(part))

    def _close(self, status: str) -> Iterator[bytes]:
        """End the message, if one is open."""
        if self._is_open:
            self._is_open = False
            message = self._items[-1]
            (part,), message["status"] = message["content"], status
            yield self._event("response.output_text.done", **self._place(), text=part["text"], logprobs=[])
            yield self._event("response.content_part.done", **self._place(), part=part)
            yield self._item_event("done", message)

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        tool = self._asked.named.get(call.name) or NamedTool("function", call.name)
        field, kind, given = "arguments", "function_call", call.arguments
        if tool.kind == "custom":
            field, kind = "input", "custom_tool_call"
            text = read_json(call.arguments).get("input", "")
            given = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        item = {"type": kind, "id": _new_id("fc"), "call_id": call.id, "name": tool.name}
        item |= {"namespace": tool.namespace} if tool.namespace else {}
        self._items.append({**item, field: given, "status": "completed"})
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        name = f"response.{kind}_{field}"
        yield self._item_event("added", {**item, field: "", "status": "in_progress"})
        yield self._event(f"{name}.delta", **place, delta=given)
        yield self._event(f"{name}.done", **place, **{field: given}, name=tool.name)
        yield self._item_event("done", self._items[-1])

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _item_event(self, what: str, item: Mapping[str, Any]) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=len(self._items) - 1, item=item)

    def _event(self, kind: str, /, **data: Any) -> bytes:
        self._events += 1
        return event({"type": kind, "sequence_number": self._events - 1, **data}, name=kind)

    def _response(self, status: str, completion: Completion | None = None) -> dict[str, Any]:
        return {
            **self._echoed,
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": list(self._items),
            "previous_response_id": None,
            "store": False,
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


router = APIRouter(tags=["OpenAI"], responses=ERRORS, route_class=TypedRoute)


@router.post("/v1/responses", responses=STREAMED)
async def responses(body: ResponsesBody, caller: TheCaller) -> Response:
    """Answer a list of items. Nothing is stored: every call sends its whole conversation."""
    writer = ResponsesWriter(caller.service, body)
    try:
        return await answer(body, writer, caller)
    except PromptTooLong as error:  # Codex compacts after an event that says so, and after no status
        if not (body.model_extra or {}).get("stream"):
            raise
        return Response(failure(writer, error, caller), media_type=EVENTS)
