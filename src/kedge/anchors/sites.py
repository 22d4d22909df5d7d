"""Sites: what one agent has observed at one placeholder of its template, and how well that predicts."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from kedge.anchors.anchor import AnchorId, PoolKey, SampleView
from kedge.anchors.calibration import Calibration
from kedge.anchors.criteria import Verdict
from kedge.anchors.estimators import Match
from kedge.anchors.offsets import Blend, OffsetTable, empty_table, no_offsets, rows_of, unused_table
from kedge.errors import PlanError
from kedge.kv.segment import KVSegment


@dataclass(frozen=True, slots=True)
class Observation:
    """The offsets measured after a dense prefill: float32 rows [tokens, width] of the value and of the prefix segment
    after it, and the real KV of both as rows.
    """

    value: Tensor
    prefix: Tensor
    real: Tensor
    real_prefix: Tensor

    @classmethod
    def measure(
        cls, base: KVSegment, real: KVSegment, base_prefix: KVSegment | None, real_prefix: KVSegment | None
    ) -> Self:
        """Measure the offsets of real KV from base KV. Raises `PlanError` where the two differ in tokens."""
        rows = rows_of(real).float()
        value = _offset(base, rows)
        if base_prefix is None or real_prefix is None:
            return cls(value, value[:0], rows, rows[:0])
        rows_after = rows_of(real_prefix).float()
        return cls(value, _offset(base_prefix, rows_after), rows, rows_after)


def _offset(base: KVSegment, real: Tensor) -> Tensor:
    if base.tokens != len(real):
        raise PlanError("tokens", base.tokens, f"of base KV, {len(real)} of real KV")
    return real - rows_of(base).float()


class SiteOffsets:
    """The offsets of one site: two tables over the same anchors, and the calibration."""

    def __init__(self, base: KVSegment, prefix_tokens: int) -> None:
        """Create empty tables."""
        self.value, self.prefix = empty_table(base), empty_table(base)
        self.calibration = Calibration()
        layers, _, heads, dim = base.keys.shape
        self._prefix_tokens, self._shape = prefix_tokens, (layers - 1, 2, heads * dim)

    @property
    def tables(self) -> tuple[OffsetTable, ...]:
        """The tables of rows that it keeps."""
        return self.value, self.prefix

    @property
    def anchors(self) -> tuple[AnchorId, ...]:
        """The anchors that it has offsets of, ascending: agents that have observed the same values in another order
        share their matches.
        """
        return tuple(sorted(self.value.anchors))

    def check_integrity(self) -> None:
        """Raise `PlanError` where a table is unsound, the two hold different anchors, or the calibration is of another
        prefix segment.
        """
        if self.calibration.prefix_sums.shape not in {(), (self._prefix_tokens,)}:
            raise PlanError("prefix_sums", len(self.calibration.prefix_sums), f"of {self._prefix_tokens} tokens")
        for table in self.tables:
            table.check_integrity()
        if self.value.anchors != self.prefix.anchors:
            raise PlanError("anchors", self.anchors, f"the table behind the value holds {self.prefix.anchors}")

    def put(self, anchor: AnchorId, observed: Observation) -> None:
        """Add both parts or none. Raises `PlanError` if they do not fit the site, or the anchor is known already."""
        if anchor in self.anchors:
            raise PlanError("anchor", anchor, "was observed in this site before")
        if len(observed.prefix) != self._prefix_tokens:
            why = f"a template has {self._prefix_tokens} at this place"
            raise PlanError("prefix_tokens", len(observed.prefix), why)
        with ExitStack() as undo:
            undo.callback(self.drop, anchor)
            self.value.put(anchor, observed.value)
            self.prefix.put(anchor, observed.prefix)
            undo.pop_all()

    def drop(self, anchor: AnchorId) -> None:
        """Forget an anchor, if it is known."""
        self.value.drop(anchor)
        self.prefix.drop(anchor)

    def value_blend(self, match: Match) -> Blend:
        """Return the proposal as a blend of rows of `phi`."""
        rows = self.value.rows_of_anchors(match.block.ids)
        return Blend(rows[match.proposal.columns], match.proposal.weights, self.value.version)

    def prefix_blend(self, match: Match) -> Blend:
        """Return the blend of the same anchors' rows of `prefix`, weighted as proposed, without anchors of weight 0."""
        kept = match.proposal.after.nonzero().flatten()
        rows = self.prefix.rows_of_anchors(match.block.ids).view(len(match.block.ids), self._prefix_tokens)
        weights = match.proposal.after[kept].expand(self._prefix_tokens, -1)
        return Blend(rows[kept].T.contiguous(), weights.contiguous(), self.prefix.version)

    def errors(self, match: Match, observed: Observation) -> tuple[Tensor, Tensor]:
        """Return float32 [tokens]: the relative error of the estimate, mean over keys and values; and the same for the
        prefix segment after the value.
        """
        after = self._error(self.prefix, self.prefix_blend(match), observed.prefix, observed.real_prefix)
        return self._error(self.value, self.value_blend(match), observed.value, observed.real), after

    def _error(self, table: OffsetTable, blend: Blend, offsets: Tensor, real: Tensor) -> Tensor:
        wrong, size = self._norms(table.blend(blend).float() - offsets), self._norms(real)
        return (wrong / size.clamp_min(1e-12)).mean(1)

    def _norms(self, rows: Tensor) -> Tensor:
        """Return norms [tokens, 2] over all layers, of keys and of values."""
        return rows.view(len(rows), *self._shape).norm(dim=3).norm(dim=1)


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
    weak: Sequence[int] = ()
    """Positions in the value of tokens that should be computed nevertheless, ascending"""
    weak_prefix: Sequence[int] = ()
    """The same of the prefix segment after the value"""
    value_table: OffsetTable | None = None
    prefix_table: OffsetTable | None = None
    pool: PoolKey | None = None
    used: tuple[AnchorId, ...] = ()


def shared(sample: SampleView, offsets: SiteOffsets, match: Match, verdict: Verdict) -> OffsetEstimate:
    """Return the estimate of a value that the criterion judged shareable. The heaviest anchors that carry half of its
    offsets together count as used.
    """
    mass = match.proposal.mass
    heaviest = torch.argsort(mass, descending=True, stable=True)
    before = mass[heaviest].cumsum(0) - mass[heaviest]
    return OffsetEstimate(
        shareable=True,
        reason="",
        learnable=match.same is None,
        value=offsets.value_blend(match),
        prefix=offsets.prefix_blend(match),
        weak=verdict.weak.nonzero().flatten().tolist(),
        weak_prefix=verdict.weak_prefix.nonzero().flatten().tolist(),
        value_table=offsets.value,
        prefix_table=offsets.prefix,
        pool=sample.pool,
        used=tuple(match.block.ids[i] for i in heaviest[before < 0.5].tolist()),
    )


def rotated(sample: SampleView, after: OffsetEstimate | None = None) -> OffsetEstimate:
    """Return the estimate by which a value's base KV is only rotated to its place. The prefix segment behind it is as
    in `after`, an estimate from anchors.
    """
    table, value = empty_table(sample.base, unused_table), no_offsets(sample.base.tokens)
    if after is None:
        return OffsetEstimate(True, "", learnable=False, value=value, value_table=table)
    return replace(after, value=value, value_table=table, weak=())
