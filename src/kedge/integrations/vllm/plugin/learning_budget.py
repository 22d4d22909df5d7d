"""Time for learning in a worker: a share of passes, and none that a first token would have to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

MAX_CREDIT = 0.25
"""Most seconds of learning that passes may save up"""
PATIENCE = 8
"""Steps in a row in which nothing is learned since somebody waits for a first token; in the next one it is"""
GRACE = 0.02
"""Seconds of idleness before learning begins: the next agent of a workflow comes within milliseconds"""


class LearningBudget:
    """The seconds that one rank may learn for. Learning that takes longer is paid for by the passes that follow."""

    def __init__(self, share: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`share` is that of each pass's time; None is one piece a step, the same on all ranks, whose clocks differ.
        `clock` returns seconds.
        """
        self._share, self._clock = share, clock
        self._credit = self._began = self._computed = 0.0
        self._passed = 0

    def begin(self) -> None:
        """Note the time at which a step begins."""
        self._began = self._clock()

    def spend(self, learn: Callable[[bool], bool], *, idle: bool, is_awaited: bool, is_urgent: bool = False) -> None:
        """Learn piece after piece after a pass, within what passes have earned.

        An `idle` step, without a pass, is for one piece: a request that arrives meanwhile does not wait for more. While
        a first token is computed or a verdict `is_awaited`, nothing is learned in most steps, but for what requests
        wait for, if there is something of that (`is_urgent`). `learn(urgent_only)` returns False if none is left.
        """
        self.earn(idle=idle)
        self._passed = self._passed + 1 if is_awaited and self._passed < PATIENCE else 0
        if self._passed and not is_urgent:
            return
        one = partial(learn, self._passed > 0)
        if self._share is None or (idle and (is_urgent or self._clock() - self._computed >= GRACE)):
            one()
        elif not idle:
            self._spend(one)

    def earn(self, *, idle: bool) -> None:
        """Earn the share of a pass, of which an `idle` step has none."""
        if idle:
            return
        self._computed = self._clock()
        self._credit = min(self._credit + (self._share or 0.0) * (self._computed - self._began), MAX_CREDIT)

    def _spend(self, learn: Callable[[], bool]) -> None:
        began = self._clock()
        while self._credit > 0 and learn():
            ended = self._clock()
            self._credit, began = self._credit - (ended - began), ended
