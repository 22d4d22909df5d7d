"""Answers of chat and text completions with their logprobs, whole and as stream chunks.

A `Format` writes one answer's envelope. Each choice has a writer, which turns the choice's deltas, in order, into
what is sent.
"""

from __future__ import annotations

import codecs
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kedge.engine.base import Tokenizer
from kedge.server.http import dumps, event
from kedge.server.openai.tool_calls import AnswerReader, ParsedText
from kedge.types import Completion, FinishReason, GenerateRequest, TokenDelta, TokenLogprob, Tokens

_IMPOSSIBLE = -9999.0
"""Stands for minus infinity, which JSON cannot express."""


def of_chat(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return the field `logprobs` of a chat's choice."""
    content = []
    for one in entries:
        top = [_token(tokenizer, token, logprob) for token, logprob in one.top]
        content.append({**_token(tokenizer, one.token, one.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token)
    return {"token": spelled.decode("utf-8", "replace"), "logprob": _number(logprob), "bytes": list(spelled)}


def _number(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)


class TextLogprobs:
    """Writer of the field `logprobs` of a text completion's choice.

    It writes piece by piece; text offsets continue from piece to piece. Special tokens are spelled out.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        """`offset`: position of the first token, in characters."""
        self._tokenizer, self._offset = tokenizer, offset
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, tokens: Tokens, entries: Sequence[TokenLogprob | None]) -> dict[str, list[Any]]:
        """Return the logprobs of the next tokens. An entry is None where a token has no logprob."""
        return {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": [entry and _number(entry.logprob) for entry in entries],
            "top_logprobs": [entry and self._top(entry) for entry in entries],
            "text_offset": [self._next_offset(token) for token in tokens],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Return logprobs by text, highest first, including the token itself. Of equal texts the highest counts."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(self._text(token), _number(logprob))
        return top

    def _text(self, token: int) -> str:
        spelled = self._tokenizer.token_bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:  # a part of a character; the format is OpenAI's
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def _next_offset(self, token: int) -> int:
        at = self._offset
        self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token)))
        return at


def spelled(tokenizer: Tokenizer, tokens: Tokens) -> str:
    """Return the text of a prompt's tokens, with special tokens spelled out."""
    return b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")


Choice = dict[str, Any]


@dataclass(frozen=True)
class Format(ABC):
    """Envelope of one answer."""

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
        """Return a whole answer."""
        return self._envelope(self.kind, choices, fields)

    def chunk(self, *choices: Choice, **fields: Any) -> dict[str, Any]:
        """Return a chunk of a stream."""
        return self._envelope(self.chunk_kind, list(choices), fields)

    def _envelope(self, kind: str, choices: list[Choice], fields: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **fields}

    @abstractmethod
    def writer(self, at: int, request: GenerateRequest) -> ChatWriter | TextWriter:
        """Return the writer of the choice with this number."""

    @abstractmethod
    def only_text(self, choice: Choice) -> str | None:
        """Return the text of a chunk's choice, or None if it contains anything else."""

    @abstractmethod
    def with_text(self, choice: Choice, text: str) -> Choice:
        """Return such a choice with another text."""


# chat -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatFormat(Format):
    """Format of `/v1/chat/completions`."""

    reader: Callable[[], AnswerReader] = AnswerReader
    """Makes the reader of a choice."""
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def writer(self, at: int, request: GenerateRequest) -> ChatWriter:
        return ChatWriter(at, request.logprobs is not None, self)

    def only_text(self, choice: Choice) -> str | None:
        is_plain = choice["delta"].keys() == {"content"} and not (choice["logprobs"] or choice["finish_reason"])
        return choice["delta"]["content"] if is_plain else None

    def with_text(self, choice: Choice, text: str) -> Choice:
        return {**choice, "delta": {"content": text}}


class ChatWriter:
    """Writer of a message, with the tool calls found in its text."""

    def __init__(self, at: int, has_logprobs: bool, form: ChatFormat) -> None:
        self._at, self._form, self._has_logprobs = at, form, has_logprobs
        self._reader, self._opened, self._calls = form.reader(), False, 0
        self._new_entries: list[TokenLogprob] = []

    def whole(self, completion: Completion) -> Choice:
        """Return the choice of a whole answer."""
        parsed = self._read(completion)
        content = parsed.content if parsed.content or not parsed.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if parsed.calls:
            message["tool_calls"] = [call.to_dict() for call in parsed.calls]
        entries = completion.logprobs[: len(completion.tokens)]
        logprobs = of_chat(self._form.tokenizer, entries) if self._has_logprobs else None
        return {"index": self._at, "message": message, "logprobs": logprobs, "finish_reason": self._reason(completion)}

    def chunks(self, delta: TokenDelta) -> list[Choice]:
        """Return what is sent of a stream's delta. With the completion, the last chunk ends the choice."""
        parsed = self._read(delta)
        self._new_entries += delta.logprobs[: len(delta.tokens)]
        out = [] if self._opened else [self._chunk({"role": "assistant", "content": ""})]
        self._opened = True
        if parsed.content:
            out.append(self._chunk({"content": parsed.content}, self._logprobs()))
        first = self._calls - len(parsed.calls)
        for number, call in enumerate(parsed.calls, first):
            out.append(self._chunk({"tool_calls": [{"index": number, **call.to_dict()}]}, self._logprobs()))
        if delta.completion:
            out.append({**self._chunk({}, self._logprobs()), "finish_reason": self._reason(delta.completion)})
        return out

    def _read(self, piece: TokenDelta | Completion) -> ParsedText:
        parsed = self._reader.push(piece)
        self._calls += len(parsed.calls)
        return parsed

    def _chunk(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> Choice:
        return {"index": self._at, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _reason(self, completion: Completion) -> str:
        has_called = self._calls and completion.finish_reason is FinishReason.STOP
        return "tool_calls" if has_called else completion.finish_reason

    def _logprobs(self) -> dict[str, Any] | None:
        """Return the logprobs since the last chunk, if any."""
        entries, self._new_entries = self._new_entries, []
        return of_chat(self._form.tokenizer, entries) if entries else None


# text -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompletionFormat(Format):
    """Format of `/v1/completions`."""

    echo: bool = False
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def writer(self, at: int, request: GenerateRequest) -> TextWriter:
        return TextWriter(at, self.tokenizer, request, echo=self.echo)

    def only_text(self, choice: Choice) -> str | None:
        return None if choice["logprobs"] or choice["finish_reason"] else choice["text"]

    def with_text(self, choice: Choice, text: str) -> Choice:
        return {**choice, "text": text}


class TextWriter:
    """Writer of a text, which begins with the prompt if that is echoed."""

    def __init__(self, at: int, tokenizer: Tokenizer, request: GenerateRequest, *, echo: bool) -> None:
        self._at, self._tokenizer, self._request = at, tokenizer, request
        self._prompt = spelled(tokenizer, request.tokens) if echo else ""
        self._unsent = self._prompt
        self._logprobs = TextLogprobs(tokenizer, len(self._prompt))
        self._new_entries: list[TokenLogprob] = []
        self._new_prompt_entries: tuple[TokenLogprob | None, ...] = ()

    def whole(self, completion: Completion) -> Choice:
        """Return the choice of a whole answer."""
        self._new_entries += completion.logprobs
        self._new_prompt_entries = completion.prompt_logprobs
        return self._choice(completion.text, completion.finish_reason)

    def chunks(self, delta: TokenDelta) -> list[Choice]:
        """Return what is sent of a stream's delta, as a chat's writer does."""
        self._new_entries += delta.logprobs
        self._new_prompt_entries += delta.prompt_logprobs
        text = [self._choice(delta.text)] if delta.text or self._unsent else []
        return text + ([self._choice("", delta.completion.finish_reason)] if delta.completion else [])

    def _choice(self, text: str, finish_reason: str | None = None) -> Choice:
        text, self._unsent = self._unsent + text, ""
        return {"index": self._at, "text": text, "logprobs": self._new_logprobs(), "finish_reason": finish_reason}

    def _new_logprobs(self) -> dict[str, list[Any]] | None:
        """Return the logprobs since the last chunk, if any."""
        prompt, answer = self._new_prompt_entries, self._new_entries
        self._new_prompt_entries, self._new_entries = (), []
        if not (prompt or answer):
            return None
        of_prompt = TextLogprobs(self._tokenizer).write(self._request.tokens if prompt else (), prompt)
        of_answer = self._logprobs.write(tuple(entry.token for entry in answer), answer)
        return {name: of_prompt[name] + of_answer[name] for name in of_prompt}


MARK = "\ue000kedge\ue000"
"""Placeholder for the text while the JSON around it is encoded; private-use characters, so that it is unique."""


class ChunkEncoder:
    """Encoder of one stream's chunks, which share additional fields."""

    def __init__(self, form: Format, **fields: Any) -> None:
        self._form, self._fields = form, fields
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, choice: Choice) -> bytes:
        """Return the server-sent event of a chunk with this choice."""
        text = self._form.only_text(choice)
        if text is None:
            return event(self._form.chunk(choice, **self._fields))
        around = self._around.get(choice["index"])
        if around is None:
            around = self._around[choice["index"]] = self._learn(choice)
        return around[0] + dumps(text) + around[1]

    def _learn(self, choice: Choice) -> tuple[bytes, bytes]:
        whole = event(self._form.chunk(self._form.with_text(choice, MARK), **self._fields))
        before, after = whole.split(dumps(MARK))
        return before, after
