"""Time for learning in a worker, and for base prefills: a share of passes, and none that a first token waits for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from kedge.engine.common.guarding.guarded_calls import GRACE
from kedge.policies.service import StepTimes

MAX_CREDIT = 0.25
"""Most seconds of learning that passes may save up"""
PATIENCE = 8
"""Steps in a row in which nothing is learned since somebody waits for a first token; in the next one it is"""
PIECE_S = 0.05
"""Seconds of a pass in an idle engine, for which a request that arrives meanwhile has to wait"""


class Patience:
    """Holds background work back while somebody waits for a first token, and in the step after that, as with
    asynchronous scheduling the token is read once that has been started; but for every so many steps, as under load
    there may be no others.
    """

    def __init__(self) -> None:
        self._passed, self._was_awaited = 0, False

    def holds_back(self, *, is_awaited: bool) -> bool:
        """Return whether nothing is to be done beside this step."""
        hurries, self._was_awaited = is_awaited or self._was_awaited, is_awaited
        self._passed = self._passed + 1 if hurries and self._passed < PATIENCE else 0
        return self._passed > 0


class LearningBudget:
    """The seconds that one rank may learn for. Learning that takes longer is paid for by the passes that follow."""

    def __init__(self, share: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`share` is that of each pass's time; None is one piece a step, the same on all ranks, whose clocks differ.
        `clock` returns seconds.
        """
        self._share, self._clock = share, clock
        self._credit = self._began = self._computed = 0.0
        self._patience = Patience()

    def begin(self) -> None:
        """Note the time at which a step begins."""
        self._began = self._clock()

    def spend(self, learn: Callable[[], bool], *, idle: bool, is_awaited: bool) -> None:
        """Learn piece after piece after a pass, within what passes have earned, until `learn` returns False.

        An `idle` step, without a pass, is for one piece: a request that arrives meanwhile does not wait for more. While
        a first token is computed or a verdict `is_awaited`, and in the step after, nothing is learned in most steps.
        """
        self.earn(idle=idle)
        if self._patience.holds_back(is_awaited=is_awaited):
            return
        if self._share is None or (idle and self._clock() - self._computed >= GRACE):
            learn()
        elif not idle:
            began = self._clock()
            while self._credit > 0 and learn():
                ended = self._clock()
                self._credit, began = self._credit - (ended - began), ended

    def earn(self, *, idle: bool) -> None:
        """Earn the share of a pass, of which an `idle` step has none."""
        if idle:
            return
        self._computed = self._clock()
        self._credit = min(self._credit + (self._share or 0.0) * (self._computed - self._began), MAX_CREDIT)


class BaseShare:
    """The tokens that base prefills may take of a step."""

    def __init__(self, share: float, times: StepTimes, clock: Callable[[], float] = time.monotonic) -> None:
        """`share` is the part of a step's time, `times` what steps take. `clock` returns seconds."""
        self._share, self._times, self._clock = share, times, clock
        self._patience, self._computed = Patience(), -math.inf

    def computes(self) -> None:
        """Note that a step computes something for requests."""
        self._computed = self._clock()

    def idle(self, most: int) -> int:
        """Return the tokens for base prefills in a step without requests, at most `most`."""
        if self._clock() - self._computed < GRACE:
            return 0
        return min(most, max(1, int(PIECE_S / self._times.per_token))) if self._times.are_known else most

    def beside(self, prefill: int, most: int) -> int:
        """Return the tokens for base prefills in a step with so many tokens of prefills, at most `most`."""
        if self._patience.holds_back(is_awaited=prefill > 0):
            return 0
        if not self._times.are_known or self._share == 1:
            return int(most * self._share)
        own = self._times.decode / self._times.per_token + prefill
        return min(most, int(own * self._share / (1 - self._share)))
