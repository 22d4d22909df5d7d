"""Time for learning in a worker, and for base prefills: a share of passes, and none that a first token waits for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from kedge.engine.common.guarding.guarded_calls import GRACE
from kedge.policies.service import StepTimes
from kedge.reuse.costs import LEARNING_SHARE

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
    """The seconds that one rank may learn for."""

    def __init__(self, *, is_timed: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """Unless `is_timed` it is one piece a step: the clocks of several ranks differ. `clock` is in seconds."""
        self._is_timed, self._clock = is_timed, clock
        self._computed = self._credit = 0.0
        self._patience = Patience()

    def computes(self) -> None:
        """Note that a pass is over."""
        self._computed = self._clock()

    def spend(self, learn: Callable[[], bool], seconds: float, *, is_awaited: bool) -> None:
        """Learn piece after piece after a pass of so many seconds, within its share, until `learn` returns False. Later
        passes pay for what exceeds it, and of earlier ones counts what was held back.

        A step without a pass is for one piece: a request that arrives meanwhile does not wait for more. While a first
        token is computed or a verdict `is_awaited`, and in the step after, nothing is learned in most steps.
        """
        self._credit += LEARNING_SHARE * seconds
        if self._patience.holds_back(is_awaited=is_awaited):
            return
        if not self._is_timed or (not seconds and self._clock() - self._computed >= GRACE):
            learn()
        elif seconds:
            began = self._clock()
            while self._credit > 0 and learn():
                ended = self._clock()
                self._credit, began = self._credit - (ended - began), ended
            self._credit = min(self._credit, 0.0)


class BaseShare:
    """The tokens that base prefills may take of a step: within `LEARNING_SHARE` of its time."""

    def __init__(self, times: StepTimes, clock: Callable[[], float] = time.monotonic) -> None:
        """`times` is what steps take. `clock` returns seconds."""
        self._times, self._clock = times, clock
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
        if not self._times.are_known:
            return int(most * LEARNING_SHARE)
        own = self._times.decode / self._times.per_token + prefill
        return min(most, int(own * LEARNING_SHARE / (1 - LEARNING_SHARE)))
