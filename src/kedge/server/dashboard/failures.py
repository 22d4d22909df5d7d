"""Refused and failed calls and runs of a tenant, with their reasons, as the dashboard shows them."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from kedge.server.failures import OVERLOADED, CallFailure, FailureKind

MAX_FAILURES = 40


@dataclass(slots=True)
class _Line:
    """Equal failures in a row; `newest` is the last of them."""

    newest: CallFailure
    at: float
    count: int = 1


@dataclass(slots=True)
class FailureLog:
    """Counts of all failures, and a line for each of the last `MAX_FAILURES` that differ."""

    counts: Counter[FailureKind] = field(default_factory=Counter)
    last_overload: float | None = None
    """When a call was refused for want of room, in seconds of the history's clock."""
    _lines: deque[_Line] = field(default_factory=lambda: deque(maxlen=MAX_FAILURES))

    def add(self, failure: CallFailure, now: float) -> None:
        """Record a failure."""
        self.counts[failure.kind] += 1
        if failure.code == OVERLOADED:
            self.last_overload = now
        if self._lines and self._lines[-1].newest.is_like(failure):
            line = self._lines[-1]
            line.newest, line.at, line.count = failure, now, line.count + 1
        else:
            self._lines.append(_Line(failure, now))

    def to_dict(self, now: float) -> dict[str, Any]:
        """Plain data for the page, newest first."""
        lines = [
            {**line.newest.to_dict(), "age_s": round(now - line.at, 1), "count": line.count}
            for line in reversed(self._lines)
        ]
        return {**{kind.value: self.counts[kind] for kind in FailureKind}, "list": lines}
