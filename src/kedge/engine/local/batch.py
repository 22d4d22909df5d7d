"""Flattening the work of several sequences into one batch."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from kedge.engine.local.attention.paged import Batch, SequenceSlice
from kedge.engine.local.scheduler import Work
from kedge.kv.storage import PagedStorage


def flatten(work: Many[Work], storage: PagedStorage) -> Batch:
    """Return one batch of all positions, with logits after the last position, or several, of each sequence."""
    device = storage.keys.device
    tables = [item.sequence.table for item in work if item.sequence.table is not None]
    tokens = [item.sequence.tokens[p] for item in work for p in item.positions]
    positions = torch.tensor([p for item in work for p in item.positions])
    slots = torch.cat([table.slots[torch.tensor(item.positions)] for item, table in zip(work, tables, strict=True)])
    slices: list[SequenceSlice] = []
    logits_rows: list[int] = []
    start = 0
    for item, table in zip(work, tables, strict=True):
        stop, context = start + len(item.positions), item.positions[-1] + 1
        one = SequenceSlice(
            start=start,
            stop=stop,
            runs=table.runs(0, context),
            context=context,
            positions=positions[start:stop].to(device),
            contiguous=item.positions[0] == context - len(item.positions),
        )
        slices.append(one)
        logits_rows += range(stop - item.logit_rows, stop)
        start = stop
    return Batch(
        tokens=torch.tensor(tokens, device=device),
        positions=positions.to(device),
        slots=slots.to(device),
        sequences=slices,
        logits_rows=torch.tensor(logits_rows, device=device),
        storage=storage,
    )
