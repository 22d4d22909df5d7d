"""Prompts in segments: of a conversation, of a text, of token ids, of an agent whose placeholders are given.

What a client wrote is tokenized as plain text: a special token that is spelled out in it ends no turn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

from kedge.engine.base import Tokenizer
from kedge.errors import EmptyPrompt, RequestError
from kedge.server.openai.protocol import CalledTool, Message, Tool
from kedge.server.openai.tool_calls import read_json
from kedge.types import SampleId, Segment, Tokens
from kedge.workflow.template import Placeholder, Value

Said = dict[str, Any]
"""A message, or a tool, as chat templates read it."""


@runtime_checkable
class HasChatTemplate(Protocol):
    """A tokenizer around one of Transformers', whose chat template renders conversations of any length."""

    @property
    def inner(self) -> Any: ...


def of_conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool] = ()
) -> tuple[Segment, ...]:
    """The segments of a chat. Raises `RequestError` for a conversation that the chat template refuses or shortens, and
    for tools that it does not tell of."""
    if not messages:
        raise RequestError("messages", [], "there is none")
    texts = {at: _unicode("messages", one.text) for at, one in enumerate(messages) if one.text or not one.tool_calls}
    mark = hashlib.sha256("\0".join(texts.values()).encode()).hexdigest()[:24]
    said = [_for_template(one, f"<{mark}:{at}>" if at in texts else "") for at, one in enumerate(messages)]
    offered = [tool.model_dump(exclude_none=True) for tool in tools]
    _refuse_specials(tokenizer, "messages", [_beside_content(one) for one in said])
    _refuse_specials(tokenizer, "tools", offered)
    pieces = re.split(f"<{mark}:(\\d+)>", _render(tokenizer, said, offered))
    if [int(number) for number in pieces[1::2]] != list(texts):
        raise RequestError("messages", len(messages), "the model's chat template loses or repeats some of them")
    return tuple(segment for segment in _segments(tokenizer, pieces[::2], texts) if segment.tokens)


def _segments(tokenizer: Tokenizer, around: Sequence[str], texts: Mapping[int, str]) -> list[Segment]:
    segments = [Segment(tokenizer.encode(around[0]), "p0")]
    for (at, text), after in zip(texts.items(), around[1:], strict=True):
        content = tokenizer.encode(text, special=False) if text else ()
        segments.append(Segment(content, f"message_{at}"))
        segments.append(Segment(tokenizer.encode(after) if after else (), f"p{at + 1}"))
    return segments


def _for_template(message: Message, content: str) -> Said:
    """A message as chat templates read it, with `content` for its text."""
    said: Said = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.tool_calls:
        said["tool_calls"] = [_call_for_template(call) for call in message.tool_calls]
    if message.role == "tool":
        said |= message.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
    return said


def _call_for_template(call: CalledTool) -> dict[str, Any]:
    """A call with its arguments as an object. Raises `RequestError` where they are none."""
    try:
        arguments = read_json(call.function.arguments)
    except ValueError as error:
        raise RequestError("messages", call.function.arguments[:80], f"arguments that are no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise RequestError("messages", call.function.arguments[:80], "arguments must be a JSON object")
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


def _beside_content(said: Said) -> Said:
    return {key: value for key, value in said.items() if key not in ("role", "content")}


def _refuse_specials(tokenizer: Tokenizer, key: str, data: Sequence[Mapping[str, Any]]) -> None:
    """What is told outside of contents becomes a part of the template's own text, where special tokens are recognised:
    raises `RequestError` where one is spelled out."""
    if not any(data):
        return
    try:
        text = _unicode(key, json.dumps(data, ensure_ascii=False))
    except RecursionError:
        raise RequestError(key, "…", "nests too deeply") from None
    if tokenizer.encode(text) != tokenizer.encode(text, special=False):
        raise RequestError(key, "…", "has the name of a special token in it")


def _render(tokenizer: Tokenizer, said: Sequence[Said], tools: Sequence[Said]) -> str:
    """The text of a conversation up to where the answer begins."""
    roles, contents = [one["role"] for one in said], [one["content"] for one in said]
    if roles in (["user"], ["system", "user"]) and not tools:
        return tokenizer.chat(contents[0] if len(roles) == 2 else None, contents[-1])
    rendered = _apply_template(tokenizer, said, tools)
    if tools and rendered == _apply_template(tokenizer, said, ()):
        raise RequestError("tools", len(tools), "the model's chat template does not tell of them")
    silent = [{key: value for key, value in one.items() if key != "tool_calls"} for one in said]
    if silent != said and rendered == _apply_template(tokenizer, silent, tools):
        raise RequestError("messages", len(said), "the model's chat template does not tell of tool calls")
    return rendered


def _apply_template(tokenizer: Tokenizer, said: Sequence[Said], tools: Sequence[Said]) -> str:
    roles = [one["role"] for one in said]
    if not isinstance(tokenizer, HasChatTemplate) or tokenizer.inner.chat_template is None:
        raise RequestError("messages", roles, "this model has no chat template: one user message, or system and user")
    from jinja2 import TemplateError

    apply = tokenizer.inner.apply_chat_template
    try:
        return str(apply(list(said), tools=list(tools) or None, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError, ValueError, RecursionError) as error:  # of the template, on what it is given
        raise RequestError("messages", roles, f"the model's chat template refuses them: {error}") from error


def of_prompt(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> tuple[Segment, ...]:
    """The one segment of a text completion. In a text, special tokens that are spelled out are recognised. Raises
    `EmptyPrompt` and `RequestError`."""
    tokens = tokenizer.encode(_unicode("prompt", prompt)) if isinstance(prompt, str) else tuple(prompt)
    if not tokens:
        raise EmptyPrompt("prompt", prompt, "has no tokens")
    return (Segment(tokens, "p0"),)


def value_of(tokenizer: Tokenizer, placeholder: Placeholder, text: str) -> Value:
    """A placeholder's value as a client wrote it: a sample that is named by its tokens, so that it is one value."""
    tokens = tokenizer.encode(_unicode(f"kedge.bindings.{placeholder.name}", text), special=False) if text else ()
    return Value(tokens, SampleId(placeholder.kind, placeholder.of, placeholder.turns_back, _digest(tokens)))


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
