"""Reuse without anchors: base KV is rotated, and tokens are computed by rules that need nothing learned.

The end of a prefix segment names what comes next, so that it depends on all that was read before; its base KV has read
the placeholders' names instead. A question's base KV has read nearly nothing, that of an answer what its agent read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kedge.anchors.translator import Translate, translate_into
from kedge.bench.lab.baselines import without_offsets
from kedge.engine.local.components import Assembler
from kedge.engine.local.model.runner import ModelRunner
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.layout import Placed, layout
from kedge.reuse.plan import ReusePlan, spans_of
from kedge.types import GenerateRequest, Source

WHOLE = 1 << 20
"""More tokens than a prefix segment has: all of it is computed."""


@dataclass(frozen=True, slots=True)
class Seams:
    """A choice of the tokens to compute: the `last` ones of every prefix segment and, unless `inputs` are to be
    rotated, all of the values that are no agent's answer.
    """

    last: int
    inputs: bool = True

    def __call__(self, _: ModelRunner, storage: PagedStorage) -> Assembler:
        return _SeamsAssembler(self, translate_into(storage))

    def computed(self, placed: Placed) -> range:
        """Return the prompt positions to compute in a segment."""
        if placed.segment.is_placeholder:
            is_kept = self.inputs or placed.segment.is_answer
            return range(placed.stop if is_kept else placed.start, placed.stop)
        return range(max(placed.start, placed.stop - self.last), placed.stop)


@dataclass(frozen=True, slots=True)
class _SeamsAssembler:
    """An assembler that reuses base KV and marks the tokens at the seams as computed."""

    works_ahead: ClassVar[bool] = False
    seams: Seams
    translate: Translate

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        plan = replace(plan, translations=tuple(map(without_offsets, plan.translations)))
        self.translate(table, plan.translations)
        sources = [span.source for span in plan.spans for _ in range(len(span))]
        for placed in layout(request):
            for position in self.seams.computed(placed):
                if sources[position] is Source.TRANSLATED:
                    sources[position] = Source.COMPUTED
        return replace(plan, spans=spans_of(sources))
