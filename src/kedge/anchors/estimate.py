"""The estimate of one value: whether it is shareable, and the blends of its offsets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kedge.anchors.anchor import AnchorId
from kedge.anchors.criteria.shareability import Verdict
from kedge.anchors.estimators.blending import Match
from kedge.anchors.estimators.site import SiteOffsets
from kedge.anchors.offsets import Blend, OffsetTable, empty_table
from kedge.kv.segment import KVSegment
from kedge.reuse.contracts import PoolKey, SampleView

_USED = 0.5
"""Share of a value's offsets that the used anchors carry together, the heaviest first."""


@dataclass(frozen=True, slots=True)
class OffsetEstimate:
    """The judgement of whether a value is shareable at a site and, if so, the blends of its offsets."""

    shareable: bool
    reason: str
    """Why it is not shareable, or empty"""
    learnable: bool
    """Whether a dense prefill would teach the pool something about this value"""
    value: Blend | None = None
    """Over rows of `value_table`, one per token of the value"""
    prefix: Blend | None = None
    """Over rows of `prefix_table`, one per token of the prefix segment after the value"""
    weak: Tensor | None = None
    """bool [tokens], on the CPU: tokens of the value that should be computed nevertheless"""
    weak_prefix: Tensor | None = None
    """The same of the prefix segment after the value"""
    value_table: OffsetTable | None = None
    prefix_table: OffsetTable | None = None
    pool: PoolKey | None = None
    used: tuple[AnchorId, ...] = ()

    def weak_positions(self) -> list[int]:
        """Return the positions in the value of tokens that should be computed nevertheless, ascending."""
        return _places(self.weak)

    def weak_prefix_positions(self) -> list[int]:
        """Return the positions of such tokens in the prefix segment after the value, ascending."""
        return _places(self.weak_prefix)


def _places(marked: Tensor | None) -> list[int]:
    return [] if marked is None else marked.nonzero().flatten().tolist()


def shared(sample: SampleView, offsets: SiteOffsets, match: Match, verdict: Verdict) -> OffsetEstimate:
    """Return the estimate of a value that the criterion judged shareable."""
    value, prefix = offsets.value_offsets(match, sample.base), offsets.prefix_offsets(match)
    return OffsetEstimate(
        shareable=True,
        reason="",
        learnable=match.same is None,
        value=value.blend,
        prefix=prefix.blend,
        weak=verdict.weak,
        weak_prefix=verdict.weak_prefix,
        value_table=value.table,
        prefix_table=prefix.table,
        pool=sample.pool,
        used=_leading(match.block.ids, match.proposal.mass),
    )


def rotated(sample: SampleView, after: OffsetEstimate | None = None) -> OffsetEstimate:
    """Return the estimate by which a value's base KV is only rotated to its place. The prefix segment behind it is as
    in `after`, an estimate from anchors.
    """
    table = empty_table(sample.base)
    value = no_offsets(sample.base, table)
    if after is None:
        return OffsetEstimate(True, "", learnable=False, value=value, value_table=table)
    return replace(after, value=value, value_table=table, weak=None)


def no_offsets(base: KVSegment, table: OffsetTable) -> Blend:
    """Return the blend of no rows, which leaves base KV as it is."""
    rows = torch.zeros(base.tokens, 0, dtype=torch.int64, device=base.device)
    return Blend(rows, rows.float(), table.version)


def _leading(ids: tuple[AnchorId, ...], mass: Tensor) -> tuple[AnchorId, ...]:
    """Return the fewest anchors that together carry a share of `_USED` of the mass."""
    heaviest = torch.argsort(mass, descending=True, stable=True)
    before = mass[heaviest].cumsum(0) - mass[heaviest]
    return tuple(ids[i] for i in heaviest[before < _USED].tolist())
