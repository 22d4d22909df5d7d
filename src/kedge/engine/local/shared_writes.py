"""Translations that several requests have in common: written for the first of them, and read by the others.

Two requests that read the same value at the same positions, such as the choices of one call, would write the same.
While the first of them runs, its slots have it, and nothing else has to be kept: whole blocks in which neither computes
anything are held by both, and the rest is copied.
"""

from __future__ import annotations

from dataclasses import replace

from kedge.anchors.translator import is_same
from kedge.cache import CacheManager
from kedge.engine.local.sequence import RequestSequence
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.plan import ReusePlan, Translation
from kedge.types import Source


class SharedWrites:
    """What running requests have in common in one storage. Called by the engine's thread only."""

    def __init__(self, cache: CacheManager, storage: PagedStorage, running: list[RequestSequence]) -> None:
        """`running` is the scheduler's list of admitted requests."""
        self._cache, self._storage, self._running = cache, storage, running
        self.copied_tokens = 0
        """Translated tokens that were copied from another request"""
        self.borrowed_tokens = 0
        """Translated tokens in blocks of another request"""

    @property
    def tokens(self) -> int:
        """Translated tokens that were not written again."""
        return self.copied_tokens + self.borrowed_tokens

    def take(self, sequence: RequestSequence, plan: ReusePlan) -> ReusePlan:
        """Take what running requests have of a plan's translations for an admitted one, whose slots change. Returns the
        plan with those that are left to be written.
        """
        left = tuple(one for one in plan.translations if not self._take(sequence, plan, one))
        return plan if len(left) == len(plan.translations) else replace(plan, translations=left)

    def _take(self, sequence: RequestSequence, plan: ReusePlan, item: Translation) -> bool:
        for other in self._running:
            if not any(is_same(item, one) for one in other.written) or other.table is None:
                continue
            lost = _overwritten(other, item)
            if not lost or lost.isdisjoint(_reads(plan, item)):
                self._read_from(other, other.table, sequence, plan, item)
                return True
        return False

    def _read_from(
        self, other: RequestSequence, its: SlotTable, sequence: RequestSequence, plan: ReusePlan, item: Translation
    ) -> None:
        """Hold the whole blocks of `other` in which neither request computes anything, and copy the rest from `its`."""
        size, positions = self._storage.block_size, range(item.start, item.start + item.tokens)
        assert other.plan is not None
        changed = _blocks(plan, size) | _blocks(other.plan, size)
        places = [at for at in range(-(-positions.start // size), positions.stop // size) if at not in changed]
        if places:
            sequence.table = SlotTable.of(self._cache.borrow(sequence.key, other.key, places).blocks, size)
        assert sequence.table is not None
        borrowed = set(places)
        if rest := [at for at in positions if at // size not in borrowed]:
            self._storage.copy(its, sequence.table, rest)
        self.borrowed_tokens += item.tokens - len(rest)
        self.copied_tokens += len(rest)


def _blocks(plan: ReusePlan, size: int) -> set[int]:
    """Return the places of the blocks in which a plan computes anything."""
    return {place for hole in plan.holes for place in range(hole.start // size, -(-hole.stop // size))}


def _reads(plan: ReusePlan, item: Translation) -> set[int]:
    """Return the positions of a translation whose translated KV is read: all but those that are computed first."""
    stop = item.start + item.tokens
    kept = (span for span in plan.spans if span.source is Source.TRANSLATED)
    positions = {at for span in kept for at in range(max(span.start, item.start), min(span.stop, stop))}
    return positions | {one.position for one in plan.sentinels if item.start <= one.position < stop}


def _overwritten(sequence: RequestSequence, item: Translation) -> set[int]:
    """Return the positions of a translation whose KV has been replaced by computed KV in a request that has it."""
    assert sequence.plan is not None
    computed = (at for at in sequence.plan.computed if item.start <= at < item.start + item.tokens)
    return set(computed).difference(sequence.todo)
