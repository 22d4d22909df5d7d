"""A cap on active runs under overload, when the contexts of the live sessions do not fit into the cache.

A prompt that has to be computed slows down all answers that are written beside it. Where one such prompt follows the
other, answers take so long that running requests hold the whole cache: no session finds its KV when it comes back, and
every turn computes a whole history. So under overload a cold prompt starts only while running requests hold a small
part of the cache. Prompts whose KV is cached start at any time, and where nothing runs, everything does.

Nothing is computed while a cold prompt waits for the answers of others. So it waits only where answers are short
against prompts, by the measured times of steps, and where most requests continue a session.
"""

from __future__ import annotations

import math

ACTIVE_SHARE = 0.25
"""Share of the cache that running requests may hold when another cold prompt starts."""
COLD = 0.5
"""Share of a prompt that has to be computed, from which on it is cold."""
RETURNING = 0.5
"""Share of requests that sessions come back with, from which on cold prompts are held back."""
WAIT_SHARE = 0.5
"""Most time to write an answer, over that of computing the prompt that waits for it."""
GROWTH = 1.02
"""Growth of a shortest time with every observation, so that it follows what changes."""
WEIGHT = 0.05
"""Share of a new answer in the mean length."""


class StepTimes:
    """What steps of an engine take at least: to decode, and to compute a token of a prompt. In seconds."""

    def __init__(self) -> None:
        self.decode = self.per_token = math.inf
        """A step of decodes alone; a prompt's token"""
        self.answer = 0.0
        """Mean tokens of an answer"""

    def step(self, tokens: int, requests: int, seconds: float) -> None:
        """Take a step that computed so many tokens of so many requests. Time in which nothing ran may be in it."""
        if tokens <= requests:
            self.decode = min(GROWTH * self.decode, seconds)
        else:
            self.per_token = min(GROWTH * self.per_token, seconds / tokens)

    @property
    def are_known(self) -> bool:
        """Whether steps of both kinds have been seen."""
        return math.isfinite(self.decode) and math.isfinite(self.per_token)

    def answered(self, tokens: int) -> None:
        """Take the length of an answer."""
        self.answer += (tokens - self.answer) * (WEIGHT if self.answer else 1.0)

    def wait_pays(self, tokens: int) -> bool:
        """Return whether answers take little time against computing `tokens` tokens; not before all is known."""
        if not self.are_known:
            return False
        return self.decode * self.answer <= WAIT_SHARE * self.per_token * tokens


def may_start(tokens: int, missing: float, running: int, capacity: int, returning: float, times: StepTimes) -> bool:
    """Return whether a prompt of `tokens` tokens may start beside running requests of `running` tokens, while the live
    contexts do not fit a cache of `capacity` tokens.

    A share `missing` of it has to be computed; with a share `returning` of all requests a session comes back.
    """
    if not running or missing < COLD or returning < RETURNING or not times.wait_pays(int(missing * tokens)):
        return True
    return running + tokens <= ACTIVE_SHARE * capacity
