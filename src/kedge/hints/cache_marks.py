"""`cache_control`: marks in a conversation up to which a client asks that its KV is kept (Anthropic's prompt caching).

A session's KV is kept as a whole, so what counts is the longest time of all marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kedge.hints.values import MAX_KEPT_SECONDS, read_seconds

DEFAULT_TTL = "5m"
UNITS = {"s": 1, "m": 60, "h": 3600}
TTL = re.compile(r"(\d{1,6})([smh])")


def cache_marks(body: Mapping[str, Any]) -> list[Any]:
    """Return the marks of a call's body, its tools, its system prompt and the blocks of its messages."""
    own = body.get("cache_control")
    return [*(own if isinstance(own, list) else [own] if own is not None else []), *_marks_within(body)]


def _marks_within(body: Mapping[str, Any]) -> Iterator[Any]:
    blocks = (block for message in _objects(body.get("messages")) for block in _objects(message.get("content")))
    for one in (*_objects(body.get("tools")), *_objects(body.get("system")), *blocks):
        if (mark := one.get("cache_control")) is not None:
            yield mark


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    return (one for one in value if isinstance(one, dict)) if isinstance(value, list) else iter(())


def longest(marks: Sequence[Any]) -> float:
    """Return the longest time of some marks, in seconds. Raises `ValueError` where one cannot be read."""
    return max(map(kept_for, marks))


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
