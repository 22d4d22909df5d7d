"""The paper's baselines on Kedge's engine: reuse without offsets, and the ablations of Table 5.

An ablation changes the plan of a request before it is written; planning, pools and everything after are Kedge's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from kedge.anchors.offsets import empty_table
from kedge.anchors.sites import OffsetEstimate, no_offsets
from kedge.anchors.store import AnchorStore
from kedge.anchors.translator import Translate, translate_into
from kedge.engine.local.components import Assembler
from kedge.engine.local.model.runner import ModelRunner
from kedge.kv.rotary import Rotation
from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.contracts import PlaceholderSite, SampleView
from kedge.reuse.layout import Placed, layout
from kedge.reuse.plan import ReusePlan, Translation
from kedge.types import GenerateRequest, RunKey, SampleId


class NoAnchors(AnchorStore):
    """An anchor store without offsets: every value with base KV is shareable, and its keys are only rotated."""

    def estimate(self, slot: PlaceholderSite, sample: SampleView) -> OffsetEstimate:  # noqa: ARG002
        table = empty_table(sample.base)
        nothing = no_offsets(sample.base, table)
        return OffsetEstimate(
            True, "", learnable=False, value=nothing, prefix=nothing, value_table=table, prefix_table=table
        )

    def prepare(self, sample: SampleView) -> None:
        """Do nothing: there is nothing to look up ahead of time."""

    def use(self, estimate: OffsetEstimate) -> None:  # noqa: ARG002
        self._used += 1

    def observe(self, slot: PlaceholderSite, sample: SampleView, *_: KVSegment | None) -> None:
        """Do nothing: no offsets are learned."""


def without_offsets(item: Translation) -> Translation:
    """Return the translation with its base KV unchanged but for the rotation."""
    return replace(item, blend=no_offsets(item.base, item.table))


@dataclass(frozen=True, slots=True)
class Ablation:
    """A choice of KVCOMM's three steps of alignment (Table 5)."""

    rotation: bool = True
    """Whether keys are rotated to the segment's new position."""
    values: bool = True
    """Whether offsets are added to placeholders."""
    prefixes: bool = True
    """Whether offsets are added to the prefix segments after them."""

    def __call__(self, runner: ModelRunner, storage: PagedStorage) -> Assembler:
        return _AblatedAssembler(self, runner.rotary, translate_into(storage))


@dataclass(slots=True)
class _AblatedAssembler:
    """An assembler that leaves out steps. Without rotation, keys keep the rotation of where base KV was computed."""

    works_ahead: ClassVar[bool] = False
    steps: Ablation
    rotary: Rotation
    translate: Translate
    prompts: dict[tuple[RunKey, SampleId], int] = field(default_factory=dict)
    """Tokens of the prompt before an answer."""

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        if request.produces is not None:
            self.prompts[request.run_key, request.produces] = request.prompt_tokens
        placed = layout(request)
        plan = replace(plan, translations=tuple(self._edited(request, placed, item) for item in plan.translations))
        self.translate(table, plan.translations)
        return plan

    def _edited(self, request: GenerateRequest, placed: tuple[Placed, ...], item: Translation) -> Translation:
        here = next(p for p in placed if p.start <= item.start < p.stop)
        if not (self.steps.values if here.segment.is_placeholder else self.steps.prefixes):
            item = without_offsets(item)
        if self.steps.rotation:
            return item
        return self._left_there(item, self._origin(request, placed, here) + item.start - here.start)

    def _origin(self, request: GenerateRequest, placed: tuple[Placed, ...], here: Placed) -> int:
        """Return the position at which a segment's base KV was computed: after its producer's prompt, after a lead-in,
        or in the template with the placeholders' names as text.
        """
        segment = here.segment
        if segment.sample is not None:
            return self.prompts.get((request.run_key, segment.sample), len(segment.base_context))
        return sum(
            len(p.segment.placeholder_text if p.segment.is_placeholder else p.segment.tokens)
            for p in placed[: here.index]
        )

    def _left_there(self, item: Translation, origin: int) -> Translation:
        """Undo in advance the translator's rotation, so that the keys stay rotated as at `origin`."""
        count = item.base.tokens
        there = torch.empty_like(item.base.keys)
        self.rotary.rotate(item.base.keys, slice(origin, origin + count), out=there)
        keys = self.rotary.unrotate(there, slice(item.start, item.start + count))
        return replace(item, base=KVSegment(keys, item.base.values))
