"""Flattening the work of several sequences into one batch."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from kedge.engine.local.attention.paged import Batch
from kedge.engine.local.attention.sequence_slice import SequenceSlice
from kedge.engine.local.scheduler import Work
from kedge.kv.storage import PagedStorage, SlotTable


def flatten(work: Many[Work], storage: PagedStorage) -> Batch:
    """Return one batch of all positions, with logits after the last position, or several, of each sequence."""
    device = storage.keys.device
    tokens = [item.sequence.tokens[p] for item in work for p in item.positions]
    positions = torch.tensor([p for item in work for p in item.positions])
    slots = torch.cat([_table(item).slots[torch.tensor(item.positions)] for item in work])
    slices, start = [], 0
    for item in work:
        slices.append(_slice(item, start, positions, device))
        start += len(item.positions)
    return Batch(
        tokens=torch.tensor(tokens, device=device),
        positions=positions.to(device),
        slots=slots.to(device),
        sequences=slices,
        logits_rows=torch.tensor(_logits_rows(work, slices), device=device),
        storage=storage,
    )


def _logits_rows(work: Many[Work], slices: Many[SequenceSlice]) -> list[int]:
    pairs = zip(work, slices, strict=True)
    return [row for item, piece in pairs for row in range(piece.stop - item.logit_rows, piece.stop)]


def _table(item: Work) -> SlotTable:
    assert item.sequence.table is not None
    return item.sequence.table


def _slice(item: Work, start: int, positions: torch.Tensor, device: torch.device) -> SequenceSlice:
    count, context = len(item.positions), item.positions[-1] + 1
    return SequenceSlice(
        start=start,
        stop=start + count,
        runs=_table(item).runs(0, context),
        context=context,
        positions=positions[start : start + count].to(device),
        contiguous=item.positions[0] == context - count,
        states=item.sequence.states,
    )
