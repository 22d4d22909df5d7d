"""OpenAI's wire protocol: the bodies that are read, and the objects that are answered.

Fields that are not listed here are hints (`kedge.server.hints`), or parameters that need what the engine cannot do:
those are refused by name, unless their value asks for nothing. `UNSUPPORTED` holds for fields that a body does not
list: `echo` is refused in chats, `tools` in text completions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from kedge.checks import MAX_STOPS
from kedge.errors import RequestError
from kedge.server.hints import Hints
from kedge.server.openai.logprobs import MOST as MOST_LOGPROBS
from kedge.types import Completion, ReuseMode, SamplingParams, Source

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("echo", "use_beam_search", "return_token_ids"), (False,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("tools", "functions", "stop_token_ids", "bad_words"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("prompt_logprobs", "audio", "prediction", "web_search_options", "structured_outputs"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex"), ()),
    "suffix": ("",),
    "best_of": (1,),
    "logit_bias": ({},),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Parameters that need what the engine cannot do -> values that ask for nothing (null is always one)."""
COMPLETION_MAX_TOKENS = 16
"""What OpenAI's text completions take where a request does not say."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """What a stream tells besides its text."""

    include_usage: bool | None = None


def accepted(what: str) -> WrapValidator:
    """Return a validator that says once what a field accepts, not what each member of its union would have wanted."""

    def check(value: object, read: ValidatorFunctionWrapHandler) -> object:
        try:
            return read(value)
        except ValidationError:
            raise PydanticCustomError("accepted", "Input should be {what}", {"what": what}) from None

    return WrapValidator(check)


Stop = Annotated[str | list[str], accepted("a string or a list of strings")]
Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    accepted("a string, a list of strings, a list of token ids or a list of lists of token ids"),
]
ToolChoice = Annotated[str | dict[str, Any], accepted("a string or an object")]
Count = Annotated[int, Field(ge=1, le=1 << 20)]
Likeliest = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]


class GenerationBody(_Body):
    """What both kinds of completion understand."""

    prompt_field: ClassVar[str]
    """The field that the prompt is made of."""
    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    kedge: Any = None

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def longest(self) -> int | None:
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """Of how many of the likeliest tokens the log-probabilities are told, besides those of the answer's own; None:
        of none at all."""
        return None

    @property
    def likeliest_of_prompt(self) -> int | None:
        """The same for the tokens of the prompt."""
        return None

    @property
    def hints(self) -> dict[str, Any]:
        """The fields that may be hints."""
        extra = {name: value for name, value in (self.model_extra or {}).items() if name not in UNSUPPORTED}
        return extra if self.kedge is None else {**extra, "kedge": self.kedge}

    def refuse_unsupported(self) -> None:
        """Raises `RequestError` for a parameter that would have to change the answer and cannot, or for two that do not
        go together."""
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED and value is not None and not _asks_nothing(value, UNSUPPORTED[name]):
                raise RequestError(name, value, "this server does not support this parameter")

    def sampling(self, base: SamplingParams) -> SamplingParams:
        """`base`, with what the body says. Raises `RequestError` for stop strings that cannot be."""
        said = {
            "max_tokens": self.longest,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": None if self.stop is None else _stops(self.stop),
            "ignore_eos": self.ignore_eos,
        }
        changes: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        return replace(base, **changes)


class Function(_Body):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class CalledFunction(_Body):
    """A function that the model called."""

    name: str
    arguments: str = "{}"
    """JSON text of an object"""


class CalledTool(_Body):
    """A call that an earlier answer consisted of."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class TextPart(_Body):
    """A part of a message; text is the only kind that the engine reads."""

    type: Literal["text"]
    text: str


Content = Annotated[
    str | list[TextPart], accepted('a string or a list of text parts (objects with `type: "text"` and `text`)')
]


class ChatBody(GenerationBody):
    """A request to `/v1/chat/completions`."""

    messages: list[Message]
    prompt_field = "messages"
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tools_to_use(self) -> list[Tool]:
        """The tools that the model is told of: with `tool_choice: "none"` there are none, so that it calls none."""
        return [] if self.tool_choice == "none" else self.tools or []

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs", self.top_logprobs, "needs `logprobs: true`")
        if self.tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice", self.tool_choice, "neither `none` nor `auto`: nobody can be made to call")


class CompletionBody(GenerationBody):
    """A request to `/v1/completions`: a text, token ids, or several of either."""

    prompt: Prompt
    prompt_field = "prompt"
    max_tokens: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    """0 with `echo`: the prompt comes back, with its log-probabilities if they are asked for."""
    echo: bool | None = None
    logprobs: Likeliest | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def likeliest_of_prompt(self) -> int | None:
        return self.logprobs if self.echo else None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens", 0, "must be at least 1, unless the prompt is echoed")

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more prompts. Raises `RequestError` where there is none."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise RequestError("prompt", prompt, "there is none")
        if isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        return [one for one in prompt if not isinstance(one, int)]


def _asks_nothing(value: object, neutral: Iterable[object]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _stops(stop: str | list[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise RequestError("stop", len(stops), f"at most {MAX_STOPS} stop strings are allowed")
    if not all(stops):
        raise RequestError("stop", stops, "an empty string stops everything")
    return stops


def receipt(completion: Completion) -> dict[str, Any]:
    """Where the prompt's tokens came from. Ids of the engine stay out: their numbers would tell of other tenants."""
    said = completion.receipt
    return {
        "mode": said.mode,
        "tokens": {source.value: said.tokens(source) for source in Source},
        "preassembled": said.preassembled,
        "misses": [{"segment": miss.segment, "reason": miss.reason} for miss in said.misses],
        "parts_ms": dict(said.parts_ms),
        "ttft_ms": completion.ttft_ms,
        "total_ms": completion.total_ms,
    }


def kedge_field(hints: Hints, completions: Sequence[Completion]) -> dict[str, Any]:
    """The field `kedge` of an answer and of a stream's last chunk: a receipt for each choice, and the hints."""
    return {"receipts": [receipt(completion) for completion in completions], "hints": hints.told()}


def usage(completions: Sequence[Completion], per_prompt: int) -> dict[str, Any]:
    """Tokens of a call. A prompt counts once for all of its `per_prompt` choices, as its first choice met the cache."""
    prompts = [completion.receipt for completion in completions[::per_prompt]]
    read = sum(said.prompt_tokens for said in prompts)
    written = sum(len(completion.tokens) for completion in completions)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(said.exact for said in prompts)},
    }


class RunBody(_Body):
    """A request to start a run of a registered workflow."""

    inputs: dict[str, str]
    reuse: RunReuse | None = None
    """A mode for all agents that have none of their own, or modes by agent, which win over everything."""
    stream: bool = False

    @property
    def mode(self) -> ReuseMode | None:
        return ReuseMode(self.reuse) if isinstance(self.reuse, str) else None

    @property
    def modes(self) -> dict[str, ReuseMode]:
        return {name: ReuseMode(mode) for name, mode in self.reuse.items()} if isinstance(self.reuse, dict) else {}


ReuseChoice = Literal["off", "exact", "translate"]
RunReuse = Annotated[
    ReuseChoice | dict[str, ReuseChoice],
    accepted("'off', 'exact' or 'translate', or an object with one of these for each agent that it names"),
]
