"""Segments of the prompts of conversations, texts and token ids.

A chat template gets the real texts, since it may trim them or cut thoughts out of them. What clients wrote stays plain
text wherever the template puts it: a special token that is spelled out there does not end its turn.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from itertools import accumulate
from typing import Any, NamedTuple

from kedge.checks import brief, is_unicode, require_text
from kedge.engine.base import Tokenizer
from kedge.errors import EmptyPrompt, PromptTooLong, RequestError
from kedge.server.openai.protocol import CalledTool, ChatBody, ChatMessage
from kedge.server.openai.tool_calls import read_json
from kedge.types import Segment

TemplateData = dict[str, Any]
"""A message or a tool as chat templates read it."""


class Conversation(NamedTuple):
    """What a chat template renders."""

    messages: Sequence[TemplateData]
    tools: Sequence[TemplateData]
    options: Mapping[str, Any]
    """Variables of the template, by their names"""


def of_chat(tokenizer: Tokenizer, body: ChatBody) -> tuple[Segment, ...]:
    """Return the segments of a chat's prompt, `p0 message_0 p1 message_1 …`, without empty ones. Tools that the
    template cannot show are noted as left out.

    The tokens are those of the whole text. A message whose place in it cannot be found is no segment of its own. Raises
    `RequestError` for a conversation that the chat template refuses or loses messages of.
    """
    if not body.messages:
        raise RequestError("messages", [], "must have at least one message")
    if tokenizer.most is not None and len(body.messages) > tokenizer.most:  # each has a token, at least
        raise PromptTooLong.of("prompt_tokens", len(body.messages), tokenizer.most)
    inner: Any = getattr(tokenizer, "inner", None)
    own = () if inner is None else signature(inner.apply_chat_template).parameters.keys() - {"documents"}
    for name, value in (body.chat_template_kwargs or {}).items():
        if name in own:
            raise RequestError(f"chat_template_kwargs.{name}", brief(value), "is no variable of a chat template")
    tools = [one.model_dump(exclude_none=True) for one in body.tools_to_use]
    given = Conversation([_for_template(one) for one in body.messages], tools, body.template_options)
    texts, mark = as_plain(tokenizer.specials, given)
    whole, chat = _render(tokenizer, Conversation(*texts))
    if tools and not chat.tools:
        body.left_out.append("tools")
    places = _places(tokenizer, chat, whole)
    if body.continue_final_message:
        if (last := places.get(len(chat.messages) - 1)) is None:
            why = "the last message cannot be continued with this template"
            raise RequestError("messages", len(body.messages), why)
        whole = whole[: last[1]]
    ends: list[int] = []
    names = ["p0"]
    for at, (begin, end) in sorted(places.items(), key=lambda one: one[1]):
        if begin >= (ends[-1] if ends else 0):
            ends += [begin, end]
            names += [f"message_{at}", f"p{at + 1}"]
    pieces = tokenizer.encode_cut(whole, [*ends, len(whole)], mark)
    return tuple(Segment(tokens, name) for name, tokens in zip(names, pieces, strict=True) if tokens)


def as_plain(specials: Collection[str], data: Any) -> tuple[Any, str]:
    """Return data as a template may get it, and a character that is in none of its texts: it stands behind the first
    character of each special token that a client has spelled out.

    Halves of surrogate pairs are replaced: clients that cut texts leave them, and never lose them again. Raises
    `RequestError` for data that nests too deeply.
    """
    try:
        whole = json.dumps(data, ensure_ascii=False)
    except RecursionError:
        raise RequestError("messages", "…", "nests too deeply") from None
    mark = next((one for one in map(chr, range(0xE000, 0xF900)) if one not in whole), "\uf8ff")
    firsts, wholes = ("|".join(map(re.escape, names)) or "(?!)" for names in ({name[0] for name in specials}, specials))
    spelled = re.compile(f"(?={firsts})(?={wholes}).", re.IGNORECASE | re.DOTALL)  # by the first alone it is soon over

    def broken(text: str) -> str:
        return spelled.sub(lambda found: found[0] + mark, text)

    def plain(data: Any) -> Any:
        if isinstance(data, str):
            text = data if is_unicode(data) else data.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return broken(text)
        if isinstance(data, Mapping):
            return {plain(key): plain(value) for key, value in data.items()}
        return [plain(one) for one in data] if isinstance(data, list | tuple) else data

    return data if is_unicode(whole) and broken(whole) == whole else plain(data), mark


def _for_template(message: ChatMessage) -> TemplateData:
    """Return a message as chat templates read it."""
    data: TemplateData = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
    if message.tool_calls:
        data["tool_calls"] = [_call_for_template(call) for call in message.tool_calls]
    shown = {"name", "tool_call_id" if message.role == "tool" else "reasoning_content"}
    return data | message.model_dump(include=shown, exclude_none=True)


def _call_for_template(call: CalledTool) -> dict[str, Any]:
    """Return a call with its arguments as an object. What is none is its field `text`: a model may have written it, or
    been cut off.
    """
    given = call.function.arguments or None
    if isinstance(given, str):
        with suppress(ValueError):
            given = read_json(given)
    arguments = given if isinstance(given, dict) else {} if given is None else {"text": given}
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


# rendering ------------------------------------------------------------------------------------------------------------


def _places(tokenizer: Tokenizer, chat: Conversation, whole: str) -> dict[int, tuple[int, int]]:
    """Return where the content of each message is in the rendered text, without those whose place cannot be found.

    They are found with marks around the contents, if without the marks the text is the same. Raises `RequestError` if
    the template loses a message that is not the model's own.
    """
    texts = {at: one["content"] for at, one in enumerate(chat.messages) if one["content"].strip()}
    name = hashlib.sha256("\0".join(texts.values()).encode()).hexdigest()[:24]
    marked = list(chat.messages)
    for at, text in texts.items():
        core = text.strip()
        around = text.split(core, 1)  # what a template may trim
        marked[at] = {**marked[at], "content": f"{around[0]}<{name}:{at}>{core}</{name}:{at}>{around[1]}"}
    try:
        text, kept, at = _text(tokenizer, chat._replace(messages=marked)), "", 0
    except RequestError:  # of a template that looks into the contents
        return {}
    found: dict[tuple[int, str], list[int]] = {}
    for mark in re.finditer(rf"<(/?){name}:(\d+)>", text):
        kept += text[at : mark.start()]
        at = mark.end()
        found.setdefault((int(mark[2]), mark[1]), []).append(len(kept))
    if kept + text[at:] != whole:
        return {}
    for number in texts:
        is_lost = not (found.get((number, "")) or found.get((number, "/")))
        if is_lost and chat.messages[number]["role"] != "assistant":
            raise RequestError("messages", len(texts), "the model's chat template loses or repeats some of them")
    spans = {at: (found.get((at, ""), []), found.get((at, "/"), [])) for at in texts}
    return {at: (begin[0], end[0]) for at, (begin, end) in spans.items() if len(begin) == len(end) == 1}


def _render(tokenizer: Tokenizer, chat: Conversation) -> tuple[str, Conversation]:
    """Return the text of a conversation, with the form of it that the template takes."""
    refusal: RequestError | None = None
    for form in _forms(chat):
        silent = [{key: value for key, value in one.items() if key != "tool_calls"} for one in form.messages]
        try:
            rendered = _text(tokenizer, form)
            shows_tools = not form.tools or rendered != _text(tokenizer, form._replace(tools=()))
            has_calls = silent != form.messages
            if shows_tools and not (has_calls and rendered == _text(tokenizer, form._replace(messages=silent))):
                return rendered, form
        except RequestError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _forms(chat: Conversation) -> Iterator[Conversation]:
    """Yield a conversation as it is, and then in forms that templates take that refuse it: with one system message at
    the beginning and roles that take turns, without a system message, and with calls and their results as texts, at
    last without tools.
    """
    yield chat
    merged = _merged(chat.messages)
    yield chat._replace(messages=merged)
    as_user = [{**one, "role": "user"} if one["role"] == "system" else one for one in merged]
    yield chat._replace(messages=_merged(as_user))
    told = [_merged([_told(one) for one in messages]) for messages in (merged, as_user)]
    yield from (chat._replace(messages=messages) for messages in told)
    yield from (chat._replace(messages=messages, tools=()) for messages in told)


def _merged(messages: Sequence[TemplateData]) -> list[TemplateData]:
    """Return messages in which none but the first is the system's, and no two of one person follow each other."""
    groups: list[list[TemplateData]] = []
    for one in messages:
        before = groups[-1][-1] if groups else {"role": "system"}
        message = {**one, "role": "user"} if one["role"] == "system" != before["role"] else one
        if groups and message["role"] == before["role"] != "tool" and "tool_calls" not in before:
            groups[-1].append(message)
        else:
            groups.append([message])
    return [{**some[-1], "content": "\n\n".join(one["content"] for one in some if one["content"])} for some in groups]


def _told(message: TemplateData) -> TemplateData:
    """Return a message whose calls are texts, or which is the user's where it is a call's result."""
    calls = (json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ()))
    texts = [text for text in (message["content"], *calls) if text]
    return {"role": "user" if message["role"] == "tool" else message["role"], "content": "\n".join(texts)}


def _text(tokenizer: Tokenizer, chat: Conversation) -> str:
    """Return the text of a conversation, up to where the answer begins. Raises `RequestError` for a refused one."""
    roles, contents = [one["role"] for one in chat.messages], [one["content"] for one in chat.messages]
    inner = getattr(tokenizer, "inner", None)  # Transformers' own, where this is a wrapper of one
    if inner is None or inner.chat_template is None:
        if roles in (["user"], ["system", "user"]) and not chat.tools:
            return tokenizer.chat(contents[0] if len(roles) == 2 else None, contents[-1])
        raise RequestError("messages", roles, "must be user, or system and user: this model has no chat template")
    from jinja2 import TemplateError

    given = {"tools": list(chat.tools) or None, **chat.options}
    try:
        return str(inner.apply_chat_template(list(chat.messages), tokenize=False, **given))
    except (TemplateError, TypeError, ValueError, RecursionError) as error:  # raised by the template
        raise RequestError("messages", roles, f"the model's chat template refuses them: {error}") from error


def of_prompt(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> tuple[Segment, ...]:
    """Return the one segment of a text completion. Special tokens that a text spells out are recognised.

    Raises `EmptyPrompt` and `RequestError`.
    """
    if isinstance(prompt, str):
        require_text("prompt", prompt, may_be_empty=True)
        tokenizer.measure(prompt)
    tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
    if not tokens:
        raise EmptyPrompt("prompt", prompt, "has no tokens")
    return (Segment(tokens, "p0"),)


def tokens_up_to(segments: Sequence[Segment], name: str) -> int | None:
    """Return the number of tokens up to the end of the first segment of this name; None if there is none."""
    ends = zip(segments, accumulate(len(segment.tokens) for segment in segments), strict=True)
    return next((end for segment, end in ends if segment.name == name), None)
