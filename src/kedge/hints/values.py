"""Parsers of the values of hints, for the server and the vLLM plug-in. They raise `ValueError` for a bad value."""

from __future__ import annotations

from typing import Any

MAX_NAME_LENGTH = 256
"""Characters of a name."""
MAX_HINT_AGENTS = 4096
"""Agents in one hint."""


def read_text(value: Any) -> str:
    """Return a name, which is short and printable, so that it fits a log line."""
    if not isinstance(value, str) or len(value) > MAX_NAME_LENGTH or not value.isprintable():
        raise ValueError
    return value


def read_seconds(value: Any) -> float:
    """Return a time."""
    if type(value) not in (int, float) or not 0 <= value < 2**63:
        raise ValueError
    return float(value)


def read_whole(value: Any) -> int:
    """Return a number of tokens or messages."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError
    return value
