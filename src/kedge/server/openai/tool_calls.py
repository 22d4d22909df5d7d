"""Tool calls: parsers of the calls in a model's answers, and grammars for `response_format` and `tool_choice`.

The server's settings name the format of the model; nothing is guessed. Text that only resembles a call stays text.
"""

import json
import math
import re
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple
from urllib.parse import unquote

from kedge.checks import MAX_GRAMMAR, brief, require_text
from kedge.engine.base import Tokenizer
from kedge.errors import RequestError
from kedge.server.openai.protocol import ChatBody, Function, ResponseFormat
from kedge.settings.sections import ToolCallFormat
from kedge.types import FinishReason, TokenDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Function call that the model asks for."""

    name: str
    arguments: str
    """JSON text of an object."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")

    def to_dict(self) -> dict[str, Any]:
        """Return the call in the format of OpenAI's API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ParsedText(NamedTuple):
    """The part of an answer that is certain to be text, and the calls in it."""

    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class AnswerReader:
    """Reader of one answer, which comes in pieces that may be cut anywhere; all of it is text."""

    mark: ClassVar[str]
    """Text that begins a call, and that an answer with one has in it"""
    open: ClassVar[str] = ""
    """What follows it up to the name, where it is a mark that text has not; "" where it is JSON itself"""
    arguments: ClassVar[str]
    """Name of the field with the arguments"""
    close: ClassVar[str] = ""
    between: ClassVar[str]

    def __init__(self, max_calls: int | None = None) -> None:
        """Without `max_calls`, all calls count."""
        self._left, self._held, self._is_text, self._ends_in_call = max_calls, "", False, False

    def push(self, delta: TokenDelta) -> ParsedText:
        """Take the next piece and return what is certain now."""
        end = delta.completion
        is_cut = end is not None and end.finish_reason is FinishReason.LENGTH
        content, calls = self.read(delta.text, last=end is not None, cut=is_cut)
        calls = calls[: self._left]
        if self._left is not None:
            self._left -= len(calls)
        return ParsedText(content, calls)

    def read(self, text: str, *, last: bool = False, cut: bool = False) -> ParsedText:  # noqa: ARG002
        """Take the next piece and return what is certain now; after the last piece, everything left.

        What was `cut` off within a call is no text for anybody.
        """
        return ParsedText(text)


class Hermes(AnswerReader):
    """Parser of `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, which may occur several times (Hermes, Qwen).

    White space before a call and after the last one is dropped.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    mark, open, arguments, close, between = OPEN, '\n{"name"', "arguments", CLOSE, "\n"
    _at, _end, _is_quoted = 0, 0, False
    """Up to where the open call was looked at, where its first closing mark ends, and whether a string is open"""

    def read(self, text: str, *, last: bool = False, cut: bool = False) -> ParsedText:
        self._held += text
        content, calls, done = "", [], 0
        while (begin := self._held.find(self.OPEN, done)) >= 0 and (found := self._first(begin, last=last)):
            call, end = found
            calls += [call] if call else []
            is_dropped = call or (cut and not self._end)
            content += self._held[done:begin].rstrip() if is_dropped else self._held[done:end]
            done, self._at, self._end, self._is_quoted, self._ends_in_call = end, 0, 0, False, bool(call)
        size = len(self._held)
        if not last:  # what may belong to a call, or to the white space before it, is held back
            if begin < 0:
                begun = (many for many in range(len(self.OPEN) - 1, 0, -1) if self._held.endswith(self.OPEN[:many]))
                begin = size - next(begun, 0)
            size = done + len(self._held[done:begin].rstrip())
        out, self._held = self._held[done:size], self._held[size:]
        self._at, self._end = max(0, self._at - size), max(0, self._end - size)
        self._ends_in_call = self._ends_in_call and not out.strip()
        return ParsedText(content if self._ends_in_call else content + out, tuple(calls))

    def _first(self, begin: int, *, last: bool) -> tuple[ToolCall | None, int] | None:
        """Return the call that an opening mark begins, if it is one, and where it ends; None while more of it may come.

        A mark within a string is text. Outside, another opening mark shows that this is no call: so none is looked at
        beyond the second one, and a text of many takes time in proportion to its length.
        """
        begin += len(self.OPEN)
        for mark in _MARKS.finditer(self._held, max(begin, self._at)):
            self._at = mark.end()
            self._is_quoted ^= mark[0] == '"'
            self._end = self._end or (self._at if mark[0] == self.CLOSE else 0)
            if self._end and not self._is_quoted and mark[0] in (self.OPEN, self.CLOSE):
                call = self._read(self._held[begin : mark.start()]) if mark[0] == self.CLOSE else None
                return call, self._at if call else self._end
        self._at = max(self._at, len(self._held) - len(self.CLOSE) + 1)
        if not last:
            return None
        return (None, self._end) if self._end else (self._read(self._held[begin:]), len(self._held))

    @staticmethod
    def _read(text: str) -> ToolCall | None:
        try:
            return _call(read_json(text), Hermes.arguments)
        except (ValueError, RecursionError):
            return None


class Llama3Json(AnswerReader):
    """Parser of answers that are `{"name": …, "parameters": {…}}`, or several of them with semicolons (Llama 3)."""

    mark, arguments, between = '{"name"', "parameters", "; "

    def read(self, text: str, *, last: bool = False, cut: bool = False) -> ParsedText:
        self._held += text
        self._is_text = self._is_text or self._held.lstrip()[:1] not in ("", "{")
        if not (self._is_text or last):
            return ParsedText()
        calls = () if self._is_text else _calls(self._held)
        is_begun = cut and self._held.lstrip().startswith(self.mark)
        content, self._held = "" if calls or is_begun else self._held, ""
        return ParsedText(content, calls)


_MARKS = re.compile(rf'\\["\\]|"|{Hermes.OPEN}|{Hermes.CLOSE}')
PARSERS: Mapping[ToolCallFormat, type[AnswerReader]] = {"hermes": Hermes, "llama3_json": Llama3Json}
"""Readers by the format that the settings name. The names are vLLM's."""


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raises `ValueError` if it is invalid, nests too deeply or has NaN."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nests too deeply") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _call(data: Any, key: str) -> ToolCall:
    """Return the call that `data` describes, with its arguments under `key`. Raises `ValueError` if it is none."""
    match data:
        case {"name": str(name)} if name and isinstance(arguments := data.get(key, {}), dict):
            return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
    raise ValueError("is no call")


def _calls(text: str) -> tuple[ToolCall, ...]:
    """Return the calls that a text consists of; none if it contains anything else."""
    calls, rest = list[ToolCall](), text.strip()
    with suppress(ValueError, RecursionError):
        while rest:
            data, end = _DECODER.raw_decode(rest)
            calls.append(_call(data, Llama3Json.arguments))
            rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return () if rest else tuple(calls)


_text = partial(json.dumps, ensure_ascii=False)
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "lenient": True}
"""llguidance's options: white space is at most one blank after a comma or colon, and what cannot be kept is no error"""
_STRING, _TIMES = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"'), re.compile(r"{(\d+)")
UNKEPT = frozenset((
    "uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "dependentRequired", "dependentSchemas",
    "not", "if", "then", "else", "unevaluatedProperties", "unevaluatedItems",
))  # fmt: skip
"""Keywords of JSON schemas that no grammar keeps"""


def grammar_of(body: ChatBody, form: ToolCallFormat | None, tokenizer: Tokenizer) -> str:
    """Return the grammar that a chat's answer conforms to, "" where it is free, and note what it does not keep.

    Every tool's arguments are a rule of their own, so that references within its schema (`#/$defs/…`) hold. JSON is
    written in one line: where white space is free, a model may write nothing else until it runs out of tokens.
    `form` is how the model writes tool calls. Raises `RequestError` for a format or a choice that cannot be followed.
    """
    schema = None if body.must_call else _schema(body.response_format)
    functions = [one.function for one in body.tools_to_use if one.function and body.called in (None, one.function.name)]
    if free := schema is None and not body.must_call:
        if not (form and PARSERS[form].open and any(one.strict for one in functions)):
            return ""
        functions = [one if one.strict else Function(name=one.name) for one in functions]
    calls = list[str]()
    if form and functions:
        calls = _call_rules(functions, PARSERS[form], tokenizer, many=not body.has_one_call, free=free)
    body.left_out.extend(f"response_format.{name}" for name in unkept(schema))
    body.left_out.extend(f"tools.{name}" for one in functions for name in unkept(one.parameters))
    content = [] if schema is None else [f"content: {_json(schema, 'response_format.json_schema')}"]
    start = " | ".join(["content"] * len(content) + ["calls"] * bool(calls))
    return _joined(f"start: {start}", *content, *calls)


def _joined(*rules: str, most: int = 4096) -> str:
    """Return the grammar of some rules. Where a text may have more than `most` characters, as by `{4096}` in a pattern,
    tokens are not forced: for each, llguidance reads through all that is certain, in 0.2 ms for 1,000 characters.
    """
    whole = "\n".join(rules)
    texts = ((len(text), map(float, _TIMES.findall(text))) for text in _STRING.findall(whole))
    is_long = any(size * math.prod(many or 1 for many in times) > most for size, times in texts)
    return '%llguidance {"no_forcing": true}\n' + whole if is_long else whole


def unkept(schema: Any) -> Iterator[str]:
    """Yield the keywords of a schema that its grammar does not keep."""
    left = deque([(schema, False)])
    while left:
        part, has_names = left.popleft()
        if isinstance(part, list):
            left.extend((one, False) for one in part)
        for name, inner in part.items() if isinstance(part, dict) else ():
            if not has_names and name in UNKEPT:
                yield name
            elif has_names or name not in ("enum", "const", "default", "examples"):
                maps = ("properties", "patternProperties", "$defs", "definitions")
                left.append((inner, not has_names and name in maps))


def can_end(schema: Mapping[str, Any], most: int = 20_000) -> bool:
    """Return whether some text conforms to a schema and ends: not where it requires itself, by whatever way. A schema
    that takes more than `most` looks at its parts may end.
    """
    looks, known, found = iter(range(most)), dict[int, bool](), 0

    def ends(part: Any) -> bool:
        """Return whether a part is found to end; within itself it is not yet."""
        if not isinstance(part, Mapping) or "enum" in part or "const" in part:
            return True
        if id(part) in known or next(looks, None) is None:
            return known.get(id(part), True)
        known[id(part)] = False
        reference = part.get("$ref")
        if isinstance(reference, str) and not ends(_referred(reference, schema)):
            return False
        kinds = [part["type"]] if isinstance(part.get("type"), str) else _list(part, "type")
        named, others = part.get("properties"), part.get("additionalProperties")
        named = named if isinstance(named, Mapping) else {}
        items = [*_list(part, "prefixItems"), part.get("items")]
        needed = {
            "object": [named.get(name, others) for name in _list(part, "required") if isinstance(name, str)],
            "array": items[: part["minItems"] if isinstance(part.get("minItems"), int) else 0],
        }
        wholes = [[_list(part, "allOf")], *([[one] for one in _list(part, name)] for name in ("anyOf", "oneOf"))]
        wholes.append([needed.get(str(kind), []) for kind in kinds])
        is_fit = all(not ways or any(all(ends(one) for one in way) for way in ways) for ways in wholes)
        known[id(part)] = is_fit
        return is_fit

    try:
        while not ends(schema):
            known = {part: True for part, may_end in known.items() if may_end}
            if len(known) == found:
                return False
            found = len(known)  # what was looked at before them may end now
        return True
    except RecursionError:
        return True


def _referred(reference: str, root: Any) -> Any:
    """Return the part of a schema that a reference names; None for one that is not found."""
    found = root
    for name in unquote(reference).split("/")[1:]:
        if not isinstance(found, Mapping):
            return None
        found = found.get(name.replace("~1", "/").replace("~0", "~"))
    return found


def _list(part: Mapping[str, Any], name: str) -> list[Any]:
    return part[name] if isinstance(part.get(name), list) else []


def _arguments(function: Function) -> Mapping[str, Any]:
    """Return the schema of a function's arguments, which are an object whether it says so or not."""
    given = function.parameters or {}
    kind = given.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise RequestError("tools", brief(kind), "the `type` of their parameters must be object")
    return {**given, "type": "object"}


def _call_rules(
    functions: Sequence[Function], wording: type[AnswerReader], tokenizer: Tokenizer, *, many: bool, free: bool
) -> list[str]:
    """Return the rules of one call, or of `many`, of any of these functions. In a `free` answer there is text around
    them and there may be none, but in the text no mark of a call without the call.
    """

    def written(mark: str) -> str:
        """Return a mark, by its id where it is one token: llguidance takes that for a special one, which no text is."""
        tokens = tokenizer.encode(mark, inside=True)
        return f"<[{tokens[0]}]>" if len(tokens) == 1 else _text(mark)

    mark, between = written(wording.mark), _text(wording.between)
    if free and mark.startswith("<"):
        rules = [f"calls: (text {mark} call){'*' if many else '?'} text", f"text: {mark.replace('[', '[^')}*"]
    elif free:  # what is not nothing: other than `.*`, it may have special tokens and parts of characters
        rules = [f"calls: (marked call){'*' if many else '?'} ANY", f"marked[suffix={mark}]: ANY", r"ANY: ~/[^\s\S]/"]
    else:
        rules = [f"calls: marked call {f'({between} marked call)*' if many else ''}", f"marked: {mark}"]
    rules.append(f"call: {' | '.join(f'call_{at}' for at in range(len(functions)))}")
    ends = f"{_text('}' + chr(10))} {written(wording.close)}" if wording.close else _text("}")
    for at, function in enumerate(functions):
        begin = f'{wording.open}: {_text(function.name)}, "{wording.arguments}": '
        rules.append(f"call_{at}: {_text(begin)} arguments_{at} {ends}")
        rules.append(f"arguments_{at}: {_json(_arguments(function), 'tools')}")
    return rules


def _schema(wanted: ResponseFormat | None) -> Mapping[str, Any] | None:
    """Return the schema of the answer's text, None where it is free."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    key, given = "response_format.json_schema", wanted.json_schema
    if given is None:
        raise RequestError(key, given, "must be an object with a `schema`")
    if not isinstance(given.get("schema"), dict):
        raise RequestError(f"{key}.schema", given.get("schema"), "must be a JSON schema (an object)")
    return given["schema"]


def _json(schema: Mapping[str, Any], key: str) -> str:
    """Return the grammar of a schema. Raises `RequestError` naming `key` for one to which nothing conforms."""
    text = _text({**schema, "x-guidance": ONE_LINE})
    require_text(key, text)
    if len(text) <= MAX_GRAMMAR and not can_end(schema):  # a longer one is refused by the engine
        raise RequestError(key, brief(schema), "requires itself without an end")
    return f"%json {text}"
