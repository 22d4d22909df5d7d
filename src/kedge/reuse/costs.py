"""The costs of computing and translating on this machine: measured at the start, updated with every pass.

The planner translates a segment where that is much cheaper than computing it, and the scheduler shares a pass between
tenants by cost.
"""

from collections.abc import Sequence
from operator import mul

import numpy as np
from numpy.typing import NDArray

MAX_PENDING = 64
"""Pieces of work of one kind that may wait while nobody waits for them, a bound for memory: prompts to learn from, base
prefills, prompts prepared ahead, checks of the guard. Beyond it the oldest is dropped"""
PATIENCE = 8
"""Steps in a row in which something is held back for others: background work while somebody waits for a first token, a
request while there is no room for its lanes"""
LONGEST, REPEATS = 128, 3
"""Tokens of the longest piece of work that is measured on a CPU before any is given, and how often each is"""
LEARNING_SHARE = 0.5
"""Share of each pass that base prefills and learning may take while requests wait for their first token"""
GRACE = 0.02
"""Seconds without a pass after which an engine counts as idle: a workflow's next agent comes within milliseconds"""
FORGET = 0.995
"""Factor on an observation's weight at every later one."""
OUTLIER = 4.0
"""An observation counts as at most this many times the expected cost: more means that something else used the
machine.
"""
CERTAIN = 2.0
"""Weight of work that is certain, against time that it saves only if the expectation comes true."""
REFIT = 32
"""Observations between two fits of the coefficients; the first ones count at once"""
RIDGE = 1e-6
"""Ridge that keeps the fit defined if observations are alike, in units of each feature's mean square."""
SETTLED_RIDGE = 3e-2
"""Ridge once the prior was measured: passes under a steady load are nearly alike, so the measured proportions hold."""


class LinearCost:
    """A cost in seconds as a linear function of a few counts, fitted to observations; recent ones weigh more.

    Coefficients are never negative. O(features) per observation, and O(observations x features²) for a fit: every step
    of an engine is observed, so observations are added up only where coefficients are fitted.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        """Start from `prior`, in seconds per unit of each feature."""
        self._prior: NDArray[np.float64] = np.array(prior, dtype=np.float64)
        self._ridge = RIDGE
        size = len(prior)
        self._squares = np.zeros((size, size))
        self._sums = np.zeros(size)
        self.coefficients = list(map(float, prior))
        """Seconds for each feature"""
        self._observed = 0
        self._is_settled = False
        self._next_fit = 1
        self._recent: list[tuple[Sequence[float], float]] = []
        """Observations since the last fit"""

    def observe(self, counts: Sequence[float], seconds: float) -> None:
        """Record that work with these counts took `seconds`."""
        if self._observed >= REFIT or self._is_settled:
            seconds = min(seconds, OUTLIER * self.of(counts))
        self._recent.append((counts, seconds))
        self._observed += 1
        if self._observed >= self._next_fit:
            self.coefficients = self._fit()
            self._next_fit = self._observed + (1 if self._observed < REFIT else REFIT)

    def settle(self) -> None:
        """Use the observations so far, made by deliberate measurement, as the prior of all later fits."""
        if self._observed:
            self.coefficients = self._fit()
            self._prior = np.array(self.coefficients)
            self._ridge, self._is_settled = SETTLED_RIDGE, True

    def relax(self, rest: float = 0.9995) -> None:
        """Go a little towards the prior, until the next fit. For work that is observed only where its cost seems low:
        where it was slow for once, as on a busy machine, it would never be done again.
        """
        pairs = zip(self._prior.tolist(), self.coefficients, strict=True)
        self.coefficients = [one + rest * (now - one) for one, now in pairs]

    def of(self, counts: Sequence[float]) -> float:
        """Return the expected seconds of work with these counts."""
        return sum(map(mul, self.coefficients, counts))

    def _fit(self) -> list[float]:
        """Solve the ridge regression around the prior; negative coefficients become 0."""
        if self._recent:  # they are added to the sums, each with its weight
            rows = np.array([counts for counts, _ in self._recent], dtype=np.float64)
            seconds = np.array([seconds for _, seconds in self._recent])
            weighted = rows * FORGET ** np.arange(len(rows) - 1, -1, -1)[:, None]
            faded = FORGET ** len(rows)
            self._squares = faded * self._squares + weighted.T @ rows
            self._sums = faded * self._sums + seconds @ weighted
            self._recent.clear()
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
        fitted: list[float] = solution.tolist()
        return fitted


class EngineCosts:
    """The costs of one engine's work. Called by its thread only."""

    def __init__(self, *, by_cost: bool = True) -> None:
        """Start without observations. With `by_cost=False` translation always pays: for measurements and tests."""
        self.is_by_cost = by_cost
        """Whether what takes longer than computing is not to be done"""
        self._passes = LinearCost((1e-2, 1e-4, 1e-4))
        self._translations = LinearCost((1e-3, 1e-6))
        self._busy = self._waited = 0.0
        """Seconds in which passes ran, and between them in which the device waited; recent ones weigh more"""

    def settle(self) -> None:
        """Use the measurements so far as the reference for later passes."""
        self._passes.settle()
        self._translations.settle()

    def observe_pass(self, tokens: int, sequences: int, seconds: float, waited: float = 0.0) -> None:
        """Record that a forward pass over `tokens` tokens of `sequences` sequences took `seconds`, before which a
        device beside the host `waited` for it.
        """
        self._passes.observe((1.0, tokens, sequences), seconds)
        self._translations.relax()
        self._busy = FORGET * self._busy + seconds
        self._waited = FORGET * self._waited + (waited if waited < GRACE else 0.0)

    def observe_translation(self, segments: int, tokens: int, seconds: float) -> None:
        """Record that matching, blending and writing `tokens` tokens of `segments` segments took `seconds`."""
        self._translations.observe((segments, tokens), seconds)

    def pass_seconds(self, tokens: int, sequences: int) -> float:
        """Return the expected seconds of a pass."""
        return self._passes.of((1.0, tokens, sequences))

    def added_seconds(self, tokens: int, sequences: int) -> float:
        """Return the seconds that `tokens` tokens of `sequences` sequences add to a pass that takes place anyway."""
        return self._passes.of((0.0, tokens, sequences))

    def tokens_within(self, seconds: float, most: int) -> int:
        """Return how many tokens, up to `most`, add at most `seconds` to a pass."""
        per_token = self._passes.coefficients[1]
        if per_token * most <= seconds:
            return most
        return int(seconds / per_token) if seconds > 0 else 0

    def translation_pays(self, tokens: int, spared: float) -> bool:
        """Return whether translating a segment of `tokens` tokens, which saves computing `spared` of them, is expected
        to take much less time than computing all of it.
        """
        return not self.is_by_cost or self._translation_saves(tokens, spared) > 0

    def base_pays(self, base_tokens: int, tokens: int, readers: float) -> bool:
        """Return whether a base prefill of `base_tokens` tokens takes less time than it saves for `readers` readers of
        its value, which translate all of its `tokens`.
        """
        saved = readers * self._translation_saves(tokens, tokens)
        return not self.is_by_cost or saved > self.added_seconds(base_tokens, 1)

    def ahead_pays(self, tokens: int, running: int) -> bool:
        """Return whether to compute `tokens` tokens before their request arrives, beside `running` running requests.

        It takes the time of these tokens off its time to first token, and adds to each running request's pass the time
        of one more sequence.
        """
        delay = running * self.added_seconds(0, 1)
        return not self.is_by_cost or self.added_seconds(tokens, 0) > CERTAIN * delay

    def _translation_saves(self, tokens: int, spared: float) -> float:
        """Return the seconds that translating saves. It counts twice, also for what is learned for it. Where the device
        waits for the host, what it is spared is worth less: it would wait longer.
        """
        worth = self._busy / (self._busy + self._waited) if self._waited else 1.0
        return float(worth * self._passes.coefficients[1] * spared - CERTAIN * self._translations.of((1, tokens)))
