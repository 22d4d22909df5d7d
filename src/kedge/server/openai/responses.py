"""The objects that both kinds of completion are answered with, whole and in chunks.

A `Format` writes one answer's envelope. Each of its choices has a writer, which is given the choice's deltas in order
and answers what is to be sent of them; a whole answer is a single delta with everything.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kedge.engine.base import Tokenizer
from kedge.server.openai.logprobs import TextLogprobs, of_chat, spelled
from kedge.server.openai.tool_calls import PlainText, Said, ToolParser
from kedge.types import Completion, FinishReason, GenerateRequest, TokenDelta, TokenLogprob

Choice = dict[str, Any]


class Writer(ABC):
    """Writes one choice."""

    @abstractmethod
    def whole(self, completion: Completion) -> Choice:
        """The whole choice."""

    @abstractmethod
    def chunks(self, delta: TokenDelta) -> list[Choice]:
        """What is to be sent of a stream's delta; with the completion, the chunk that ends the choice is the last."""


@dataclass(frozen=True)
class Format(ABC):
    """One answer's envelope."""

    model: str
    tokenizer: Tokenizer
    id: str = field(init=False, default="")
    created: int = field(default_factory=lambda: int(time.time()))
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.prefix}-{uuid.uuid4().hex}")

    def whole(self, choices: list[Choice], **fields: Any) -> dict[str, Any]:
        """A whole answer."""
        return self._envelope(self.kind, choices, fields)

    def chunk(self, *choices: Choice, **fields: Any) -> dict[str, Any]:
        """A chunk of a stream."""
        return self._envelope(self.chunk_kind, list(choices), fields)

    def _envelope(self, kind: str, choices: list[Choice], fields: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **fields}

    @abstractmethod
    def writer(self, at: int, request: GenerateRequest) -> Writer:
        """The writer of the choice with this number."""

    @abstractmethod
    def only_text(self, choice: Choice) -> str | None:
        """Return the text of a chunk's choice that says nothing else; None where it says more."""

    @abstractmethod
    def with_text(self, choice: Choice, text: str) -> Choice:
        """Return such a choice with another text."""


# chat -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatFormat(Format):
    """Of `/v1/chat/completions`."""

    parser: Callable[[], ToolParser] = PlainText
    most_calls: int | None = None
    """Tool calls of a choice; None is no limit."""
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def writer(self, at: int, request: GenerateRequest) -> Writer:
        return ChatWriter(at, request.logprobs is not None, self)

    def only_text(self, choice: Choice) -> str | None:
        is_plain = choice["delta"].keys() == {"content"} and not (choice["logprobs"] or choice["finish_reason"])
        return choice["delta"]["content"] if is_plain else None

    def with_text(self, choice: Choice, text: str) -> Choice:
        return {**choice, "delta": {"content": text}}


class ChatWriter(Writer):
    """A message, with the tool calls that its text is found to be."""

    def __init__(self, at: int, tells_logprobs: bool, form: ChatFormat) -> None:
        self._at, self._form, self._tells = at, form, tells_logprobs
        self._parser, self._opened, self._calls = form.parser(), False, 0
        self._untold: list[TokenLogprob] = []

    def whole(self, completion: Completion) -> Choice:
        said = self._read(completion.text, last=True)
        content = said.content if said.content or not said.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if said.calls:
            message["tool_calls"] = [call.as_json() for call in said.calls]
        entries = completion.logprobs[: len(completion.tokens)]
        logprobs = of_chat(self._form.tokenizer, entries) if self._tells else None
        return {"index": self._at, "message": message, "logprobs": logprobs, "finish_reason": self._reason(completion)}

    def chunks(self, delta: TokenDelta) -> list[Choice]:
        said = self._read(delta.text, last=delta.completion is not None)
        self._untold += delta.logprobs[: len(delta.tokens)]
        out = [] if self._opened else [self._chunk({"role": "assistant", "content": ""})]
        self._opened = True
        if said.content:
            out.append(self._chunk({"content": said.content}, self._logprobs()))
        first = self._calls - len(said.calls)
        for number, call in enumerate(said.calls, first):
            out.append(self._chunk({"tool_calls": [{"index": number, **call.as_json()}]}, self._logprobs()))
        if delta.completion:
            out.append({**self._chunk({}, self._logprobs()), "finish_reason": self._reason(delta.completion)})
        return out

    def _read(self, text: str, *, last: bool) -> Said:
        content, calls = self._parser.push(text, last=last)
        left = None if self._form.most_calls is None else self._form.most_calls - self._calls
        calls = calls[:left]
        self._calls += len(calls)
        return Said(content, calls)

    def _chunk(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> Choice:
        return {"index": self._at, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _reason(self, completion: Completion) -> str:
        has_called = self._calls and completion.finish_reason is FinishReason.STOP
        return "tool_calls" if has_called else completion.finish_reason

    def _logprobs(self) -> dict[str, Any] | None:
        """What has come since the last chunk, if anything."""
        entries, self._untold = self._untold, []
        return of_chat(self._form.tokenizer, entries) if entries else None


# text -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompletionFormat(Format):
    """Of `/v1/completions`."""

    echo: bool = False
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def writer(self, at: int, request: GenerateRequest) -> Writer:
        return TextWriter(at, self.tokenizer, request, echo=self.echo)

    def only_text(self, choice: Choice) -> str | None:
        return None if choice["logprobs"] or choice["finish_reason"] else choice["text"]

    def with_text(self, choice: Choice, text: str) -> Choice:
        return {**choice, "text": text}


class TextWriter(Writer):
    """A text, after the prompt's where that is echoed."""

    def __init__(self, at: int, tokenizer: Tokenizer, request: GenerateRequest, *, echo: bool) -> None:
        self._at, self._tokenizer, self._request = at, tokenizer, request
        self._prompt = spelled(tokenizer, request.tokens) if echo else ""
        self._unsent = self._prompt
        self._logprobs = TextLogprobs(tokenizer, len(self._prompt))
        self._untold: list[TokenLogprob] = []
        self._untold_prompt: tuple[TokenLogprob | None, ...] = ()

    def whole(self, completion: Completion) -> Choice:
        self._untold += completion.logprobs
        self._untold_prompt = completion.prompt_logprobs
        return self._choice(completion.text, completion.finish_reason)

    def chunks(self, delta: TokenDelta) -> list[Choice]:
        self._untold += delta.logprobs
        self._untold_prompt += delta.prompt_logprobs
        said = [self._choice(delta.text)] if delta.text or self._unsent else []
        return said + ([self._choice("", delta.completion.finish_reason)] if delta.completion else [])

    def _choice(self, text: str, finish_reason: str | None = None) -> Choice:
        text, self._unsent = self._unsent + text, ""
        return {"index": self._at, "text": text, "logprobs": self._news(), "finish_reason": finish_reason}

    def _news(self) -> dict[str, list[Any]] | None:
        """What has come since the last chunk, if anything."""
        prompt, answer = self._untold_prompt, self._untold
        self._untold_prompt, self._untold = (), []
        if not (prompt or answer):
            return None
        of_prompt = TextLogprobs(self._tokenizer).write(self._request.tokens if prompt else (), prompt)
        of_answer = self._logprobs.write(tuple(entry.token for entry in answer), answer)
        return {name: of_prompt[name] + of_answer[name] for name in of_prompt}
