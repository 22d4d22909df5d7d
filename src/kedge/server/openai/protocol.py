"""Request bodies of OpenAI's completion routes.

Fields that a body does not list are hints (`kedge.hints`) or parameters that the engine does not support; those
are refused by name unless their value has no effect. `UNSUPPORTED` applies to fields that a body does not list: `echo`
is refused in chats, `tools` in text completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from kedge.checks import brief
from kedge.errors import RequestError
from kedge.hints.values import cache_marks
from kedge.server.http import Body, accepted
from kedge.types import SamplingParams


class Function(Body):
    """Function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool | None, Field(exclude=True)] = None
    """Whether every call's arguments conform; the model is not told"""


class Tool(Body):
    """Tool that the model may call; those that are no functions are left out."""

    type: str
    function: Function | None = None

    @model_validator(mode="after")
    def _has_function(self) -> Self:
        if self.type == "function" and self.function is None:
            raise PydanticCustomError("missing", "a function needs the field function")
        return self


class CalledFunction(Body):
    """Function that the model called."""

    name: str
    arguments: Any = None
    """JSON text of an object, as a rule; whatever a model has made of it, its history is read"""


class CalledTool(Body):
    """Tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _of_custom_tool(cls, data: Any) -> Any:
        """Read the call of a tool that takes a text as that of a function with one argument."""
        if not (isinstance(data, dict) and data.get("type") == "custom" and isinstance(data.get("custom"), dict)):
            return data
        function = {"name": data["custom"].get("name"), "arguments": {"input": data["custom"].get("input")}}
        return {"id": data.get("id"), "function": function}


TEXTS = frozenset({"text", "input_text", "output_text"})
"""Types of parts that are text"""
DROPPED = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_text"})
"""Types of parts of earlier answers that are not read again"""


class MessagePart(Body):
    """Part of a message. The engine reads text; of any other part it reads that it was there."""

    type: Annotated[str, Field(min_length=1)]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        if self.type in TEXTS and self.text is None:
            raise PydanticCustomError("missing", "a part of this type needs the field text")
        return self

    @property
    def is_read(self) -> bool:
        """Whether the model reads it."""
        return self.text is not None or self.refusal is not None or self.type in DROPPED

    @property
    def shown(self) -> str:
        """What the model reads."""
        if not self.is_read:
            return f"[{brief(self.type)}: this model reads text only]"
        return "" if self.type in DROPPED else self.text or self.refusal or ""


Content = Annotated[
    str | list[MessagePart],
    accepted("a string or a list of parts (objects with a `type`, and `text` where that is a text)"),
]


class ChatMessage(Body):
    """Message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    refusal: str | None = None
    """The model's refusal to answer, instead of `content`"""
    name: str | None = None
    reasoning_content: str | None = None
    """The thought before the content, where a client has taken it out"""
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _in_older_words(cls, data: Any) -> Any:
        """Read what histories have from before tools had their present form: a function's call and its result."""
        if not isinstance(data, dict):
            return data
        if data.get("role") == "function":
            data = {**data, "role": "tool"}
        if isinstance(called := data.get("function_call"), dict) and not data.get("tool_calls"):
            data = {**data, "tool_calls": [{"function": called}]}
        return data

    @property
    def parts(self) -> list[MessagePart]:
        """The parts of its content, where that has some."""
        return [] if isinstance(self.content, str) else self.content or []

    @property
    def text(self) -> str:
        """The content as one text, or the refusal."""
        text = self.content if isinstance(self.content, str) else "".join(part.shown for part in self.parts)
        return text or self.refusal or ""


UNSUPPORTED: Mapping[str, Sequence[object]] = {
    name: neutral
    for names, *neutral in (
        ("echo use_beam_search return_token_ids include_stop_str_in_output return_tokens_as_token_ids", False),
        ("add_special_tokens early_stopping return_hidden_states no_stop_trim background", False),
        ("skip_special_tokens spaces_between_special_tokens include_reasoning", True),
        ("top_logprobs min_tokens min_new_tokens", 0),
        ("best_of length_penalty", 1),
        ("tools functions stop_token_ids bad_words", []),
        ("tool_choice function_call", "none", "auto"),
        ("suffix", ""),
        ("logit_bias", {}),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("allowed_token_ids truncate_prompt_tokens max_new_tokens logits_processors chat_template lora_path",),
        ("custom_logit_processor mm_processor_kwargs prompt prompt_logprobs audio prediction web_search_options",),
        ("structured_outputs guided_json guided_regex guided_choice guided_grammar json_schema regex ebnf",),
    )
    for name in str(names).split()
}
"""Unsupported parameters -> their values without effect. Null never has an effect."""
MAX_LOGPROBS = 20
"""Largest k of the top-k logprobs of one token."""
SAMPLING = {one.name for one in fields(SamplingParams)} - {"grammar"}
"""Parameters of sampling, by names that bodies have as well"""
COMPLETION_MAX_TOKENS = 16
"""Default of OpenAI's text completions."""


class StreamOptions(Body):
    """What a stream contains besides its text."""

    include_usage: bool | None = None


Stop = Annotated[str | list[str], accepted("a string or a list of strings")]
Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    accepted("a string, a list of strings, a list of token ids or a list of lists of token ids"),
]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | dict[str, Any], accepted("none, auto, required or a function (an object)")
]
Count = Annotated[int, Field(ge=1, le=1 << 20)]
TopCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class CallBody(Body):
    """Body of a call that generates, in any dialect."""

    sent: ClassVar[Mapping[str, str]] = {}
    """Field of the completion that is made of it -> the field of this body that it is read from"""

    def chat(self) -> AnyBody:
        """Return the same call as a completion. Raises `RequestError` naming what this server cannot read."""
        raise NotImplementedError


class GenerationBody(CallBody):
    """Fields that both kinds of completion share."""

    prompt_field: ClassVar[str]
    """Name of the field with the prompt."""
    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    """Of parameters of sampling, the engine checks the ranges"""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Stop | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    kedge: Any = None

    def chat(self) -> AnyBody:
        assert isinstance(self, ChatBody | CompletionBody)
        return self

    @cached_property
    def left_out(self) -> list[str]:
        """What of the body the model does not get, by its place there; it grows while the body is read."""
        return []

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def hints(self) -> dict[str, Any]:
        """Fields that may be hints."""
        extra = {name: value for name, value in (self.model_extra or {}).items() if name not in UNSUPPORTED}
        return extra if self.kedge is None else {**extra, "kedge": self.kedge}

    def refuse_unsupported(self) -> None:
        """Raise `RequestError` for an unsupported parameter with an effect, or for two that contradict each other."""
        for name, value in (self.model_extra or {}).items():
            neutral = UNSUPPORTED.get(name)
            if neutral is None or value is None:
                continue
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
                raise RequestError(name, value, "this server does not support this parameter")

    def sampling(self, base: SamplingParams) -> SamplingParams:
        """Return `base` with the body's parameters."""
        given = self.model_dump(include=SAMPLING, exclude_none=True)
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.top_k == -1:  # all, in vLLM's words
            given["top_k"] = 0
        return replace(base, **given)


class ResponseFormat(Body):
    """What an answer's text conforms to."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None
    """With a `schema`"""


class ChatBody(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: list[ChatMessage]
    prompt_field = "messages"
    prompt_logprobs_count: ClassVar[int | None] = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def template_options(self) -> dict[str, Any]:
        """Variables of the chat template."""
        own = {
            "add_generation_prompt": self.add_generation_prompt is not False and not self.continue_final_message,
            "documents": self.documents,
            "reasoning_effort": self.reasoning_effort,
        }
        return {name: value for name, value in own.items() if value is not None} | (self.chat_template_kwargs or {})

    @property
    def unread(self) -> list[str]:
        """What of the body the model does not read, by its place there."""
        parts = (part.type for message in self.messages for part in message.parts if not part.is_read)
        tools = (tool.type for tool in self.tools or () if not tool.function)
        return [*(f"messages.{one}" for one in parts), *(f"tools.{one}" for one in tools)]

    @property
    def top_logprobs_count(self) -> int | None:
        """Number of top-k logprobs besides the answer token's own; None for no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def sampling(self, base: SamplingParams) -> SamplingParams:
        found = super().sampling(base)
        return replace(found, max_tokens=self.max_completion_tokens) if self.max_completion_tokens else found

    @property
    def tools_to_use(self) -> list[Tool]:
        """Tools that the prompt offers to the model; none with `tool_choice: "none"`."""
        return [] if self.tool_choice == "none" else [one for one in self.tools or () if one.function]

    @property
    def hints(self) -> dict[str, Any]:
        found = super().hints
        content = [{"content": [part.model_extra for part in one.parts]} for one in self.messages]
        marks = cache_marks({**found, "messages": content, "tools": [one.model_extra for one in self.tools or ()]})
        return {**found, "cache_control": marks} if marks else found

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a tool call."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def has_one_call(self) -> bool:
        """Whether the answer has at most one call; a named function is called exactly once."""
        return self.parallel_tool_calls is False or self.called is not None

    @property
    def called(self) -> str | None:
        """The only function that may be called; None for any."""
        if not isinstance(self.tool_choice, dict):
            return None
        function = self.tool_choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        return name if isinstance(name, str) else ""

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs", self.top_logprobs, "needs `logprobs: true`")
        names = [tool.function.name for tool in self.tools or () if tool.function]
        if self.must_call and (not names if self.called is None else self.called not in names):
            raise RequestError("tool_choice", self.tool_choice, "must name one of `tools`, which must not be empty")


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`: a text, token ids, or several of either."""

    prompt: Prompt
    prompt_field = "prompt"
    max_tokens: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    """0 is allowed with `echo`: the answer is the prompt, with its logprobs if they are asked for."""
    echo: bool | None = None
    logprobs: TopCount | None = None

    @property
    def top_logprobs_count(self) -> int | None:
        """Number of top-k logprobs besides the answer token's own; None for no logprobs at all."""
        return self.logprobs

    @property
    def prompt_logprobs_count(self) -> int | None:
        """Number of top-k logprobs per prompt token; None for no logprobs of the prompt."""
        return self.logprobs if self.echo else None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens", 0, "must be at least 1, or 0 with `echo: true`")

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts. Raises `RequestError` if there is none."""
        if not isinstance(self.prompt, str) and not self.prompt:
            raise RequestError("prompt", self.prompt, "must not be empty")
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast("list[str | list[int]]", [self.prompt] if is_one else self.prompt)


AnyBody = ChatBody | CompletionBody
