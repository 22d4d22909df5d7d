"""The order in which free blocks with KV are evicted: owner sets by policy, the blocks of one set oldest first.

A set with a stamp of its own is evicted as a whole, and from the block that was added last: what a session adds later
is further down in its prompts, and no use without what is before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from kedge.errors import PlanError
from kedge.integrations.vllm.plugin.owner_sets import FreeBlock, OwnerSet
from kedge.policies.eviction import EvictionKey, StepPolicy
from kedge.structures.heaps import LazyHeap


class EvictionOrder:
    """A lazy heap of owner sets, each ranked by its oldest free block, and the set that is evicted from now.

    Blocks freed one after another with the same owners share a stamp. While the current set is ahead of all others,
    evicting a block costs no look at the heap.
    """

    def __init__(self, policy: StepPolicy, num_blocks: int) -> None:
        self._policy, self._num_blocks = policy, num_blocks
        self.clear()

    def clear(self) -> None:
        """Forget all sets and stamps."""
        self._stamps = [0] * self._num_blocks
        """When each block was freed, by block id"""
        self._clock = 0
        self._heap: LazyHeap[OwnerSet] = LazyHeap(attrgetter("key"))
        self._current: OwnerSet | None = None
        """The set whose blocks go next, as far as their stamps are at most `_bound`."""
        self._bound = math.inf

    def set_policy(self, policy: StepPolicy, sets: Iterable[OwnerSet]) -> StepPolicy:
        """Rank all `sets` by `policy` from now on. Returns the policy before."""
        before, self._policy, self._current = self._policy, policy, None
        for owners in sets:
            self._push(owners)
        return before

    def append(self, blocks: Sequence[FreeBlock], set_of: Sequence[OwnerSet]) -> None:
        """Add freed blocks to the lists of their owner sets (`set_of` by block id), in this order: to the end, or to
        the front of a set that is evicted as a whole.
        """
        stamps, clock = self._stamps, self._clock
        owners: OwnerSet | None = None
        last: Any = None
        after: Any = None
        for block in blocks:
            next_owners = set_of[block.block_id]
            if next_owners is not owners:
                clock += 1
                if owners is not None:
                    self._end_run(owners, last, after)
                owners = next_owners
                last, after = _neighbours_of_new(owners)
                if owners.stamp is not None:
                    owners.stamp = clock
            stamps[block.block_id] = clock
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        self._clock = clock
        if owners is not None:
            self._end_run(owners, last, after)

    def _end_run(self, owners: OwnerSet, last: Any, after: Any) -> None:
        """Close the list of `owners` between `last`, the last of several added blocks, and `after`."""
        last.next_free_block = after
        after.prev_free_block = last
        if not owners.queued:
            self.enter(owners)

    def take(self, n: int, taken: list[Any]) -> OwnerSet:
        """Move blocks of the next set to `taken`, until that has `n` or another set is next. Returns the set.

        Raises `PlanError` where no set has a free block.
        """
        owners = self._current or self._choose()
        start = len(taken)
        owners.take(n if math.isinf(self._bound) else start + self._within_bound(owners, n - start), taken)
        if owners.is_empty:
            self._current, owners.queued = None, False
        elif len(taken) == start or self._stamp(owners, owners.head.next_free_block) > self._bound:
            self.enter(owners)
        return owners

    def _within_bound(self, owners: OwnerSet, most: int) -> int:
        """Count the leading blocks of `owners` that are as old as the bound, up to `most`."""
        if owners.stamp is not None:
            return most if owners.stamp <= self._bound else 0
        stamps, bound = self._stamps, self._bound
        count = 0
        for block in owners:
            if count >= most or stamps[block.block_id] > bound:
                break
            count += 1
        return count

    def _choose(self) -> OwnerSet:
        """Make the set whose oldest block is next the current one, and set the bound up to which it stays that."""
        chosen = self._pop()
        if chosen is None:
            raise PlanError("free blocks", 0, "no owner set has any")
        self._bound = math.inf
        if rival := self._pop():
            if rival.key[:-1] == chosen.key[:-1]:
                self._bound = rival.last_access
            self._heap.push(rival)
        self._current = chosen
        return chosen

    def _pop(self) -> OwnerSet | None:
        """Return the set with the least key. A set whose oldest block has left since it was pushed is ranked again."""
        while owners := self._heap.pop():
            if owners.is_empty:
                owners.queued = False
                continue
            before, owners.key = owners.key, self._key(owners)
            if owners.key == before:
                return owners
            self._heap.push(owners)
        return None

    def enter(self, owners: OwnerSet) -> None:
        """Rank a set under its present key. The current set goes back to the heap, as it may not be next any more."""
        if self._current is not None and self._current is not owners:
            self._push(self._current)
        self._current = None
        self._push(owners)

    def on_steps(self, changed: Iterable[OwnerSet]) -> None:
        """Rank sets anew whose steps have changed. One that is needed sooner now stays where it is in the heap: it is
        ranked anew when it surfaces.
        """
        for owners in changed:
            if owners.queued and (owners is self._current or self._key(owners) < owners.key):
                self.enter(owners)

    def _push(self, owners: OwnerSet) -> None:
        owners.queued = not owners.is_empty
        if owners.queued:
            owners.key = self._key(owners)
            self._heap.push(owners)

    def _key(self, owners: OwnerSet) -> EvictionKey:
        """Return the rank of a set with free blocks, which is that of its oldest one."""
        return self._key_at(owners, owners.head.next_free_block)

    def _key_at(self, owners: OwnerSet, block: FreeBlock) -> EvictionKey:
        owners.last_access = self._stamp(owners, block)
        return self._policy(owners)

    def _stamp(self, owners: OwnerSet, block: FreeBlock) -> int:
        return self._stamps[block.block_id] if owners.stamp is None else owners.stamp

    def sort(self, sets: Iterable[OwnerSet]) -> list[Any]:
        """Return the free blocks of `sets` in the order of their eviction. O(n log n) in the number of blocks."""
        ranked = [(self._key_at(owners, block), block) for owners in sets for block in owners]
        ranked.sort(key=lambda pair: pair[0])
        return [block for _, block in ranked]


def _neighbours_of_new(owners: OwnerSet) -> tuple[Any, Any]:
    """Return what the next blocks of a set go between."""
    if owners.stamp is None:
        return owners.tail.prev_free_block, owners.tail
    return owners.head, owners.head.next_free_block
