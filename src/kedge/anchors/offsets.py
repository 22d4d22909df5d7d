"""Offsets of anchor tokens in one arena, and blends of them.

An offset is real KV minus base KV, keys unrotated on both sides. It is kept token by token as one row
[(layers - 1) * 2 * kv_heads * head_dim], in the order layer, K before V, head, dimension. Layer 0 sees only the token
itself, so its offset is zero and is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from kedge.anchors.anchor import AnchorId
from kedge.errors import PlanError, TranslationRefused
from kedge.kv.segment import KVSegment


@dataclass(frozen=True, slots=True)
class Blend:
    """A weighted sum of rows of an offset table for each token. It is on the CPU until something is blended."""

    rows: Tensor
    """int64 [tokens, k]"""
    weights: Tensor
    """float32 [tokens, k]"""
    version: int
    """The table's version when the blend was made."""

    @property
    def tokens(self) -> int:
        """Number of tokens that are blended."""
        return self.rows.shape[0]

    @property
    def adds(self) -> bool:
        """Whether anything is added to base KV."""
        return self.rows.shape[1] > 0

    def slice(self, start: int, stop: int | None = None) -> Blend:
        """Return the tokens [start, stop); `stop=None` is the end."""
        if not self.adds:
            return no_offsets(len(range(self.tokens)[start:stop]), self.version)
        return Blend(self.rows[start:stop], self.weights[start:stop], self.version)


@lru_cache(4096)
def no_offsets(tokens: int, version: int = 0) -> Blend:
    """Return the blend of no rows, which leaves base KV as it is."""
    rows = torch.zeros(tokens, 0, dtype=torch.int64)
    return Blend(rows, rows.float(), version)


def rows_of(kv: KVSegment) -> Tensor:
    """Return KV of all layers but the first as rows [tokens, (layers - 1) * 2 * kv_heads * head_dim], a copy."""
    layers, tokens, heads, dim = kv.keys.shape
    rows = kv.keys.new_empty(tokens, layers - 1, 2, heads, dim)
    by_layer = rows.transpose(0, 1)  # one strided copy each: fifteen times as fast as stack and permute
    by_layer[:, :, 0], by_layer[:, :, 1] = kv.keys[1:], kv.values[1:]
    return rows.flatten(1)


def split_rows(rows: Tensor, base: KVSegment) -> KVSegment:
    """Return rows as KV in the shape of `base` without its first layer: views, in the dtype of the rows."""
    layers, tokens, heads, dim = base.keys.shape
    keys, values = rows.view(tokens, layers - 1, 2, heads, dim).permute(2, 1, 0, 3, 4)
    return KVSegment(keys, values)


class OffsetTable:
    """The rows of many anchors in one arena [rows, width], each anchor's in one contiguous range.

    The room of rows that were dropped is taken by later ones, or given back as it is packed. `version` changes whenever
    rows move or are dropped: a blend made before that may no longer be read.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.arena = torch.empty(0, width, dtype=dtype, device=device)
        self.width, self.dtype = width, dtype
        """Numbers per row, and their dtype."""
        self.version = 0
        self._ranges: dict[AnchorId, range] = {}
        self._asked: tuple[Hashable, Tensor] = ((), torch.empty(0, dtype=torch.int64))

    @property
    def anchors(self) -> set[AnchorId]:
        """The anchors that have rows."""
        return set(self._ranges)

    @property
    def live(self) -> int:
        """Rows in use."""
        return sum(map(len, self._ranges.values()))

    def rows_of_anchors(self, anchors: Sequence[AnchorId]) -> Tensor:
        """Return int64, on the CPU: the rows of these anchors, one after the other, not to be written to. Raises
        `KeyError` for an anchor without rows.

        The last answer is kept: the blends of one request after the other read the same anchors.
        """
        key = (*anchors,), self.version
        if self._asked[0] != key:
            ranges = [self._ranges[anchor] for anchor in anchors]
            rows = torch.cat([torch.arange(r.start, r.stop) for r in ranges])
            self._asked = key, rows
        return self._asked[1]

    def put(self, anchor: AnchorId, rows: Tensor) -> None:
        """Add the rows of a new anchor, where others were dropped or else behind all of them. Raises `PlanError` if it
        has rows already, or the width differs, and `TranslationRefused` if a number does not fit the table's dtype.
        """
        if anchor in self._ranges or rows.shape[1:] != (self.width,):
            raise PlanError("anchor", anchor, f"rows {tuple(rows.shape)} cannot be added to {self.width} wide ones")
        limit = torch.finfo(self.dtype).max
        low, high = rows.aminmax() if rows.numel() else (rows.new_zeros(()), rows.new_zeros(()))
        if not (low >= -limit and high <= limit):
            raise TranslationRefused("offset", (float(low), float(high)), f"does not fit {self.dtype}")
        start = next((a[1] for a, b in pairwise(self._edges()) if b[0] - a[1] >= len(rows)), None)
        if start is None:
            start = self.live
            self._pack(start + 2 * len(rows))  # another one as long needs no new arena
        self.arena[start : start + len(rows)] = rows
        self._ranges[anchor] = range(start, start + len(rows))

    def drop(self, anchor: AnchorId) -> None:
        """Forget the rows of an anchor, if it has any."""
        if self._ranges.pop(anchor, None) is not None:
            self.version += 1

    def pack(self) -> None:
        """Give back what dropped rows take."""
        if len(self.arena) > self.live:
            self._pack(self.live)

    def check(self, blend: Blend) -> None:
        """Raise `PlanError` for a blend that is out of date."""
        if blend.version != self.version:
            raise PlanError("blend", blend.version, f"the table is at version {self.version}")

    def blend(self, blend: Blend) -> Tensor:
        """Return the weighted sums [tokens, width] in the table's dtype. Raises `PlanError` for a blend out of date."""
        self.check(blend)
        if not blend.rows.numel() or not self.arena.numel():
            return self.arena.new_zeros(blend.tokens, self.width)
        # One fused call that reads each row once, the fastest way on a CPU.
        rows, weights = blend.rows.to(self.arena.device), blend.weights.to(self.arena.device, self.dtype)
        return torch.nn.functional.embedding_bag(rows, self.arena, per_sample_weights=weights, mode="sum")

    def check_integrity(self) -> None:
        """Raise `PlanError` where ranges overlap, or leave the arena."""
        edges = self._edges()
        if any(a[1] > b[0] for a, b in pairwise(edges)):
            raise PlanError("ranges", edges, f"overlap, or leave an arena of {len(self.arena)} rows")

    def _edges(self) -> list[tuple[int, int]]:
        """Return (start, stop) of all ranges in order, between the two ends of the arena."""
        spans = sorted((r.start, r.stop) for r in self._ranges.values() if len(r))
        return [(0, 0), *spans, (len(self.arena), len(self.arena))]

    def _pack(self, size: int) -> None:
        """Move what is live to the front of a new arena of so many rows."""
        arena = self.arena.new_empty(size, self.width)
        ranges, start = {}, 0
        for anchor, old in self._ranges.items():
            ranges[anchor] = range(start, start + len(old))
            arena[start : start + len(old)] = self.arena[old.start : old.stop]
            start += len(old)
        self.arena, self._ranges, self.version = arena, ranges, self.version + 1


def empty_table(kv: KVSegment, new: Callable[..., OffsetTable] = OffsetTable) -> OffsetTable:
    """Return a table without rows for offsets of such KV, in the dtype of a half-precision model, and in float16 for
    float32 (error below 1e-3): a `new` one, or `unused_table`, which is the same for all that stay empty.
    """
    layers, _, heads, dim = kv.keys.shape
    dtype = torch.float16 if kv.dtype == torch.float32 else kv.dtype
    return new((layers - 1) * 2 * heads * dim, dtype, kv.device)


unused_table = lru_cache(OffsetTable)
