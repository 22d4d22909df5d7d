"""Writers of answers: what comes of a call's generations, whole or as a stream's events, in the words of a dialect."""

import codecs
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kedge.engine.base import Tokenizer, spelled
from kedge.server.http import DONE, dumps, event, usage
from kedge.server.openai.protocol import AnyBody, ChatBody, CompletionBody
from kedge.server.openai.tool_calls import ParsedText
from kedge.server.service import Service
from kedge.types import Completion, FinishReason, GenerateRequest, TokenDelta, TokenLogprob

_IMPOSSIBLE = -9999.0
"""Stands for minus infinity, which JSON cannot express."""
Choice = dict[str, Any]
ParsedDelta = tuple[ParsedText, TokenDelta]
"""Text and calls that are certain now, and the step that they come from; of a whole answer it is one step"""


class AnswerWriter(ABC):
    """Writer of a call's answer, whole or as a stream's events."""

    body: AnyBody
    requests: Sequence[GenerateRequest]
    completions: Sequence[Completion | None]
    """The call that is answered, set once it has begun; completions come one by one"""
    last = b""
    """What ends a stream, also after an error"""

    def __init__(self, service: Service) -> None:
        self.model, self.tokenizer = service.model_name, service.engine.tokenizer

    def whole(self, pairs: Sequence[ParsedDelta]) -> dict[str, Any]:
        """Return a whole answer to a call, from the text and tool calls of each choice. For dialects of one choice: its
        events are written, and `ended` returns the answer that they add up to.
        """
        [(parsed, delta)] = pairs
        for _ in self.add(0, (parsed, delta), None):
            pass
        assert delta.completion
        return self.ended(delta.completion)

    def ended(self, completion: Completion) -> dict[str, Any]:
        """Return the answer of one choice whose events have been written."""
        raise NotImplementedError

    def begin(self) -> bytes:
        """Return the events before the first token."""
        return b""

    @abstractmethod
    def add(self, at: int, pair: ParsedDelta, kedge: Mapping[str, Any] | None) -> Iterable[bytes]:
        """Yield the events of a step of choice number `at`. With the last one of all comes the field `kedge`."""

    @abstractmethod
    def failed(self, body: Mapping[str, Any]) -> Iterable[bytes]:
        """Yield the events of an error that ends a stream; `body` is that of an answer with it."""


class CompletionsWriter(AnswerWriter):
    """Writer of chats and text completions, with any number of choices."""

    last = DONE

    def whole(self, pairs: Sequence[ParsedDelta]) -> dict[str, Any]:
        self.begin()
        choices = [choice.whole(*one) for choice, one in zip(self._choices, pairs, strict=True)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def begin(self) -> bytes:
        body, options = self.body, self.body.stream_options
        prefix, kind = ("chatcmpl", "chat.completion") if isinstance(body, ChatBody) else ("cmpl", "text_completion")
        name = f"{prefix}-{uuid.uuid4().hex}"
        self._head = {"id": name, "object": kind, "created": int(time.time()), "model": self.model}
        self._chunk = {**self._head, "object": f"{kind}.chunk" if isinstance(body, ChatBody) else kind}
        if options and options.include_usage:
            self._chunk["usage"] = None
        self._before = b"data: " + dumps(self._chunk)[:-1] + b',"choices":['
        self._choices: list[ChatChoice | TextChoice] = []
        for at, request in enumerate(self.requests):
            if isinstance(body, CompletionBody):
                self._choices.append(TextChoice(at, self.tokenizer, request, echo=bool(body.echo)))
            else:
                self._choices.append(ChatChoice(at, self.tokenizer, request))
        return b""

    def add(self, at: int, pair: ParsedDelta, kedge: Mapping[str, Any] | None) -> Iterable[bytes]:
        chunks, end = self._choices[at].chunks(*pair), b""
        if kedge is not None:
            more = {"usage": self._usage()} if "usage" in self._chunk else {}
            end = event({**self._chunk, "choices": [] if more else [chunks.pop()], **more, "kedge": kedge})
        return [*(self._before + dumps(one) + b"]}\n\n" for one in chunks), end]

    def failed(self, body: Mapping[str, Any]) -> Iterable[bytes]:
        yield event(body)

    def _usage(self) -> dict[str, Any]:
        return usage([one for one in self.completions if one], self.body.choices_per_prompt)


class ChatChoice:
    """Writer of a message, with the tool calls found in its text."""

    def __init__(self, at: int, tokenizer: Tokenizer, request: GenerateRequest) -> None:
        self._at, self._tokenizer, self._has_logprobs = at, tokenizer, request.logprobs is not None
        self._opened, self._calls = False, 0
        self._new_entries: list[TokenLogprob] = []

    def whole(self, parsed: ParsedText, delta: TokenDelta) -> Choice:
        """Return the choice of a whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.calls:
            self._calls, message["content"] = len(parsed.calls), parsed.content or None
            message["tool_calls"] = [call.to_dict() for call in parsed.calls]
        entries = delta.logprobs[: len(delta.tokens)]
        logprobs = chat_logprobs(self._tokenizer, entries) if self._has_logprobs else None
        return {"index": self._at, "message": message, "logprobs": logprobs, "finish_reason": self._reason(delta)}

    def chunks(self, parsed: ParsedText, delta: TokenDelta) -> list[Choice]:
        """Return what is sent of a stream's step. With the completion, the last chunk ends the choice."""
        self._new_entries += delta.logprobs[: len(delta.tokens)]
        out = [] if self._opened else [self._chunk({"role": "assistant", "content": ""})]
        self._opened = True
        if parsed.content:
            out.append(self._chunk({"content": parsed.content}, self._logprobs()))
        for call in parsed.calls:
            out.append(self._chunk({"tool_calls": [{"index": self._calls, **call.to_dict()}]}, self._logprobs()))
            self._calls += 1
        if delta.completion:
            out.append({**self._chunk({}, self._logprobs()), "finish_reason": self._reason(delta)})
        return out

    def _reason(self, delta: TokenDelta) -> str:
        assert delta.completion
        reason = delta.completion.finish_reason
        return "tool_calls" if self._calls and reason is FinishReason.STOP else reason

    def _chunk(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> Choice:
        return {"index": self._at, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self) -> dict[str, Any] | None:
        """Return the logprobs since the last chunk, if any."""
        entries, self._new_entries = self._new_entries, []
        return chat_logprobs(self._tokenizer, entries) if entries else None


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return the field `logprobs` of a chat's choice."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        spelled = tokenizer.token_bytes(token)
        number = max(logprob, _IMPOSSIBLE)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": number, "bytes": list(spelled)}

    content = [{**told(one.token, one.logprob), "top_logprobs": [told(*top) for top in one.top]} for one in entries]
    return {"content": content, "refusal": None}


class TextChoice:
    """Writer of a text, which begins with the prompt if that is echoed.

    It writes piece by piece; text offsets continue from piece to piece. In log-probabilities special tokens are spelled
    out.
    """

    def __init__(self, at: int, tokenizer: Tokenizer, request: GenerateRequest, *, echo: bool) -> None:
        self._at, self._tokenizer, self._request = at, tokenizer, request
        self._unsent = spelled(tokenizer, request.tokens) if echo else ""
        self._offset, self._utf8 = 0, codecs.getincrementaldecoder("utf-8")("replace")
        self._new: dict[str, list[Any]] = {}
        """Logprobs since the last chunk"""

    def whole(self, parsed: ParsedText, delta: TokenDelta) -> Choice:
        """Return the choice of a whole answer."""
        self._note(delta)
        return self._choice(parsed.content, delta)

    def chunks(self, parsed: ParsedText, delta: TokenDelta) -> list[Choice]:
        """Return what is sent of a stream's step, as a chat's does."""
        self._note(delta)
        text = [self._choice(parsed.content)] if parsed.content or self._unsent else []
        return text + ([self._choice("", delta)] if delta.completion else [])

    def _choice(self, text: str, end: TokenDelta | None = None) -> Choice:
        text, logprobs, self._unsent, self._new = self._unsent + text, self._new or None, "", {}
        reason = end and end.completion and end.completion.finish_reason
        return {"index": self._at, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _note(self, delta: TokenDelta) -> None:
        """Write the logprobs of a step. An entry is None where a token has no logprob."""
        prompt = self._request.tokens if delta.prompt_logprobs else ()
        tokens = [*prompt, *(one.token for one in delta.logprobs)]
        if entries := [*delta.prompt_logprobs, *delta.logprobs]:
            written: dict[str, list[Any]] = {
                "tokens": [self._text(token) for token in tokens],
                "token_logprobs": [entry and max(entry.logprob, _IMPOSSIBLE) for entry in entries],
                "top_logprobs": [entry and self._top(entry) for entry in entries],
                "text_offset": [self._next_offset(token) for token in tokens],
            }
            self._new = {name: self._new.get(name, []) + values for name, values in written.items()}

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Return logprobs by text, highest first, including the token itself. Of equal texts the highest counts."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(self._text(token), max(logprob, _IMPOSSIBLE))
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
