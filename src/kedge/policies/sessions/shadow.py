"""Caches in miniature: what LRU and the session policy would have hit, on a sample of the blocks.

One block in k stands for k, in a cache of a k-th of the size. A block's hash says whether it is in the sample: so it is
in every prompt that has it, and prompts of any length are seen.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable
from operator import itemgetter

from kedge.policies.sessions.links import Chain


def leading(chain: Chain, cached: object) -> int:
    """Return how many leading blocks of `chain` are in `cached`."""
    count = 0
    for block in chain:
        if block not in cached:  # type: ignore[operator]
            break
        count += 1
    return count


class LruShadow:
    """Blocks by their last use; of one prompt the end goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()

    def access(self, chain: Chain) -> int:
        """Return how many leading blocks of a prompt are hits, and cache all of it."""
        hits = leading(chain, self._blocks)
        for block in reversed(chain[: self._capacity]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return hits


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

    def __len__(self) -> int:
        """Return the number of cached blocks."""
        return len(self._owners)

    def access(self, owner: Hashable, chain: Chain) -> int:
        """Return how many leading blocks of a prompt of `owner` are hits, and make all of it its history."""
        hits = leading(chain, self._owners)
        chain = chain[: self._capacity]
        for block in chain:
            self._owners[block] += 1
            self._free.pop(block, None)
        self._disown(owner)
        self._chains[owner] = list(chain)
        self._make_room(owner)
        return hits

    def own(self, owner: Hashable, chain: Chain) -> None:
        """Make what is cached of `chain` the history of `owner`."""
        held = list(chain[: leading(chain, self._owners)])
        for block in held:
            self._owners[block] += 1
            self._free.pop(block, None)
        self._disown(owner)
        if held:
            self._chains[owner] = held

    def move(self, owner: Hashable, step: float | None) -> None:
        """Set the step of an owner; None: nothing is expected of it any more."""
        if step is None:
            self._steps.pop(owner, None)
            self._disown(owner)
        else:
            self._steps[owner] = step

    def _disown(self, owner: Hashable) -> None:
        for block in reversed(self._chains.pop(owner, [])):
            self._owners[block] -= 1
            if not self._owners[block]:
                self._free[block] = None

    def _make_room(self, current: Hashable) -> None:
        while len(self._owners) > self._capacity:
            if self._free:
                del self._owners[self._free.popitem(last=False)[0]]
            else:
                self._shorten(self._last_needed(current))

    def _last_needed(self, current: Hashable) -> Hashable:
        """Return the owner with the greatest step; `current` only where there is no other."""
        steps = self._steps
        others = [(steps.get(owner, math.inf), owner) for owner in self._chains if owner != current]
        return max(others, key=itemgetter(0))[1] if others else current

    def _shorten(self, owner: Hashable) -> None:
        """Take blocks off the end of an owner's history, until there is room or nothing is left of it."""
        chain = self._chains[owner]
        while chain and len(self._owners) > self._capacity:
            block = chain.pop()
            self._owners[block] -= 1
            if not self._owners[block]:
                del self._owners[block]
        if not chain:
            del self._chains[owner]
