"""Sites of the estimators `linear` and `linear+token`: offsets predicted by regression (KVCOMM.md, section 3)."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from kedge.anchors.anchor import AnchorId
from kedge.anchors.estimators.blending import Match
from kedge.anchors.estimators.ridge import Ridge
from kedge.anchors.estimators.site import Observation, Offsets, SiteOffsets
from kedge.anchors.offsets import Blend, OffsetTable, empty_table, row_width, rows_of
from kedge.errors import TranslationRefused
from kedge.kv.segment import KVSegment


class LinearOffsets(SiteOffsets):
    """A regression for the value, and the mean for the prefix segment after it, since its base KV never changes.

    No rows are kept, so dropping an anchor forgets nothing, and an observed value is not recovered exactly.
    """

    leaves_out = False
    is_saved = False

    def __init__(self, base: KVSegment, prefix_tokens: int, strength: float) -> None:
        super().__init__(base, prefix_tokens)
        self.ridge = _ridge_for(base, strength)
        self._prefix_sum = torch.zeros(prefix_tokens, row_width(base), device=base.device)
        self._observed, self._dtype = 0, base.dtype

    @property
    def tables(self) -> tuple[OffsetTable, ...]:
        """The tables of rows that it keeps."""
        return ()

    @property
    def nbytes(self) -> int:
        """Bytes of everything that it has learned."""
        return self.ridge.nbytes + self._prefix_sum.nbytes

    def put(self, anchor: AnchorId, observed: Observation) -> None:
        self._check(anchor, observed)
        for rows in (observed.value, observed.prefix, observed.real):
            if not torch.isfinite(rows).all():
                raise TranslationRefused("offset", float(rows.abs().max()), "an observed offset is not finite")
        self.ridge.add(observed.real - observed.value, observed.value)
        self._prefix_sum += observed.prefix
        self._observed += 1
        self.holders.append(anchor)

    def value_offsets(self, match: Match, base: KVSegment) -> Offsets:  # noqa: ARG002
        return _as_offsets(self.ridge.predict(rows_of(base)), self._dtype)

    def prefix_offsets(self, match: Match) -> Offsets:  # noqa: ARG002
        return _as_offsets(self._prefix_sum / max(self._observed, 1), self._dtype)


class CorrectedOffsets(SiteOffsets):
    """Token lookup, corrected by a regression on the difference between the value's base KV and the base KV looked up.

    W x₀ + Σ w (Δ - W x) = Σ w Δ + W (x₀ - Σ w x) for weights w that sum to 1: the lookup of the residuals of the
    regression W. Written like this, the stored rows do not change when the regression learns.
    """

    leaves_out = False
    is_saved = False

    def __init__(self, base: KVSegment, prefix_tokens: int, strength: float, bits: int = 16) -> None:
        super().__init__(base, prefix_tokens, bits)
        self.base = empty_table(base)
        self.ridge = _ridge_for(base, strength)
        self._dtype = base.dtype

    @property
    def tables(self) -> tuple[OffsetTable, ...]:
        """The tables of rows that it keeps."""
        return self.value, self.prefix, self.base

    @property
    def nbytes(self) -> int:
        """Bytes of everything that it has learned."""
        return super().nbytes + self.ridge.nbytes

    def put(self, anchor: AnchorId, observed: Observation) -> None:
        base = observed.real - observed.value
        with ExitStack() as undo:
            super().put(anchor, observed)
            undo.callback(self.drop, anchor)
            self.base.put(anchor, base)
            undo.pop_all()
        self.ridge.add(base, observed.value)

    def drop(self, anchor: AnchorId) -> None:
        super().drop(anchor)
        self.base.drop(anchor)

    def value_offsets(self, match: Match, base: KVSegment) -> Offsets:
        rows = self.base.rows_of_anchors(match.block.ids)[match.proposal.columns]
        nearby = self.base.blend(Blend(rows, match.proposal.weights, self.base.version)).float()
        change = self.ridge.predict_change(rows_of(base).float() - nearby)
        return _as_offsets(self.value.blend(self.value_blend(match)).float() + change, self._dtype)


def _ridge_for(base: KVSegment, strength: float) -> Ridge:
    layers, _, heads, dim = base.keys.shape
    return Ridge((layers - 1, 2, heads, dim), strength, base.device)


def _as_offsets(rows: Tensor, dtype: torch.dtype) -> Offsets:
    """Return rows that have been computed as a table of their own, each token's blend being its row."""
    table = OffsetTable(rows.shape[1], dtype, rows.device)
    table.put(AnchorId(0), rows)
    places = torch.arange(len(rows), device=rows.device)[:, None]
    return Offsets(Blend(places, torch.ones_like(places, dtype=torch.float32), table.version), table)
