"""Tool calls in what a model says, in the formats that models are trained to write them in.

Which format a model writes is the server's configuration: nothing is guessed from names. What looks like a call and is
none stays text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants to be called."""

    name: str
    arguments: str
    """JSON text of an object"""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")

    def as_json(self) -> dict[str, Any]:
        """As OpenAI's API tells it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Said(NamedTuple):
    """What became certain of an answer: text for the reader, and calls."""

    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolParser(Protocol):
    """Reads one answer, piece by piece, wherever the pieces are cut."""

    def push(self, text: str, *, last: bool = False) -> Said:
        """What became certain with `text`; with the last piece, all the rest."""


class PlainText:
    """No format: all is text."""

    def push(self, text: str, *, last: bool = False) -> Said:  # noqa: ARG002 (nothing is ever held back)
        return Said(text)


class Hermes:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere and several times: Hermes, Qwen.

    White space before a call belongs to it, and what is left after the last one.
    """

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held, self._ends_in_call = "", False

    def push(self, text: str, *, last: bool = False) -> Said:
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
        return Said(content + self._release(last), tuple(calls))

    def _release(self, last: bool) -> str:
        size = len(self._held) if last else self._certain()
        out, self._held = self._held[:size], self._held[size:]
        self._ends_in_call = self._ends_in_call and not out.strip()
        return "" if self._ends_in_call else out

    def _certain(self) -> int:
        """How many characters no call can begin in, nor the white space before it."""
        at = self._held.find(self.OPEN)
        if at < 0:
            begun = (size for size in range(len(self.OPEN) - 1, 0, -1) if self._held.endswith(self.OPEN[:size]))
            at = len(self._held) - next(begun, 0)
        return len(self._held[:at].rstrip())


class Llama3Json:
    """The whole answer is `{"name": …, "parameters": {…}}`, or several of them with semicolons between: Llama 3."""

    def __init__(self) -> None:
        self._held, self._is_text = "", False

    def push(self, text: str, *, last: bool = False) -> Said:
        self._held += text
        begin = self._held.lstrip()[:1]
        self._is_text = self._is_text or begin not in ("", "{")
        if not (self._is_text or last):
            return Said()
        calls = () if self._is_text else _calls(self._held)
        content, self._held = "" if calls else self._held, ""
        return Said(content, calls)


PARSERS: Mapping[str, Callable[[], ToolParser]] = {"hermes": Hermes, "llama3_json": Llama3Json}
"""By the name that a server is configured with. The names are vLLM's."""


def read_json(text: str) -> Any:
    """What a JSON text says. Raises `ValueError` where it is none, nests too deeply or has a number that is none."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nests too deeply") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _parsed(text: str) -> Any:
    """What a JSON text says, or None."""
    try:
        return read_json(text)
    except ValueError:
        return None


def _call(said: Any, key: str) -> ToolCall | None:
    """The call that an object is, with its arguments under `key`; None where it is none."""
    if not isinstance(said, dict) or not isinstance(said.get("name"), str) or not said["name"]:
        return None
    arguments = said.get(key, {})
    if not isinstance(arguments, dict):
        return None
    try:
        return ToolCall(said["name"], json.dumps(arguments, ensure_ascii=False))
    except RecursionError:
        return None


def _calls(text: str) -> tuple[ToolCall, ...]:
    """The calls that a text consists of; none where anything else is in it."""
    calls: list[ToolCall] = []
    rest = text.strip()
    while rest:
        try:
            said, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return ()
        call = _call(said, "parameters")
        if call is None:
            return ()
        calls.append(call)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return tuple(calls)
