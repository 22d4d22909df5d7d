"""Parsers of the values of hints, for the server and the vLLM plug-in. They raise `ValueError` for a bad value."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

Name = TypeVar("Name", bound=str)
MAX_NAME_LENGTH = 256
"""Characters of a name."""
MAX_HINT_AGENTS = 4096
"""Agents in one hint."""
MAX_EXPECTED = 64
"""Sessions in one hint, actions of a call that get an outcome, and ignored fields of a body that are named"""
MAX_KEPT_SECONDS = 3600.0
"""Time for which KV is kept at a client's word, at most."""


def read_text(value: Any) -> str:
    """Return a name, which is short and printable, so that it fits a log line."""
    if not isinstance(value, str) or len(value) > MAX_NAME_LENGTH or not value.isprintable():
        raise ValueError
    return value


def read_number(value: Any) -> float:
    """Return a finite number."""
    if type(value) not in (int, float) or not abs(value) < 2**63:
        raise ValueError
    return float(value)


def read_seconds(value: Any) -> float:
    """Return a time."""
    if (seconds := read_number(value)) < 0:
        raise ValueError
    return seconds


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


DEFAULT_TTL = "5m"
"""How long Anthropic keeps what is marked without a time, and OpenAI an idle prompt in memory, at least"""
UNITS = {"s": 1, "m": 60, "h": 3600}
TTL = re.compile(r"(\d{1,6})([smh])")


def cache_marks(body: Mapping[str, Any]) -> list[Any]:
    """Return the marks `cache_control` of a call's body, its tools, its system prompt and the blocks of its messages.

    A client asks with them that the KV up to there is kept (Anthropic's prompt caching). A session's KV is kept as a
    whole, so what counts is the longest time of all marks.
    """
    own = body.get("cache_control")
    blocks = (block for message in _objects(body.get("messages")) for block in _objects(message.get("content")))
    inner = (one.get("cache_control") for one in (*_objects(body.get("tools")), *_objects(body.get("system")), *blocks))
    marks = [*(own if isinstance(own, list) else [own]), *inner]
    return [mark for mark in marks if mark is not None]


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    return (one for one in value if isinstance(one, dict)) if isinstance(value, list) else iter(())


def kept_for(mark: Any) -> float:
    """Return the time of a mark, in seconds. Raises `ValueError` where it cannot be read."""
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral":
        raise ValueError
    return read_ttl(DEFAULT_TTL if mark.get("ttl") is None else mark["ttl"])


def read_ttl(value: Any) -> float:
    """Return a time to live, at most `MAX_KEPT_SECONDS`; it is a number of seconds, or a text such as "5m"."""
    if isinstance(value, str):
        found = TTL.fullmatch(value)
        if found is None:
            raise ValueError
        value = int(found[1]) * UNITS[found[2]]
    return min(read_seconds(value), MAX_KEPT_SECONDS)
