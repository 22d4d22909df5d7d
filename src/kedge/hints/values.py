"""Parsers of the values of hints, for the server and the vLLM plug-in. They raise `ValueError` for a bad value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

Name = TypeVar("Name", bound=str)
MAX_NAME_LENGTH = 256
"""Characters of a name."""
MAX_HINT_AGENTS = 4096
"""Agents in one hint."""
MAX_EXPECTED = 64
"""Sessions in one hint."""
MAX_KEPT_SECONDS = 3600.0
"""Time for which KV is kept at a client's word, at most."""


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


def read_kept(value: Any) -> float:
    """Return a time for which KV is to be kept."""
    return min(read_seconds(value), MAX_KEPT_SECONDS)


def read_expected(value: Any) -> dict[str, float]:
    """Return sessions with the seconds until they are needed; null stands for never."""
    if not isinstance(value, dict) or len(value) > MAX_EXPECTED:
        raise ValueError
    return {read_text(name): math.inf if left is None else read_seconds(left) for name, left in value.items()}


def without_infinity(times: Mapping[Name, float]) -> dict[Name, float | None]:
    """Return times as JSON has them, with null in place of infinite ones."""
    return {name: value if math.isfinite(value) else None for name, value in times.items()}


def read_whole(value: Any) -> int:
    """Return a number of tokens or messages."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError
    return value
