"""Translations that several requests have in common: written for the first of them, and copied for the others.

Two requests of one agent that read the same value at the same positions, such as the choices of one call, blend the
same offsets. While the first of them runs, its slots have what the others would write, and nothing else has to be kept.
"""

from __future__ import annotations

from dataclasses import replace

from kedge.anchors.translator import is_same
from kedge.engine.local.sequence import RequestSequence
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.plan import ReusePlan, Translation
from kedge.types import Source


class SharedWrites:
    """The copies between running requests in one storage. Called by the engine's thread only."""

    def __init__(self, storage: PagedStorage, running: list[RequestSequence]) -> None:
        """`running` is the scheduler's list of admitted requests."""
        self._storage, self._running = storage, running
        self.copied_tokens = 0
        """Translated tokens that were copied instead of being blended again"""

    def copy(self, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        """Copy what running requests have of a plan's translations into `table`. Returns the plan with those that are
        left to be written.
        """
        left = tuple(one for one in plan.translations if not self._copy(table, plan, one))
        return plan if len(left) == len(plan.translations) else replace(plan, translations=left)

    def _copy(self, table: SlotTable, plan: ReusePlan, item: Translation) -> bool:
        stop = item.start + item.tokens
        for other in self._running:
            if not any(is_same(item, one) for one in other.written) or other.table is None:
                continue
            if _reads(plan, item).isdisjoint(_overwritten(other)):
                self._storage.copy(other.table, table, item.start, stop)
                self.copied_tokens += item.tokens
                return True
        return False


def _reads(plan: ReusePlan, item: Translation) -> set[int]:
    """Return the positions of a translation whose translated KV is read: all but those that are computed first."""
    stop = item.start + item.tokens
    kept = (span for span in plan.spans if span.source is Source.TRANSLATED)
    positions = {at for span in kept for at in range(max(span.start, item.start), min(span.stop, stop))}
    return positions | {one.position for one in plan.sentinels if item.start <= one.position < stop}


def _overwritten(sequence: RequestSequence) -> set[int]:
    """Return the prompt positions whose translated KV has been replaced by computed KV."""
    assert sequence.plan is not None
    return set(sequence.plan.computed).difference(sequence.todo)
