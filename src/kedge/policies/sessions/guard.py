"""A guard on the session policy: it may rule the cache only while it does not lose to LRU.

Forecasts may be wrong, hints hostile, and sessions unlike those that were learned from. So both policies run side by
side on a sample of the blocks, and the cache follows LRU from when the session policy has lost more than a point of hit
rate over the last accesses, until it is a point ahead again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from kedge.policies.sessions.links import Chain
from kedge.policies.sessions.shadow import LruShadow, StepShadow

SAMPLE = 256
"""Blocks of the caches in miniature."""
WINDOW = 16
"""Capacities of accesses after which old ones count for a third."""
MAX_LOSS = 0.01
"""Share of a window's tokens by which the session policy may fall behind LRU, and has to be ahead to rule again."""


class Guard:
    """Watches whether sessions, or LRU, would have hit more lately."""

    def __init__(self, num_blocks: int) -> None:
        """Begin with the session policy, for a cache of `num_blocks` blocks."""
        self._every = max(1, num_blocks // SAMPLE)
        capacity = max(1, num_blocks // self._every)
        self._lru, self._steps = LruShadow(capacity), StepShadow(capacity)
        self._window = WINDOW * capacity
        self._lead = self._accessed = 0.0
        self.trusted = True
        """Whether the session policy rules"""
        self.switches = 0

    @property
    def lead(self) -> float:
        """By how much of the tokens accessed lately the session policy hit more than LRU: from -1 to 1."""
        return self._lead / self._accessed if self._accessed else 0.0

    def access(self, owner: Hashable, chain: Chain) -> bool:
        """Let both take a prompt of `owner`. Returns whether the other policy rules from now on."""
        sample = self._sample(chain)
        if not sample:
            return False
        kept = max(0.0, 1 - len(sample) / self._window)
        lead = self._steps.access(owner, sample) - self._lru.access(sample)
        self._lead = kept * self._lead + lead
        self._accessed = kept * self._accessed + len(sample)
        return self._decide()

    def own(self, owner: Hashable, chain: Chain) -> None:
        """Let `owner` need `chain` at its step: the fixed prompt of an agent, or a history that has grown."""
        self._steps.own(owner, self._sample(chain))

    def on_steps(self, changes: Mapping[Any, tuple[float, float] | None]) -> None:
        """Take changed steps, with probabilities that are not used; None: nothing is expected of an owner any more."""
        for owner, next_run in changes.items():
            self._steps.move(owner, None if next_run is None else next_run[0])

    def _sample(self, chain: Chain) -> Chain:
        if self._every == 1 or not chain:
            return chain
        return chain[hash(chain[0]) % self._every :: self._every]

    def _decide(self) -> bool:
        margin = MAX_LOSS * self._window
        trusted = self._lead >= (-margin if self.trusted else margin)
        changed, self.trusted = trusted != self.trusted, trusted
        self.switches += changed
        return changed
