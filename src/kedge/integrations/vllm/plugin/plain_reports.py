"""When the report of plain traffic is sent to vLLM's server, whose pages show it."""

from __future__ import annotations

import time
from collections.abc import Callable

from kedge.discovery import PlainRequests

BUSY_SECONDS = 5.0
"""Seconds between two reports while requests run"""
IDLE_SECONDS, IDLE_SHARE = 1.0, 0.02
"""Seconds, at most, from a report to the one that is sent when the last running request has ended, and share of the
time that reports may take meanwhile
"""


class PlainReports:
    """Sends a report where anything has changed, at most every few seconds. Asked once per step of the engine.

    An idle engine takes no steps: what is not reported at the end of the last request is not on the page for as long as
    nobody asks. So the end of one is reported as soon as the last report is long enough ago for what a report takes.
    """

    def __init__(self, plain: PlainRequests, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with the first report due. `clock` is in seconds."""
        self._plain, self._clock = plain, clock
        self._sent_at, self._cost = float("-inf"), 0.0
        self._sent = (0, True)

    def take(self) -> dict[str, object] | None:
        """Return the report, None while it is not due."""
        now, state = self._clock(), (self._plain.totals.requests, self._plain.is_idle)
        wait = min(IDLE_SECONDS, self._cost / IDLE_SHARE) if self._plain.is_idle else BUSY_SECONDS
        if state == self._sent or now < self._sent_at + wait:
            return None
        report = self._plain.report()
        self._sent_at, self._sent = self._clock(), state
        self._cost = self._sent_at - now
        return report
