"""Segments of the prompts of conversations, texts and token ids.

Contents of messages are tokenized as plain text: a special token that is spelled out in one does not end its turn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

from kedge.checks import require_text
from kedge.engine.base import Tokenizer
from kedge.errors import EmptyPrompt, RequestError
from kedge.server.openai.protocol import CalledTool, ChatMessage, Tool
from kedge.server.openai.tool_calls import read_json
from kedge.types import Segment

TemplateData = dict[str, Any]
"""A message or a tool as chat templates read it."""


@runtime_checkable
class HasChatTemplate(Protocol):
    """Wrapper of a Transformers tokenizer, whose chat template renders conversations of any length."""

    @property
    def inner(self) -> Any: ...


def of_conversation(
    tokenizer: Tokenizer, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()
) -> tuple[Segment, ...]:
    """Return the segments of a chat: `p0 message_0 p1 message_1 …`, without empty ones.

    Raises `RequestError` for a conversation that the chat template refuses or shortens, and for tools that it ignores.
    """
    if not messages:
        raise RequestError("messages", [], "must have at least one message")
    texts = {at: one.text for at, one in enumerate(messages) if one.text or not one.tool_calls}
    for text in texts.values():
        require_text("messages", text, may_be_empty=True)
    mark = hashlib.sha256("\0".join(texts.values()).encode()).hexdigest()[:24]
    rendered = [_for_template(one, f"<{mark}:{at}>" if at in texts else "") for at, one in enumerate(messages)]
    offered = [tool.model_dump(exclude_none=True) for tool in tools]
    beside = [{key: value for key, value in one.items() if key not in ("role", "content")} for one in rendered]
    _refuse_specials(tokenizer, "messages", beside)
    _refuse_specials(tokenizer, "tools", offered)
    pieces = re.split(f"<{mark}:(\\d+)>", _render(tokenizer, rendered, offered))
    if [int(number) for number in pieces[1::2]] != list(texts):
        raise RequestError("messages", len(messages), "the model's chat template loses or repeats some of them")
    segments = [Segment(tokenizer.encode(pieces[0]), "p0")]
    for (at, text), after in zip(texts.items(), pieces[2::2], strict=True):
        content = tokenizer.encode(text, special=False) if text else ()
        segments.append(Segment(content, f"message_{at}"))
        segments.append(Segment(tokenizer.encode(after) if after else (), f"p{at + 1}"))
    return tuple(segment for segment in segments if segment.tokens)


def _for_template(message: ChatMessage, content: str) -> TemplateData:
    """Return a message as chat templates read it, with `content` for its text."""
    data: TemplateData = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.tool_calls:
        data["tool_calls"] = [_call_for_template(call) for call in message.tool_calls]
    if message.role == "tool":
        data |= message.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
    return data


def _call_for_template(call: CalledTool) -> dict[str, Any]:
    """Return a call with its arguments as an object. Raises `RequestError` if they are not a JSON object."""
    try:
        arguments = read_json(call.function.arguments)
    except ValueError as error:
        raise RequestError("messages", call.function.arguments[:80], f"arguments must be JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise RequestError("messages", call.function.arguments[:80], "arguments must be a JSON object")
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


def _refuse_specials(tokenizer: Tokenizer, key: str, data: Sequence[Mapping[str, Any]]) -> None:
    """Raise `RequestError` if a special token is spelled out in `data`.

    Unlike contents, this data becomes a part of the template's own text, in which special tokens are recognised.
    """
    if not any(data):
        return
    try:
        text = json.dumps(data, ensure_ascii=False)
    except RecursionError:
        raise RequestError(key, "…", "nests too deeply") from None
    require_text(key, text)
    if tokenizer.encode(text) != tokenizer.encode(text, special=False):
        raise RequestError(key, "…", "must not contain the name of a special token")


def _render(tokenizer: Tokenizer, messages: Sequence[TemplateData], tools: Sequence[TemplateData]) -> str:
    """Return the text of a conversation up to where the answer begins."""
    roles, contents = [one["role"] for one in messages], [one["content"] for one in messages]
    if roles in (["user"], ["system", "user"]) and not tools:
        return tokenizer.chat(contents[0] if len(roles) == 2 else None, contents[-1])
    rendered = _apply_template(tokenizer, messages, tools)
    if tools and rendered == _apply_template(tokenizer, messages, ()):
        raise RequestError("tools", len(tools), "the model's chat template ignores them")
    silent = [{key: value for key, value in one.items() if key != "tool_calls"} for one in messages]
    if silent != messages and rendered == _apply_template(tokenizer, silent, tools):
        raise RequestError("messages", len(messages), "the model's chat template ignores tool calls")
    return rendered


def _apply_template(tokenizer: Tokenizer, messages: Sequence[TemplateData], tools: Sequence[TemplateData]) -> str:
    roles = [one["role"] for one in messages]
    if not isinstance(tokenizer, HasChatTemplate) or tokenizer.inner.chat_template is None:
        raise RequestError("messages", roles, "must be user, or system and user: this model has no chat template")
    from jinja2 import TemplateError

    apply = tokenizer.inner.apply_chat_template
    try:
        return str(apply(list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError, ValueError, RecursionError) as error:  # raised by the template
        raise RequestError("messages", roles, f"the model's chat template refuses them: {error}") from error


def of_prompt(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> tuple[Segment, ...]:
    """Return the one segment of a text completion. Special tokens that a text spells out are recognised.

    Raises `EmptyPrompt` and `RequestError`.
    """
    if isinstance(prompt, str):
        require_text("prompt", prompt, may_be_empty=True)
    tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
    if not tokens:
        raise EmptyPrompt("prompt", prompt, "has no tokens")
    return (Segment(tokens, "p0"),)


def tokens_up_to(segments: Sequence[Segment], name: str) -> int | None:
    """Return the number of tokens up to the end of the first segment of this name; None if there is none."""
    ends = zip(segments, accumulate(len(segment.tokens) for segment in segments), strict=True)
    return next((end for segment, end in ends if segment.name == name), None)
