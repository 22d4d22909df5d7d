"""Prompts in segments: of a conversation, of a text, of token ids, of an agent whose placeholders are given.

What a client wrote is tokenized as plain text: a special token that is spelled out in it ends no turn.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

from kedge.engine.base import Tokenizer
from kedge.errors import RequestError
from kedge.server.protocol import Message
from kedge.types import SampleId, Segment, Tokens
from kedge.workflow.template import Placeholder, Value


@runtime_checkable
class HasChatTemplate(Protocol):
    """A tokenizer around one of Transformers', whose chat template renders conversations of any length."""

    @property
    def inner(self) -> Any: ...


def of_conversation(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[Segment, ...]:
    """The segments of a chat. Raises `RequestError` for a conversation that the chat template refuses or shortens."""
    if not messages:
        raise RequestError("messages", [], "there is none")
    texts = [_unicode("messages", message.text) for message in messages]
    mark = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]
    rendered = _render(tokenizer, [(message.role, f"<{mark}:{at}>") for at, message in enumerate(messages)])
    pieces = re.split(f"<{mark}:(\\d+)>", rendered)
    if [int(number) for number in pieces[1::2]] != list(range(len(messages))):
        raise RequestError("messages", len(messages), "the model's chat template loses or repeats some of them")
    return tuple(segment for segment in _segments(tokenizer, pieces[::2], texts) if segment.tokens)


def _segments(tokenizer: Tokenizer, around: Sequence[str], texts: Sequence[str]) -> list[Segment]:
    segments = [Segment(tokenizer.encode(around[0]), "p0")]
    for at, (text, after) in enumerate(zip(texts, around[1:], strict=True)):
        content = tokenizer.encode(text, special=False) if text else ()
        segments.append(Segment(content, f"message_{at}"))
        segments.append(Segment(tokenizer.encode(after) if after else (), f"p{at + 1}"))
    return segments


def _render(tokenizer: Tokenizer, messages: Sequence[tuple[str, str]]) -> str:
    """The text of a conversation up to where the answer begins."""
    roles = ["system" if role == "developer" else role for role, _ in messages]
    contents = [content for _, content in messages]
    if roles in (["user"], ["system", "user"]):
        return tokenizer.chat(contents[0] if len(roles) == 2 else None, contents[-1])
    if not isinstance(tokenizer, HasChatTemplate) or tokenizer.inner.chat_template is None:
        raise RequestError("messages", roles, "this model has no chat template: one user message, or system and user")
    from jinja2 import TemplateError

    said = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    try:
        return str(tokenizer.inner.apply_chat_template(said, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise RequestError("messages", roles, f"the model's chat template refuses them: {error}") from error


def of_prompt(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> tuple[Segment, ...]:
    """The one segment of a text completion. In a text, special tokens that are spelled out are recognised."""
    tokens = tokenizer.encode(_unicode("prompt", prompt)) if isinstance(prompt, str) else tuple(prompt)
    return (Segment(tokens, "p0"),)


def value_of(tokenizer: Tokenizer, placeholder: Placeholder, text: str) -> Value:
    """A placeholder's value as a client wrote it: a sample that is named by its tokens, so that it is one value."""
    tokens = tokenizer.encode(_unicode(f"kedge.bindings.{placeholder.name}", text), special=False) if text else ()
    return Value(tokens, SampleId(f"{placeholder.name}#{_digest(tokens)}"))


def tokens_up_to(segments: Sequence[Segment], name: str) -> int | None:
    """Tokens up to the end of the first segment of this name; None where there is none."""
    ends = zip(segments, accumulate(len(segment.tokens) for segment in segments), strict=True)
    return next((end for segment, end in ends if segment.name == name), None)


def require_known(bindings: Mapping[str, str], placeholders: Sequence[Placeholder]) -> None:
    """Raises `RequestError` for a value that nothing is filled with."""
    names = {placeholder.name for placeholder in placeholders}
    for name in bindings:
        if name not in names:
            raise RequestError("kedge.bindings", name, f"the agent reads only {', '.join(sorted(names)) or 'nothing'}")


def _digest(tokens: Tokens) -> str:
    return hashlib.blake2b(repr(tokens).encode(), digest_size=12).hexdigest()


def _unicode(key: str, text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise RequestError(key, text[:80], "has half of a surrogate pair")
    return text
