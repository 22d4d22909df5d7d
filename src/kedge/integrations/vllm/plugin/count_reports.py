"""When the plug-in's counters are sent to vLLM's server, which asks in every step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

BUSY_SECONDS = 0.2
"""Seconds between two looks at the counters while requests run"""


class CountReports:
    """Adds up what has been counted since the last report: a few times a second while requests run, and in every step
    once the last of them has ended, since an idle engine takes no more steps.
    """

    def __init__(self, totals: Callable[[], Mapping[str, int]], clock: Callable[[], float] = time.monotonic) -> None:
        """`totals` returns everything since the start; `clock` is in seconds."""
        self._totals, self._clock = totals, clock
        self._reported: Counter[str] = Counter()
        self._unfinished, self._due = 0, 0.0

    def began(self) -> None:
        """Take a new request."""
        self._unfinished += 1

    def ended(self) -> None:
        """Take the end of a request."""
        self._unfinished -= 1

    def take(self) -> dict[str, int]:
        """Return what was counted since the last report; nothing while the next one is not due."""
        now = self._clock()
        if self._unfinished and now < self._due:
            return {}
        self._due, totals = now + BUSY_SECONDS, Counter(self._totals())
        news, self._reported = totals - self._reported, totals
        return dict(news)
