"""A guard on the session policy: it may rule the cache only while it does not lose to LRU.

Forecasts may be wrong, hints hostile, and sessions unlike those that were learned from. So both policies run side by
side on a sample of the blocks, and the cache follows LRU from when the session policy has lost a quarter of a point of
hit rate over the last accesses, until it is a point ahead again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from kedge.policies.sessions.links import Chain
from kedge.policies.sessions.shadow import LruShadow, StepShadow
from kedge.structures.bounded import BoundedDict

SAMPLE = 256
"""Blocks of the caches in miniature."""
WINDOW = 16
"""Capacities of accesses after which old ones count for a third."""
MAX_OWNERS = 4096
"""Owners whose last samples are kept; others' prompts are sampled anew."""
MAX_LOSS, MIN_GAIN = 0.0025, 0.01
"""Shares of the blocks accessed lately: so much may the session policy lose to LRU, and has it to win to rule again.
What the cache holds follows a change of policy slowly: the loss is noticed early, and the gain has to be clear."""
MIN_LOSS = 0.01
"""The least loss that counts, in capacities: of a few accesses a share says nothing."""


class Guard:
    """Watches whether sessions, or LRU, would have hit more lately."""

    def __init__(self, num_blocks: int) -> None:
        """Begin with the session policy, for a cache of `num_blocks` blocks."""
        self._every = max(1, num_blocks // SAMPLE)
        capacity = max(1, num_blocks // self._every)
        self._lru, self._steps = LruShadow(capacity), StepShadow(capacity)
        self._capacity, self._window = capacity, WINDOW * capacity
        self._lead = self._accessed = 0.0
        self._sampled: BoundedDict[Hashable, tuple[int, Hashable, list[Hashable]]] = BoundedDict(MAX_OWNERS)
        """Of the last prompt of each owner: its blocks, the last of them, and those in the sample"""
        self.trusted = True
        """Whether the session policy rules"""
        self.switches = 0

    @property
    def lead(self) -> float:
        """By how much of the tokens accessed lately the session policy hit more than LRU: from -1 to 1."""
        return self._lead / self._accessed if self._accessed else 0.0

    def access(self, owner: Hashable, chain: Chain) -> bool:
        """Let both take a prompt of `owner`. Returns whether the other policy rules from now on."""
        sample = self._sample(owner, chain)
        if not sample:
            return False
        kept = max(0.0, 1 - len(sample) / self._window)
        lead = self._steps.access(owner, sample) - self._lru.access(sample)
        self._lead = kept * self._lead + lead
        self._accessed = kept * self._accessed + len(sample)
        return self._decide()

    def own(self, owner: Hashable, chain: Chain) -> None:
        """Let `owner` need `chain` at its step: the fixed prompt of an agent, or a history that has grown."""
        self._steps.own(owner, self._sample(owner, chain))

    def on_steps(self, changes: Mapping[Any, tuple[float, float] | None]) -> None:
        """Take changed steps, with probabilities that are not used; None: nothing is expected of an owner any more."""
        for owner, next_run in changes.items():
            self._steps.move(owner, None if next_run is None else next_run[0])

    def _sample(self, owner: Hashable, chain: Chain) -> list[Hashable]:
        """Return the sampled blocks of a prompt. O(blocks that are not in the last prompt of the same owner)."""
        known = self._sampled.get(owner)
        blocks, end, sample = known if known and known[1] == _end(chain, known[0]) else (0, None, [])
        every = self._every
        sample = sample + [block for block in chain[blocks:] if not hash(block) % every]
        self._sampled[owner] = (len(chain), _end(chain, len(chain)), sample)
        return sample

    def _decide(self) -> bool:
        if self.trusted:
            trusted = self._lead >= -max(MAX_LOSS * self._accessed, MIN_LOSS * self._capacity)
        else:
            trusted = self._lead > max(MIN_GAIN * self._accessed, MIN_LOSS * self._capacity)
        changed, self.trusted = trusted != self.trusted, trusted
        self.switches += changed
        return changed


def _end(chain: Chain, blocks: int) -> Hashable:
    """Return the last of the first `blocks` blocks, which stands for all of them; None where there are fewer."""
    return chain[blocks - 1] if 0 < blocks <= len(chain) else None
