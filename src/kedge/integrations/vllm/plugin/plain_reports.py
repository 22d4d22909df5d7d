"""When the report of plain traffic is sent to vLLM's server, whose pages show it."""

from __future__ import annotations

import time
from collections.abc import Callable

from kedge.discovery import PlainRequests

BUSY_SECONDS = 5.0
"""Seconds between two reports while requests run"""
IDLE_SECONDS = 1.0
"""Seconds from a report to the one that is sent when the last running request has ended"""


class PlainReports:
    """Sends a report where anything has changed, at most every few seconds. Asked once per step of the engine.

    An idle engine takes no steps: without the report at the end of the last request, a page would show what was known
    up to five seconds before it for as long as nobody asks.
    """

    def __init__(self, plain: PlainRequests, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with the first report due. `clock` is in seconds."""
        self._plain, self._clock = plain, clock
        self._sent_at = float("-inf")
        self._sent = (0, True)

    def take(self) -> dict[str, object] | None:
        """Return the report, None while it is not due."""
        now, state = self._clock(), (self._plain.totals.requests, self._plain.is_idle)
        wait = IDLE_SECONDS if self._plain.is_idle else BUSY_SECONDS
        if state == self._sent or now < self._sent_at + wait:
            return None
        self._sent_at, self._sent = now, state
        return self._plain.report()
