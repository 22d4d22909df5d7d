"""Timers of idle sessions end, however times are rounded."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.policies.sessions import SessionTracker, tracker
from kedge.policies.sessions.tracker import EDGES
from kedge.types import Namespace, TenantId

SPACE = Namespace(TenantId("tenant"))
TIMERS = 100
"""More than all timers that a single session needs."""


def timers_set(idle_since: float, now: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """Count the timers of a session that is looked at twice, up to a number that only an endless loop reaches."""
    count = 0

    def push(heap: list[Any], entry: Any) -> None:
        nonlocal count
        count += 1
        assert count < TIMERS, "timers are set for ever"
        heap.append(entry)
        heap.sort()

    sessions = SessionTracker()
    key = sessions.arrive(SPACE, [1], idle_since)
    with monkeypatch.context() as patched:
        patched.setattr(tracker, "heappush", push)
        sessions.answered(key, [1], idle_since)
        sessions.advance(now)
        sessions.advance(now)
    return count


def test_times_that_are_rounded_down() -> None:
    times = [(0.1 * at, edge) for at in range(200) for edge in EDGES[1:]]
    rounded = [(since, edge) for since, edge in times if (since + edge) - since < edge]
    assert rounded
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert max(timers_set(since, since + edge, monkeypatch) for since, edge in rounded) < TIMERS
