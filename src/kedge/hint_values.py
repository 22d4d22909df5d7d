"""What the values of hints may be, wherever they come in. One that cannot be meant raises `ValueError`."""

from __future__ import annotations

from typing import Any

MAX_NAME_LENGTH = 256
"""Characters of a name."""
MAX_HINT_AGENTS = 4096
"""Agents that one hint may speak of."""


def read_text(value: Any) -> str:
    """A name: short, and fit for a line of a log."""
    if not isinstance(value, str) or len(value) > MAX_NAME_LENGTH or not value.isprintable():
        raise ValueError
    return value


def read_whole(value: Any) -> int:
    """A number of tokens or messages."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError
    return value
