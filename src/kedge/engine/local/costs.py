"""What computing and translating cost on this machine: measured at the start, updated with every pass.

The planner translates a segment where that is cheaper than computing it, and the scheduler shares a pass between
tenants by what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FORGET = 0.995
"""What an observation's weight is multiplied by at every later one"""
OUTLIER = 4.0
"""An observation of more than so many times what was expected counts as so many: something else used the machine."""
CERTAIN = 2.0
"""How much more a delay weighs that is certain than time that is spared if what is expected comes"""
REFIT = 8
"""Observations after which the coefficients are computed anew"""
RIDGE = 1e-6
"""Keeps the fit defined where observations are alike, in units of each feature's mean square."""
SETTLED_RIDGE = 3e-2
"""The same once the prior was measured. Passes under a steady load are nearly alike: what they do not tell apart stays
in the proportions of the measurement."""


class LinearCost:
    """Seconds as a linear function of a few counts, fitted to what was observed; recent observations weigh more.

    Coefficients are never negative. O(features²) an observation.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        """Start from `prior`, seconds for each feature."""
        self._prior: NDArray[np.float64] = np.array(prior, dtype=np.float64)
        self._ridge = RIDGE
        size = len(prior)
        self._squares = np.zeros((size, size))
        self._sums = np.zeros(size)
        self._seconds: NDArray[np.float64] = self._prior
        self._observed = 0

    def observe(self, counts: Sequence[float], seconds: float) -> None:
        """Take in that work of these counts took `seconds`."""
        row = np.array(counts, dtype=np.float64)
        if self._observed >= REFIT:
            seconds = min(seconds, OUTLIER * self.of(counts))
        self._squares = FORGET * self._squares + np.outer(row, row)
        self._sums = FORGET * self._sums + row * seconds
        self._observed += 1
        if self._observed < REFIT or self._observed % REFIT == 0:
            self._seconds = self._fit()

    def settle(self) -> None:
        """Take what was observed so far, by measuring on purpose, as the prior of all later fits."""
        self._prior = self._seconds = self._fit()
        self._ridge = SETTLED_RIDGE

    def of(self, counts: Sequence[float]) -> float:
        """Return the seconds that work of these counts is expected to take."""
        return float(self._seconds @ np.array(counts, dtype=np.float64))

    @property
    def coefficients(self) -> list[float]:
        """Seconds for each feature."""
        seconds: list[float] = self._seconds.tolist()
        return seconds

    def _fit(self) -> NDArray[np.float64]:
        """Solve the ridge regression around the prior; a feature whose cost would be negative costs nothing."""
        ridge = np.diag(self._ridge * np.diag(self._squares) + 1e-12)
        left, right = self._squares + ridge, self._sums + ridge @ self._prior
        free = np.ones(len(right), dtype=bool)
        solution = np.zeros(len(right))
        while free.any():
            part = np.linalg.solve(left[np.ix_(free, free)], right[free])
            if (part >= 0).all():
                solution[free] = part
                break
            free[np.flatnonzero(free)[part < 0]] = False
        return solution


class EngineCosts:
    """What one engine's work costs. Called by its thread only."""

    def __init__(self, *, by_cost: bool = True) -> None:
        """With `by_cost=False` translation always pays: for measuring it, and for tests."""
        self._by_cost = by_cost
        self._passes = LinearCost((1e-2, 1e-4, 1e-4))
        self._translations = LinearCost((1e-3, 1e-6))

    def settle(self) -> None:
        """Take what was measured so far, all on purpose, as what later passes are compared with."""
        self._passes.settle()
        self._translations.settle()

    def observe_pass(self, tokens: int, sequences: int, seconds: float) -> None:
        """Take in that a forward pass over `tokens` tokens of so many sequences took `seconds`."""
        self._passes.observe((1.0, tokens, sequences), seconds)

    def observe_translation(self, segments: int, tokens: int, seconds: float) -> None:
        """Take in that matching, blending and writing `tokens` tokens of so many segments took `seconds`."""
        self._translations.observe((segments, tokens), seconds)

    def pass_seconds(self, tokens: int, sequences: int) -> float:
        """Return what a pass is expected to take."""
        return self._passes.of((1.0, tokens, sequences))

    def added_seconds(self, tokens: int, sequences: int) -> float:
        """Return what so many tokens of so many sequences add to a pass that takes place anyway."""
        return self._passes.of((0.0, tokens, sequences))

    def tokens_within(self, seconds: float, most: int) -> int:
        """Return how many tokens, of `most`, add no more than `seconds` to a pass."""
        per_token = self._passes.coefficients[1]
        if per_token * most <= seconds:
            return most
        return int(seconds / per_token) if seconds > 0 else 0

    def translation_pays(self, tokens: int, spared: float) -> bool:
        """Return whether translating a segment of `tokens` tokens, of which `spared` need not be computed then, is
        expected to take less time than computing all of it.
        """
        return not self._by_cost or self._translation_saves(tokens, spared) > 0

    def base_pays(self, base_tokens: int, tokens: int, spared: float, readers: float) -> bool:
        """Return whether a base prefill of `base_tokens` tokens takes less time than so many readers of its value save
        by it, each as in `translation_pays`.
        """
        saved = readers * self._translation_saves(tokens, spared)
        return not self._by_cost or saved > self.added_seconds(base_tokens, 1)

    def ahead_pays(self, tokens: int, running: int) -> bool:
        """Return whether to compute so many tokens before their request arrives, beside so many that run.

        It spares the one the time of its tokens, and costs each of the others that of a sequence more in the pass.
        """
        delay = running * self.added_seconds(0, 1)
        return not self._by_cost or self.added_seconds(tokens, 0) > CERTAIN * delay

    def _translation_saves(self, tokens: int, spared: float) -> float:
        return float(self._passes.coefficients[1] * spared - self._translations.of((1, tokens)))

    def stats(self) -> dict[str, float]:
        """Return milliseconds by kind of work."""
        once, token, sequence = (1e3 * seconds for seconds in self._passes.coefficients)
        segment, translated = (1e3 * seconds for seconds in self._translations.coefficients)
        return {
            "pass_ms": once,
            "pass_ms_per_token": token,
            "pass_ms_per_sequence": sequence,
            "translation_ms_per_segment": segment,
            "translation_ms_per_token": translated,
        }
