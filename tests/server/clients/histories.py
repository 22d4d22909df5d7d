"""Clients that keep a conversation in their own form and send it whole each time, as they do in public.

`read` is beside it what the model is to read of it, as Transformers' chat templates have it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import anthropic
import httpx
import openai
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, SystemMessage
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.prebuilt import ToolNode, tools_condition

from tests.coding_clients import CLAUDE_CODE, CODEX, EPHEMERAL, claude_code, codex
from tests.server.conftest import Served

MODEL = "kedge-nano"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SYSTEM = "Be brief. Never say <|im_end|>."
WEATHER = {
    "name": "weather",
    "description": "Tells the weather, and ends with </s>.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}


class Overflow(Exception):
    """What clients compact after: the prompt is too long, said as they look for it."""


class Made(NamedTuple):
    """A call that the model made."""

    id: str
    name: str
    arguments: dict[str, Any]
    kind: str = "function"


class Client:
    """A client in a conversation, which `begin` begins. `user` says something, `late` gives instructions in the middle,
    and `results` answers the model's calls. `ask` sends all of it and takes the answer into it (raises `Overflow`);
    `abort` hangs up when some of the answer has come, which is kept.
    """

    image_kind: ClassVar[str]
    tools: ClassVar[Sequence[dict[str, Any]]] = (WEATHER,)
    calls: ClassVar[Sequence[tuple[str, dict[str, Any]]]] = (("weather", {"town": "Åbo"}), ("weather", {}))

    def __init__(self, served: Served) -> None:
        self.served, self.http = served, served.http()
        self.made: list[Made] = []
        self.history: list[Any] = []
        self.read: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        self.first = len(self.read)
        """Number of the first message that a compaction takes away"""
        self.begin()

    def compact(self, summary: str) -> None:
        """Put a summary in place of everything."""
        del self.read[self.first :]
        self.history, self.made = [], []
        self.begin()
        self.user(summary)

    def seen(self, role: str, content: str, calls: Sequence[Made] = ()) -> None:
        """Note a message that the model is to read."""
        made = [
            {"type": "function", "id": one.id, "function": {"name": one.name, "arguments": one.arguments}}
            for one in calls
        ]
        self.read.append({"role": role, "content": content, **({"tool_calls": made} if made else {})})

    def image(self, shown: bool) -> str:
        """What the model reads of an image."""
        return f"[{self.image_kind}: this model reads text only]" if shown else ""

    def shown(self) -> Sequence[dict[str, Any]]:
        """The tools as templates get them."""
        return [{"type": "function", "function": one} for one in self.tools]


@contextmanager
def hung_up(answer: httpx.Response, take: Any) -> Iterator[str]:
    """What had come of a streamed answer when a client hung up."""
    assert answer.status_code == 200, answer.read()
    lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
    yield next(found for found in (take(json.loads(line)) for line in lines) if found)
    answer.close()


# Anthropic's protocol -------------------------------------------------------------------------------------------------


class ClaudeCode(Client):
    """Claude Code: streams always, reminders beside what its user says, thoughts in its history, caches marked."""

    image_kind = "image"
    headers: ClassVar[dict[str, str]] = CLAUDE_CODE
    reminder = "<system-reminder>As you answer, use this context.</system-reminder>\n"
    picture: ClassVar[Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}

    def begin(self) -> None:
        own = claude_code(MODEL, 2000)
        self.body = {
            **own,
            "system": [*own["system"], {"type": "text", "text": SYSTEM, "cache_control": {**EPHEMERAL, "ttl": "1h"}}],
            "tools": [{**{key: one[key] for key in ("name", "description")}, "input_schema": one["parameters"]}
                      for one in self.tools],
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
        }  # fmt: skip
        self.read[0]["content"] = "".join(one["text"] for one in self.body["system"])

    def user(self, text: str, *, image: bool = False) -> None:
        given = [{"type": "text", "text": self.reminder}, *([self.picture] if image else [])]
        said = {"type": "text", "text": text, "cache_control": EPHEMERAL}
        self.history.append({"role": "user", "content": [*given, said]})
        self.seen("user", self.reminder + self.image(image) + text)

    def late(self, text: str) -> None:
        self.history.append({"role": "system", "content": [{"type": "text", "text": text}]})
        self.seen("system", text)

    def results(self, texts: Sequence[str], *, image: bool = False) -> None:
        content = []
        for call, text in zip(self.made, texts, strict=True):
            parts = [{"type": "text", "text": text}, *([self.picture] if image else [])]
            content.append(
                {"type": "tool_result", "tool_use_id": call.id, "content": parts if image else text, "is_error": image}
            )
            self.seen("tool", text + self.image(image))
        self.history.append({"role": "user", "content": content})

    def ask(self, *, stream: bool) -> None:  # noqa: ARG002
        count = self.http.post("/v1/messages/count_tokens", json=self._counted(), headers=self.headers).json()
        answer = self.http.post("/v1/messages?beta=true", json=self._whole(), headers=self.headers)
        if answer.status_code == 400:
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"] == f"prompt is too long: {count['input_tokens']} tokens > 8192 maximum"
            raise Overflow
        assert answer.status_code == 200, answer.text
        blocks: list[dict[str, Any]] = []
        for line in answer.text.splitlines():
            one = json.loads(line[6:]) if line.startswith("data: ") else {}
            match one.get("type"):
                case "message_start":
                    assert one["message"]["usage"]["input_tokens"] == count["input_tokens"]
                case "content_block_start":
                    blocks.append({**one["content_block"], "input": ""})
                case "content_block_delta":
                    field, key = ("text", "text") if "text" in one["delta"] else ("input", "partial_json")
                    blocks[-1][field] += one["delta"][key]
        self._take(blocks)

    def abort(self) -> str:
        with self.http.stream("POST", "/v1/messages?beta=true", json=self._whole(), headers=self.headers) as answer:
            take: Any = lambda one: one.get("delta", {}).get("text")  # noqa: E731
            with hung_up(answer, take) as partial:
                self.history.append({"role": "assistant", "content": [{"type": "text", "text": partial}]})
                self.seen("assistant", partial)
                return partial

    def _whole(self) -> dict[str, Any]:
        return {**self.body, "messages": self.history}

    def _counted(self) -> dict[str, Any]:
        return {name: self._whole()[name] for name in ("model", "messages", "system", "tools", "thinking")}

    def _take(self, blocks: Sequence[dict[str, Any]]) -> None:
        texts = [one for one in blocks if one["type"] == "text"]
        uses = [one for one in blocks if one["type"] == "tool_use"]
        self.made = [Made(one["id"], one["name"], json.loads(one["input"] or "{}")) for one in uses]
        thought = {"type": "thinking", "thinking": "Hm.", "signature": "EqQBCkYIBBgC"}
        written = [{"type": "tool_use", "id": one.id, "name": one.name, "input": one.arguments} for one in self.made]
        said = [{"type": "text", "text": one["text"]} for one in texts]
        self.history.append({"role": "assistant", "content": [thought, *said, *written]})
        self.seen("assistant", "".join(one["text"] for one in texts), self.made)


class AnthropicSdk(ClaudeCode):
    """The package `anthropic`."""

    reminder = ""

    def begin(self) -> None:
        super().begin()
        self.sdk = anthropic.Anthropic(base_url=self.served.url, api_key="none", max_retries=0)
        self.body = {"model": MODEL, "max_tokens": 2000, "system": SYSTEM, "tools": self.body["tools"]}
        self.read[0]["content"] = SYSTEM

    def ask(self, *, stream: bool) -> None:
        given: Any = self._whole()
        try:
            if stream:
                with self.sdk.messages.stream(**given) as events:
                    answer = events.get_final_message()
            else:
                answer = self.sdk.messages.create(**given)
        except anthropic.BadRequestError as error:
            assert "prompt is too long: " in str(error)
            raise Overflow from error
        counted = self.sdk.messages.count_tokens(**{key: one for key, one in given.items() if key != "max_tokens"})
        assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
        self.made = [Made(one.id, one.name, dict(one.input)) for one in answer.content if one.type == "tool_use"]
        self.history.append({"role": "assistant", "content": answer.content})
        self.seen("assistant", "".join(one.text for one in answer.content if one.type == "text"), self.made)

    def abort(self) -> str:
        with self.sdk.messages.stream(**self._whole()) as events:
            partial = next(events.text_stream)
        self.history.append({"role": "assistant", "content": partial})
        self.seen("assistant", partial)
        return partial


# OpenAI's chats -------------------------------------------------------------------------------------------------------


class OpenAiSdk(Client):
    """The package `openai`, with chat completions."""

    image_kind = "image_url"
    picture: ClassVar[Any] = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}

    def begin(self) -> None:
        self.sdk = self.served.client()
        self.history = [{"role": "system", "content": SYSTEM}]

    def user(self, text: str, *, image: bool = False) -> None:
        content: Any = [{"type": "text", "text": text}, self.picture] if image else text
        self.history.append({"role": "user", "content": content})
        self.seen("user", text + self.image(image))

    def late(self, text: str) -> None:
        self.history.append({"role": "developer", "content": text})
        self.seen("system", text)

    def results(self, texts: Sequence[str], *, image: bool = False) -> None:
        for call, text in zip(self.made, texts, strict=True):
            content: Any = [{"type": "text", "text": text}, self.picture] if image else text
            self.history.append({"role": "tool", "tool_call_id": call.id, "content": content})
            self.seen("tool", text + self.image(image))

    def ask(self, *, stream: bool) -> None:
        given: Any = {"model": MODEL, "messages": self.history, "tools": self.shown(), "max_tokens": 2000}
        try:
            if stream:
                with self.sdk.chat.completions.stream(**given, stream_options={"include_usage": True}) as events:
                    for _ in events:
                        pass
                    message = events.get_final_completion().choices[0].message
            else:
                message = self.sdk.chat.completions.create(**given).choices[0].message
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
            raise Overflow from error
        self._take(message.model_dump(exclude_none=True))

    def abort(self) -> str:
        given: Any = {"model": MODEL, "messages": self.history, "max_tokens": 2000, "tools": self.shown()}
        with self.sdk.chat.completions.create(**given, stream=True) as events:
            partial: str = next(text for one in events if (text := one.choices[0].delta.content))
        self.history.append({"role": "assistant", "content": partial})
        self.seen("assistant", partial)
        return partial

    def _take(self, message: dict[str, Any]) -> None:
        functions = [(one["id"], one["function"]) for one in message.get("tool_calls") or ()]
        self.made = [Made(number, one["name"], json.loads(one["arguments"])) for number, one in functions]
        self.history.append(self.replayed(message))
        self.seen("assistant", message.get("content") or "", self.made)

    def replayed(self, message: dict[str, Any]) -> dict[str, Any]:
        """An answer as it is sent again."""
        return message


class LiteLlm(OpenAiSdk):
    """litellm 1.110, as it sends its requests: tools' results have names, and answers fields of litellm's own."""

    def results(self, texts: Sequence[str], *, image: bool = False) -> None:
        super().results(texts, image=image)
        for call, one in zip(self.made, self.history[-len(texts) :], strict=True):
            one["name"] = call.name

    def replayed(self, message: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in message.items() if name != "refusal"}
        return {**kept, "provider_specific_fields": {"refusal": None, "citations": None, "thinking_blocks": None}}


# OpenAI's responses ---------------------------------------------------------------------------------------------------

PATCH = "*** Begin Patch\n*** Add File: a\n+x\n*** End Patch"
CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class Codex(Client):
    """Codex: streams always, its own and hosted tools, thoughts that only OpenAI can read, a context of its own."""

    image_kind = "input_image"
    shell: ClassVar[dict[str, Any]] = {
        "name": "shell",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}},
    }
    find: ClassVar[dict[str, Any]] = {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}
    patch: ClassVar[dict[str, Any]] = {"name": "apply_patch", "description": "Patches files."}
    tools = (shell, {**patch, "parameters": CUSTOM}, find)
    calls = (("shell", {"command": ["ls"]}), ("apply_patch", {"input": PATCH}))
    picture: ClassVar[Any] = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "high"}
    headers: ClassVar[dict[str, str]] = CODEX
    context = "<environment_context><cwd>/repo</cwd></environment_context>"

    def begin(self) -> None:
        grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}
        self.body = {
            **codex(MODEL),
            "instructions": SYSTEM,
            "tools": [
                {"type": "function", "strict": False, **self.shell},
                {"type": "custom", **self.patch, "format": grammar},
                {"type": "web_search", "external_web_access": True},
                {"type": "local_shell"},
                {"type": "namespace", "name": "mcp__docs", "description": "D.", "tools": [
                    {"type": "function", "strict": False, "defer_loading": False, **self.find}]},
            ],
            "parallel_tool_calls": True,
            "text": {"verbosity": "medium"},
            "client_metadata": {"x-codex-installation-id": "7"},
        }  # fmt: skip
        self.read = [{"role": "system", "content": SYSTEM}]
        self.late("<permissions instructions>Ask before writes.</permissions instructions>")
        self.user(self.context)
        ran = {"type": "exec", "command": ["git", "status"], "timeout_ms": None, "env": {}}
        self.history += [
            {"type": "local_shell_call", "call_id": "c0", "status": "completed", "action": ran},
            {"type": "function_call_output", "call_id": "c0", "output": "clean"},
            {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
            {"type": "ghost_snapshot", "ghost_commit": {"id": "0", "parent": None}},
        ]
        self.seen("assistant", "", [Made("c0", "local_shell", ran)])
        self.seen("tool", "clean")
        self._message("assistant", "I have looked.")

    def user(self, text: str, *, image: bool = False) -> None:
        self._message("user", text, image=image)

    def late(self, text: str) -> None:
        self._message("developer", text)

    def results(self, texts: Sequence[str], *, image: bool = False) -> None:
        for call, text in zip(self.made, texts, strict=True):
            parts = [{"type": "input_text", "text": text}, self.picture]
            item = {"type": f"{call.kind}_call_output", "call_id": call.id, "output": parts if image else text}
            self.history.append(item)
            self.seen("tool", text + self.image(image))

    def ask(self, *, stream: bool) -> None:  # noqa: ARG002
        answer = self.http.post("/v1/responses", json=self._whole(), headers=self.headers)
        assert answer.status_code == 200, answer.text
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        if events[-1]["type"] == "response.failed":
            assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
            raise Overflow
        assert events[-1]["type"] == "response.completed" and events[-1]["response"]["usage"]["total_tokens"]
        self._take([one["item"] for one in events if one["type"] == "response.output_item.done"])

    def abort(self) -> str:
        whole = {**self._whole(), "stream": True}
        with self.http.stream("POST", "/v1/responses", json=whole, headers=self.headers) as answer:
            take: Any = lambda one: one["type"] == "response.output_text.delta" and one["delta"]  # noqa: E731
            with hung_up(answer, take) as partial:
                self._message("assistant", partial)
                self.user("<turn_aborted>The user interrupted the turn.</turn_aborted>")
                return partial

    def _take(self, items: Sequence[dict[str, Any]]) -> None:
        thought = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAA"}
        self.history += [thought, *items]
        text = "".join(one["content"][0]["text"] for one in items if one["type"] == "message")
        self.made = []
        for one in items:
            if one["type"] == "function_call":
                self.made.append(Made(one["call_id"], one["name"], json.loads(one["arguments"])))
            elif one["type"] == "custom_tool_call":
                self.made.append(Made(one["call_id"], one["name"], {"input": one["input"]}, "custom_tool"))
        self.seen("assistant", text, self.made)

    def _message(self, role: str, text: str, *, image: bool = False) -> None:
        part = {"type": "output_text" if role == "assistant" else "input_text", "text": text}
        self.history.append({"type": "message", "role": role, "content": [part, *([self.picture] if image else [])]})
        self.seen("system" if role == "developer" else role, text + self.image(image))

    def _whole(self) -> dict[str, Any]:
        return {**self.body, "input": self.history}


class ResponsesSdk(Codex):
    """The package `openai`, with responses."""

    tools, calls = Client.tools, Client.calls

    def begin(self) -> None:
        self.sdk = self.served.client()
        tools = [{"type": "function", "strict": None, **one} for one in self.tools]
        self.body = {"model": MODEL, "instructions": SYSTEM, "tools": tools, "store": False}

    def ask(self, *, stream: bool) -> None:
        given: Any = self._whole()
        try:
            if stream:
                with self.sdk.responses.stream(**given) as events:
                    kinds = [one.type for one in events]
                    if kinds[-1] == "response.failed":
                        raise Overflow
                    answer = events.get_final_response()
            else:
                answer = self.sdk.responses.create(**given)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
            raise Overflow from error
        self._take([one.model_dump(exclude_none=True) for one in answer.output])


# LangGraph ------------------------------------------------------------------------------------------------------------


class LangGraph(OpenAiSdk):
    """A graph of a model and its tools that stops before these (`langchain_openai`); checkpoints are the history."""

    config: Any = {"configurable": {"thread_id": "t"}}

    def begin(self) -> None:
        @tool
        def weather(town: str = "here") -> Any:  # noqa: ARG001
            """Tells the weather."""
            return self.returned.pop(0)

        self.returned: list[Any] = []
        self.given: list[Any] = [SystemMessage(SYSTEM)]
        self.tools = [convert_to_openai_tool(weather)["function"]]
        base = f"{self.served.url}/v1"
        model = ChatOpenAI(base_url=base, api_key="none", model=MODEL, max_retries=0, max_tokens=2000)  # type: ignore[arg-type]
        bound = model.bind_tools([weather])
        building = StateGraph(MessagesState)
        building.add_node("agent", lambda state: {"messages": [bound.invoke(state["messages"])]})
        building.add_node("tools", ToolNode([weather]))
        building.add_edge(START, "agent")
        building.add_conditional_edges("agent", tools_condition)
        building.add_edge("tools", "agent")
        self.graph = building.compile(checkpointer=InMemorySaver(), interrupt_before=["tools"])

    def user(self, text: str, *, image: bool = False) -> None:
        content: Any = [{"type": "text", "text": text}, self.picture] if image else text
        self.given.append(HumanMessage(content))
        self.seen("user", text + self.image(image))

    def late(self, text: str) -> None:
        self.given.append(SystemMessage(text))
        self.seen("system", text)

    def results(self, texts: Sequence[str], *, image: bool = False) -> None:
        for text in texts:
            self.returned.append([{"type": "text", "text": text}, self.picture] if image else text)
            self.seen("tool", text + self.image(image))

    def ask(self, *, stream: bool) -> None:
        given: Any = {"messages": self.given} if self.given else None
        try:
            if stream:
                for _ in self.graph.stream(given, self.config, stream_mode="messages"):
                    pass
            else:
                self.graph.invoke(given, self.config)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
            raise Overflow from error
        self.given = []
        answer = self.graph.get_state(self.config).values["messages"][-1]
        assert isinstance(answer, AIMessage)
        self.made = [Made(str(one["id"]), one["name"], one["args"]) for one in answer.tool_calls]
        self.seen("assistant", answer.text, self.made)

    def abort(self) -> str:
        events = self.graph.stream({"messages": self.given}, self.config, stream_mode="messages")
        partial = next(chunk.text for chunk, _ in events if chunk.text)
        events.close()
        self.given = [AIMessage(partial)]
        self.seen("assistant", partial)
        return partial

    def compact(self, summary: str) -> None:
        del self.read[self.first :]
        self.given = [RemoveMessage(id=REMOVE_ALL_MESSAGES), SystemMessage(SYSTEM)]
        self.user(summary)
