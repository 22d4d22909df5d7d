"""Time for learning in a worker, of which every pass earns a share."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_CREDIT = 0.25
"""Most seconds of learning that passes may save up"""


class LearningBudget:
    """The seconds that one rank may learn for. Learning that takes longer is paid for by the passes that follow."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`share` is that of each pass's time; `clock` returns seconds."""
        self._share, self._clock = share, clock
        self._credit = self._began = 0.0

    def begin(self) -> None:
        """Note the time at which a step begins."""
        self._began = self._clock()

    def spend(self, learn: Callable[[], bool], *, idle: bool) -> None:
        """Learn piece after piece after a pass, within what passes have earned. `learn` returns False if none is left.

        An `idle` step, without a pass, is for one piece: a request that arrives meanwhile does not wait for more.
        """
        if idle:
            learn()
            return
        began = self._clock()
        self._credit = min(self._credit + self._share * (began - self._began), MAX_CREDIT)
        while self._credit > 0 and learn():
            ended = self._clock()
            self._credit, began = self._credit - (ended - began), ended
