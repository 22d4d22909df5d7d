"""A guard on the session policy: it may rule the cache only while it does not lose to LRU.

Forecasts may be wrong, hints hostile, and sessions unlike those that were learned from. So both policies run side by
side on a sample of the blocks, and the cache follows LRU from when the session policy has lost a quarter of a point of
hit rate over the last accesses, until it is a point ahead again.

One block in k stands for k, in a cache of a k-th of the size. A block's hash says whether it is in the sample: so it is
in every prompt that has it, and prompts of any length are seen.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Any

from kedge.policies.eviction import NextRuns
from kedge.policies.sessions.turns import MAX_SESSIONS, Chain
from kedge.structures.bounded import BoundedDict
from kedge.structures.prefixes import cached_length


class StepShadow:
    """Blocks by the owners whose histories they are in: what has no owner goes first, then what is needed last."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._chains: dict[Hashable, list[Hashable]] = {}
        """What is cached of each owner's history"""
        self._steps: dict[Hashable, float] = {}
        self._owners: Counter[Hashable] = Counter()
        """Cached blocks -> number of their owners; those without are in `_free`"""
        self._free: OrderedDict[Hashable, None] = OrderedDict()

    def access(self, owner: Hashable, chain: Chain) -> int:
        """Return how many leading blocks of a prompt of `owner` are hits, and make all of it its history."""
        hits = cached_length(chain, self._owners)
        self._hold(owner, chain[: self._capacity])
        self._make_room(owner)
        return hits

    def own(self, owner: Hashable, chain: Chain) -> None:
        """Make what is cached of `chain` the history of `owner`."""
        self._hold(owner, chain[: cached_length(chain, self._owners)])

    def move(self, owner: Hashable, step: float | None) -> None:
        """Set the step of an owner; None: nothing is expected of it any more."""
        if step is None:
            self._steps.pop(owner, None)
            self._disown(owner)
        else:
            self._steps[owner] = step

    def _hold(self, owner: Hashable, blocks: Chain) -> None:
        for block in blocks:
            self._owners[block] += 1
            self._free.pop(block, None)
        self._disown(owner)
        if blocks:
            self._chains[owner] = list(blocks)

    def _disown(self, owner: Hashable) -> None:
        for block in reversed(self._chains.pop(owner, [])):
            self._owners[block] -= 1
            if not self._owners[block]:
                self._free[block] = None

    def _make_room(self, current: Hashable) -> None:
        """Drop blocks without an owner, then the ends of histories that are needed last, except `current`'s."""
        while len(self._owners) > self._capacity:
            if self._free:
                del self._owners[self._free.popitem(last=False)[0]]
                continue
            others = (owner for owner in self._chains if owner != current)
            last = max(others, key=lambda owner: self._steps.get(owner, math.inf))
            chain = self._chains[last]
            while chain and len(self._owners) > self._capacity:
                block = chain.pop()
                self._owners[block] -= 1
                if not self._owners[block]:
                    del self._owners[block]
            if not chain:
                del self._chains[last]


SAMPLE = 256
"""Blocks of the caches in miniature."""
WINDOW = 16
"""Capacities of accesses after which old ones count for a third."""
MAX_LOSS, CLEAR = 0.0025, 0.01
"""Shares of the blocks accessed lately: so much may the session policy lose to LRU, and has it to win to rule again.
What the cache holds follows a change of policy slowly: the loss is noticed early, and the gain has to be clear. Less
than `CLEAR` of the capacity never counts: of a few accesses a share says nothing."""


class Guard:
    """Watches whether sessions, or LRU, would have hit more lately."""

    def __init__(self, num_blocks: int) -> None:
        """Begin with the session policy, for a cache of `num_blocks` blocks."""
        self._every = max(1, num_blocks // SAMPLE)
        capacity = max(1, num_blocks // self._every)
        self._lru, self._steps = BoundedDict[Hashable, None](capacity), StepShadow(capacity)
        self._capacity, self._window = capacity, WINDOW * capacity
        self._lead = self._accessed = 0.0
        self._sampled: BoundedDict[Hashable, tuple[int, Hashable, list[Hashable]]] = BoundedDict(MAX_SESSIONS)
        """Of the last prompt of each owner: its blocks, the last of them, and those in the sample"""
        self.trusted = True
        """Whether the session policy rules"""

    def access(self, owner: Hashable, chain: Chain) -> bool:
        """Let both take a prompt of `owner`. Returns whether the other policy rules from now on."""
        sample = self._sample(owner, chain)
        kept = max(0.0, 1 - len(sample) / self._window)
        lead = self._steps.access(owner, sample) - cached_length(sample, self._lru)
        for block in reversed(sample):  # so that a prompt's end goes before its beginning
            self._lru[block] = None
        self._lead = kept * self._lead + lead
        self._accessed = kept * self._accessed + len(sample)
        if self.trusted:
            trusted = self._lead >= -max(MAX_LOSS * self._accessed, CLEAR * self._capacity)
        else:
            trusted = self._lead > max(CLEAR * self._accessed, CLEAR * self._capacity)
        changed, self.trusted = trusted != self.trusted, trusted
        return changed

    def own(self, owner: Hashable, chain: Chain) -> None:
        """Let `owner` need `chain` at its step: the fixed prompt of an agent, or a history that has grown."""
        self._steps.own(owner, self._sample(owner, chain))

    def on_steps(self, changes: NextRuns[Any]) -> None:
        """Take changed steps; their probabilities are not used."""
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


def _end(chain: Chain, blocks: int) -> Hashable:
    """Return the last of the first `blocks` blocks, which stands for all of them; None where there are fewer."""
    return chain[blocks - 1] if 0 < blocks <= len(chain) else None
