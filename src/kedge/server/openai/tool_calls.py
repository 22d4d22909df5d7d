"""Parsers of tool calls in a model's answers.

The server's settings name the format of the model; nothing is guessed. Text that only resembles a call stays text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kedge.settings.server import ToolCallFormat


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


class ToolParser(Protocol):
    """Parser of one answer, which comes in pieces that may be cut anywhere."""

    def push(self, text: str, *, last: bool = False) -> ParsedText:
        """Take the next piece and return what is certain now; after the last piece, everything left."""


class PlainText:
    """Parser that finds no calls."""

    def push(self, text: str, *, last: bool = False) -> ParsedText:  # noqa: ARG002 (nothing is ever held back)
        return ParsedText(text)


class Hermes:
    """Parser of `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, which may occur several times (Hermes, Qwen).

    White space before a call and after the last one is dropped.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held, self._ends_in_call = "", False

    def push(self, text: str, *, last: bool = False) -> ParsedText:
        self._held += text
        content, calls = "", []
        while self.OPEN in self._held:
            before, _, rest = self._held.partition(self.OPEN)
            body, close, after = rest.partition(self.CLOSE)
            if not (close or last):
                break
            if call := _call(_parsed(body), "arguments"):
                calls.append(call)
            content += before.rstrip() if call else before + self.OPEN + body + close
            self._held, self._ends_in_call = after, bool(call)
        return ParsedText(content + self._release(last), tuple(calls))

    def _release(self, last: bool) -> str:
        size = len(self._held) if last else self._certain()
        out, self._held = self._held[:size], self._held[size:]
        self._ends_in_call = self._ends_in_call and not out.strip()
        return "" if self._ends_in_call else out

    def _certain(self) -> int:
        """Return how many leading characters cannot belong to a call or to the white space before it."""
        at = self._held.find(self.OPEN)
        if at < 0:
            begun = (size for size in range(len(self.OPEN) - 1, 0, -1) if self._held.endswith(self.OPEN[:size]))
            at = len(self._held) - next(begun, 0)
        return len(self._held[:at].rstrip())


class Llama3Json:
    """Parser of answers that are `{"name": …, "parameters": {…}}`, or several of them with semicolons (Llama 3)."""

    def __init__(self) -> None:
        self._held, self._is_text = "", False

    def push(self, text: str, *, last: bool = False) -> ParsedText:
        self._held += text
        begin = self._held.lstrip()[:1]
        self._is_text = self._is_text or begin not in ("", "{")
        if not (self._is_text or last):
            return ParsedText()
        calls = () if self._is_text else _calls(self._held)
        content, self._held = "" if calls else self._held, ""
        return ParsedText(content, calls)


PARSERS: Mapping[ToolCallFormat, Callable[[], ToolParser]] = {"hermes": Hermes, "llama3_json": Llama3Json}
"""Parsers by the format that the settings name. The names are vLLM's."""


TOOL_MARKS: Mapping[ToolCallFormat, str] = {"hermes": Hermes.OPEN, "llama3_json": '{"name"'}
"""Text that an answer with a call has in it, by format."""


def parser_of(name: ToolCallFormat | None) -> Callable[[], ToolParser]:
    """Return what makes a parser of this format; without a format, one that finds no calls."""
    return PARSERS[name] if name else PlainText


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raises `ValueError` if it is invalid, nests too deeply or has NaN."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nests too deeply") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _parsed(text: str) -> Any:
    """Return the value of a JSON text, or None if it is invalid."""
    try:
        return read_json(text)
    except ValueError:
        return None


def _call(data: Any, key: str) -> ToolCall | None:
    """Return the call that `data` describes, with its arguments under `key`; None if it describes no call."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not data["name"]:
        return None
    arguments = data.get(key, {})
    if not isinstance(arguments, dict):
        return None
    try:
        return ToolCall(data["name"], json.dumps(arguments, ensure_ascii=False))
    except RecursionError:
        return None


def _calls(text: str) -> tuple[ToolCall, ...]:
    """Return the calls that a text consists of; none if it contains anything else."""
    calls: list[ToolCall] = []
    rest = text.strip()
    while rest:
        try:
            data, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return ()
        call = _call(data, "parameters")
        if call is None:
            return ()
        calls.append(call)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return tuple(calls)
