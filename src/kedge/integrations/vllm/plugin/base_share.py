"""How much of a step base prefills may take: a share of its time beside requests, and little of a prefill's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from kedge.integrations.vllm.plugin.learning_budget import GRACE, PATIENCE
from kedge.policies.service import StepTimes

PIECE_S = 0.05
"""Seconds of a pass in an idle engine, for which a request that arrives meanwhile has to wait"""


class BaseShare:
    """The tokens that base prefills may take of a step.

    A first token does not wait for base KV that is for later requests, so steps with prefills are passed over; a few at
    a time, as under load there may be no others.
    """

    def __init__(self, share: float, times: StepTimes, clock: Callable[[], float] = time.monotonic) -> None:
        """`share` is the part of a step's time, `times` what steps take. `clock` returns seconds."""
        self._share, self._times, self._clock = share, times, clock
        self._passed, self._computed = 0, -math.inf

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
        if prefill and self._passed < PATIENCE:
            self._passed += 1
            return 0
        self._passed = 0
        if not self._times.are_known or self._share == 1:
            return int(most * self._share)
        own = self._times.decode / self._times.per_token + prefill
        return min(most, int(own * self._share / (1 - self._share)))
