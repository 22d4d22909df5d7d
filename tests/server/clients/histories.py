"""Clients that keep a conversation in their own form and send it whole each time, as they do in public.

`read` is beside it what the model is to read of it, as Transformers' chat templates have it.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import anthropic
import openai

from tests.coding_clients import CLAUDE_CODE, CODEX, EPHEMERAL, claude_code, codex
from tests.server.conftest import MODEL, Served

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
    """A client in a conversation, which `begin` begins.

    `written` is a message as the client has it. `ask` sends the conversation and takes the answer into it, or raises
    `Overflow`; `cut_off` sends it, and hangs up when some of the answer has come, which it returns.
    """

    image_kind: str
    picture: Any
    tools: Sequence[dict[str, Any]] = (WEATHER,)
    calls: Sequence[tuple[str, dict[str, Any]]] = (("weather", {"town": "Åbo"}), ("weather", {}))
    begin: Any
    written: Any
    ask: Any
    cut_off: Any

    def __init__(self, served: Served) -> None:
        self.served, self.http = served, served.http()
        self.made: list[Made] = []
        self.history: list[Any] = []
        self.read: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        self.begin()

    def say(self, role: str, text: str, *, image: bool = False, call: Made | None = None) -> None:
        """Add a message; late instructions are the system's."""
        self.history.append(self.written(role, text, self.picture if image else None, call))
        self.seen(role, text + self.image(image))

    def results(self, texts: Sequence[str], *, image: bool = False) -> None:
        """Answer the model's calls."""
        for call, text in zip(self.made, texts, strict=True):
            self.say("tool", text, image=image, call=call)

    def abort(self) -> str:
        """Hang up in the middle of an answer, of which the beginning is kept."""
        partial = self.cut_off()
        self.say("assistant", partial)
        return partial

    def compact(self, summary: str) -> None:
        """Put a summary in place of everything."""
        del self.read[1:]
        self.history, self.made = [], []
        self.begin()
        self.say("user", summary)

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


# Anthropic's protocol -------------------------------------------------------------------------------------------------


class ClaudeCode(Client):
    """Claude Code, with the package `anthropic`: reminders beside what its user says, thoughts in its history, caches
    marked.
    """

    image_kind = "image"
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}

    def begin(self) -> None:
        url = self.served.url
        self.sdk = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, default_headers=CLAUDE_CODE)
        own = claude_code(MODEL, 2000)
        own["extra_body"] = {"temperature": own.pop("temperature")}  # no argument of the package
        del own["stream"]
        marked = {"type": "text", "text": SYSTEM, "cache_control": {**EPHEMERAL, "ttl": "1h"}}
        tools = [{**{key: one[key] for key in ("name", "description")}, "input_schema": one["parameters"]}
                 for one in self.tools]  # fmt: skip
        more = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                "output_config": {"effort": "medium"}}  # fmt: skip
        self.body = {**own, **more, "system": [*own["system"], marked], "tools": tools}
        self.read[0]["content"] = "".join(one["text"] for one in self.body["system"])

    def say(self, role: str, text: str, *, image: bool = False, call: Made | None = None) -> None:  # noqa: ARG002
        pictures, said = [self.picture] if image else [], {"type": "text", "text": text}
        if role == "user":
            reminder = "<system-reminder>As you answer, use this context.</system-reminder>\n"
            said["cache_control"] = EPHEMERAL
            self.history.append({"role": role, "content": [{"type": "text", "text": reminder}, *pictures, said]})
            text = reminder + self.image(image) + text
        else:
            self.history.append({"role": role, "content": [said]})
        self.seen(role, text)

    def results(self, texts: Sequence[str], *, image: bool = False) -> None:
        content = []
        for call, text in zip(self.made, texts, strict=True):
            parts = [{"type": "text", "text": text}, self.picture] if image else text
            content.append({"type": "tool_result", "tool_use_id": call.id, "content": parts, "is_error": image})
            self.seen("tool", text + self.image(image))
        self.history.append({"role": "user", "content": content})

    def ask(self, *, stream: bool) -> None:
        api, given = self.sdk.beta.messages, self._whole()
        told = {name: given[name] for name in ("model", "messages", "system", "tools", "thinking")}
        counted = api.count_tokens(**told).input_tokens
        try:
            if stream:
                with api.stream(**given) as events:
                    answer = events.get_final_message()
            else:
                answer = api.create(**given)
        except anthropic.BadRequestError as error:
            assert f"prompt is too long: {counted} tokens > 8192 maximum" in str(error)
            raise Overflow from error
        assert counted == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
        self.made = [Made(one.id, one.name, dict(one.input)) for one in answer.content if one.type == "tool_use"]
        thought = {"type": "thinking", "thinking": "Hm.", "signature": "EqQBCkYIBBgC"}
        self.history.append({"role": "assistant", "content": [thought, *answer.content]})
        self.seen("assistant", "".join(one.text for one in answer.content if one.type == "text"), self.made)

    def cut_off(self) -> str:
        with self.sdk.beta.messages.stream(**self._whole()) as events:
            return next(events.text_stream)

    def _whole(self) -> Any:
        return {**self.body, "messages": self.history}


# OpenAI's chats -------------------------------------------------------------------------------------------------------


class OpenAiSdk(Client):
    """The package `openai`, with chat completions. It sends answers again with fields of litellm's own and, where they
    were not streamed, nulls, as LangChain does; tools' results have names.
    """

    image_kind = "image_url"
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}

    def begin(self) -> None:
        self.sdk = self.served.client()
        self.history = [{"role": "system", "content": SYSTEM}]

    def written(self, role: str, text: str, picture: Any, call: Made | None) -> Any:
        content = [{"type": "text", "text": text}, picture] if picture else text
        more = {"tool_call_id": call.id, "name": call.name} if call else {}
        return {"role": "developer" if role == "system" else role, "content": content, **more}

    def _whole(self) -> Any:
        return {"model": MODEL, "messages": self.history, "tools": self.shown(), "max_tokens": 2000}

    def ask(self, *, stream: bool) -> None:
        try:
            if stream:
                with self.sdk.chat.completions.stream(**self._whole(), stream_options={"include_usage": True}) as found:
                    message = found.get_final_completion().choices[0].message
            else:
                message = self.sdk.chat.completions.create(**self._whole()).choices[0].message
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
            raise Overflow from error
        said = message.model_dump(exclude_none=stream)
        functions = [(one["id"], one["function"]) for one in said.get("tool_calls") or ()]
        self.made = [Made(number, one["name"], json.loads(one["arguments"])) for number, one in functions]
        self.history.append({**said, "provider_specific_fields": {"refusal": None, "thinking_blocks": None}})
        self.seen("assistant", said.get("content") or "", self.made)

    def cut_off(self) -> str:
        with self.sdk.chat.completions.create(**self._whole(), stream=True) as events:
            return next(text for one in events if (text := one.choices[0].delta.content))


# OpenAI's responses ---------------------------------------------------------------------------------------------------

PATCH = "*** Begin Patch\n*** Add File: a\n+x\n*** End Patch"
CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
SHELL: Any = {
    "name": "shell",
    "description": "Runs a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}},
}
FIND: Any = {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}
APPLY: Any = {"name": "apply_patch", "description": "Patches files."}


class Codex(Client):
    """Codex: streams always, its own and hosted tools, thoughts that only OpenAI can read, a context of its own."""

    image_kind = "input_image"
    tools = (SHELL, {**APPLY, "parameters": CUSTOM}, FIND)
    calls = (("shell", {"command": ["ls"]}), ("apply_patch", {"input": PATCH}))
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "high"}

    def begin(self) -> None:
        grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}
        self.body = {
            **codex(MODEL),
            "instructions": SYSTEM,
            "tools": [
                {"type": "function", "strict": False, **SHELL},
                {"type": "custom", **APPLY, "format": grammar},
                {"type": "web_search", "external_web_access": True},
                {"type": "local_shell"},
                {"type": "namespace", "name": "mcp__docs", "description": "D.", "tools": [
                    {"type": "function", "strict": False, "defer_loading": False, **FIND}]},
            ],
            "parallel_tool_calls": True,
            "text": {"verbosity": "medium"},
            "client_metadata": {"x-codex-installation-id": "7"},
        }  # fmt: skip
        self.say("system", "<permissions instructions>Ask before writes.</permissions instructions>")
        self.say("user", "<environment_context><cwd>/repo</cwd></environment_context>")
        ran = {"type": "exec", "command": ["git", "status"], "timeout_ms": None, "env": {}}
        self.history += [
            {"type": "local_shell_call", "call_id": "c0", "status": "completed", "action": ran},
            {"type": "function_call_output", "call_id": "c0", "output": "clean"},
            {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
            {"type": "ghost_snapshot", "ghost_commit": {"id": "0", "parent": None}},
        ]
        self.seen("assistant", "", [Made("c0", "local_shell", ran)])
        self.seen("tool", "clean")
        self.say("assistant", "I have looked.")

    def written(self, role: str, text: str, picture: Any, call: Made | None) -> Any:
        part = {"type": "output_text" if role == "assistant" else "input_text", "text": text}
        parts = [part, *([picture] if picture else [])]
        if call:
            return {"type": f"{call.kind}_call_output", "call_id": call.id, "output": parts if picture else text}
        return {"type": "message", "role": "developer" if role == "system" else role, "content": parts}

    def ask(self, *, stream: bool) -> None:  # noqa: ARG002
        answer = self.http.post("/v1/responses", json=self._whole(), headers=CODEX)
        assert answer.status_code == 200, answer.text
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        if events[-1]["type"] == "response.failed":
            assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
            raise Overflow
        assert events[-1]["type"] == "response.completed" and events[-1]["response"]["usage"]["total_tokens"]
        self._take([one["item"] for one in events if one["type"] == "response.output_item.done"])

    def cut_off(self) -> str:
        body = {**self._whole(), "stream": True}
        with self.http.stream("POST", "/v1/responses", json=body, headers=CODEX) as answer:
            events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
            return next(one["delta"] for one in events if one["type"] == "response.output_text.delta")

    def abort(self) -> str:
        partial = super().abort()
        self.say("user", "<turn_aborted>The user interrupted the turn.</turn_aborted>")
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
                    answer = events.get_final_response()
            else:
                answer = self.sdk.responses.create(**given)
        except openai.APIError as error:
            assert error.code == "context_length_exceeded"
            raise Overflow from error
        self._take([one.model_dump(exclude_none=True) for one in answer.output])
