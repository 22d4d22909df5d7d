"""Marks of `cache_control`, wherever they stand, say how long a session is kept."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.hints import IgnoredReason, read_hints

FIVE, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


def kept(body: dict[str, Any]) -> float | None:
    return read_hints(body, {})[0].keep_for


@pytest.mark.parametrize(
    "body",
    [
        {"cache_control": FIVE},
        {"system": [{"type": "text", "text": "x", "cache_control": FIVE}]},
        {"tools": [{"name": "x"}, {"name": "y", "cache_control": FIVE}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": FIVE}]}]},
        {"nvext": {"cache_control": {"type": "ephemeral", "ttl": "5m"}}},
        {"agent_hints": {"cache_ttl_ms": 300_000}},
        {"prompt_cache_retention": "in_memory"},
    ],
)
def test_a_mark_is_found_wherever_it_stands(body: dict[str, Any]) -> None:
    assert kept(body) == 300


def test_the_longest_counts() -> None:
    content = [{"type": "text", "text": "x", "cache_control": one} for one in (FIVE, HOUR, FIVE)]
    assert kept({"messages": [{"content": content}, {"content": "text"}, 3], "cache_control": FIVE}) == 3600
    assert kept({"prompt_cache_retention": "24h"}) == 3600, "no longer than is promised to anybody"


@pytest.mark.parametrize("mark", ["5m", {}, {"type": "forever"}, {"type": "ephemeral", "ttl": "1 day"}, [3]])
def test_a_mark_that_cannot_be_read_is_counted(mark: Any) -> None:
    hints, ignored = read_hints({"cache_control": mark}, {})
    assert hints.keep_for is None
    assert {key for key, count in ignored.items() if count} == {("anthropic", IgnoredReason.BAD_VALUE)}


def test_no_mark_is_no_hint() -> None:
    assert kept({"messages": [{"content": "x"}], "system": "y", "tools": None, "cache_control": None}) is None
