"""One sequence's share of a batch: its queries, its context, and which of it each query sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kedge.engine.local.states import States
from kedge.kv.storage import Runs

ALONE = 512
"""Runs of at least this many tokens are read in place; shorter ones are copied together, which costs less than a call
each.
"""
ROWS = 256
"""Queries that attend under a mask at once"""
ALL = slice(None)
Rows = tuple[int | None, int | None]
"""Start and stop; slices cannot be keys before Python 3.12."""


@dataclass(frozen=True, slots=True)
class Bias:
    """The mask of a part of the context, added to the scores: 0 where a query sees a key, else -inf."""

    scores: Tensor
    """[1, 1, queries, keys]"""
    seen: Tensor
    """[queries]: 0 where a query sees any of the keys, else -inf"""


@dataclass(slots=True)
class SequenceSlice:
    """One sequence's share of a batch: rows [start, stop) of the queries, and the place of its context."""

    start: int
    stop: int
    runs: Runs
    """Slots of positions 0 .. context-1."""
    context: int
    positions: Tensor
    """int64 [stop - start], ascending; the last one is context - 1"""
    contiguous: bool
    """Whether the positions are the last ones of the context, without gaps."""
    masks: dict[tuple[int | None, Rows, Rows], Tensor] = field(default_factory=dict)
    """Masks by sliding window, queries and keys, made once per pass for all layers."""
    biases: dict[tuple[int | None, int], list[Bias]] = field(default_factory=dict)
    """Biases of each part of the context by sliding window and group size, made once per pass for all layers."""
    states: States | None = None
    """The states of recurrent layers after the positions before, which the pass changes; None where it begins."""

    def mask(self, window: int | None, dtype: torch.dtype, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Return [queries, context], or these rows and columns of it: 0 where key j is visible to the query at position
        p (p - window < j <= p), else -inf.
        """
        key = window, (rows.start, rows.stop), (columns.start, columns.stop)
        if key not in self.masks:
            queries = self.positions[rows, None]
            keys = torch.arange(self.context, device=queries.device)[columns]
            hidden = keys > queries if window is None else (keys > queries) | (keys <= queries - window)
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=keys.device)
            self.masks[key] = zeros.masked_fill_(hidden, float("-inf"))
        return self.masks[key]

    def pieces(self, window: int | None) -> Iterator[tuple[slice, slice]]:
        """Yield the queries, some at a time, each time with the keys that they see."""
        count = self.stop - self.start
        for first in range(0, count, ROWS):
            rows = slice(first, min(first + ROWS, count))
            yield rows, self._seen(rows, window)

    def _seen(self, rows: slice, window: int | None) -> slice:
        """Return the keys that these queries see, or more where it would take the device's positions to tell."""
        if not self.contiguous:
            return slice(0, self.context)
        before = self.context - (self.stop - self.start)
        first = 0 if window is None else max(0, before + rows.start - window + 1)
        return slice(first, before + rows.stop)

    def parts(self) -> list[list[int]]:
        """Return the indices of runs that are attended to together: each long one alone, all short ones as one part."""
        sizes = [run.stop - run.start for run in self.runs]
        short = [i for i, size in enumerate(sizes) if size < ALONE]
        return [[i] for i, size in enumerate(sizes) if size >= ALONE] + ([short] if short else [])

    def part_biases(self, window: int | None, groups: int, dtype: torch.dtype) -> list[Bias]:
        """Return the mask of each part, repeated for the heads of a group."""
        if (window, groups) not in self.biases:
            columns = self.mask(window, dtype).repeat(groups, 1).split([r.stop - r.start for r in self.runs], dim=1)
            masks = [torch.cat([columns[i] for i in part], dim=1) for part in self.parts()]
            self.biases[window, groups] = [Bias(mask[None, None], mask.amax(dim=1)) for mask in masks]
        return self.biases[window, groups]
