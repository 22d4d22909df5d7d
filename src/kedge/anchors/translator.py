"""Translation: base KV plus a blend of offsets, rotated to its new position (KVCOMM, Eq. 6 and 7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from kedge.anchors.offsets import Blend, OffsetTable, split_rows
from kedge.kv.segment import KVSegment
from kedge.kv.storage import KernelSlots, SlotTable

CHUNK = 256
"""Tokens at a time, so that intermediate results stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Translation:
    """Tokens to be written by translation, from a position on: base KV plus a blend of observed offsets."""

    start: int
    base: KVSegment
    """Keys unrotated"""
    blend: Blend
    """Over the rows of `table`, one per token of `base`"""
    table: OffsetTable
    """That of the agent's place in its template"""

    @property
    def tokens(self) -> int:
        return self.base.tokens

    def within(self, start: int, stop: int) -> Translation | None:
        """Return the part of it that is at positions [start, stop), if there is one."""
        first, last = max(start - self.start, 0), min(stop - self.start, self.base.tokens)
        if first >= last:
            return None
        return Translation(self.start + first, self.base.slice(first, last), self.blend.slice(first, last), self.table)


class Storage(Protocol):
    """The target of translated KV: `kedge.kv.storage.PagedStorage`, or the pages of another engine."""

    @property
    def kernel_slots(self) -> KernelSlots | None:
        """Its slots for kernels; None where they cannot run, or cannot write what it holds."""

    def write(self, table: SlotTable, start: int, base: KVSegment, offsets: KVSegment | None) -> None:
        """Write KV as `PagedStorage.write` does."""


Translate = Callable[[SlotTable, Sequence[Translation]], None]
"""Writes translated segments into a request's slots, all layers. Raises `PlanError` for a blend out of date."""


def translate_into(storage: Storage) -> Translate:
    """Return the fastest `Translate` for a storage: the kernel where it can run, PyTorch operations elsewhere."""
    slots = storage.kernel_slots
    return partial(in_chunks, storage) if slots is None else partial(in_one_pass, slots)


def in_chunks(storage: Storage, table: SlotTable, items: Sequence[Translation]) -> None:
    """Translate some tokens at a time, each chunk blended by one call and written by the storage."""
    for item in items:
        for start in range(0, item.base.tokens, CHUNK):
            stop = min(start + CHUNK, item.base.tokens)
            base, blend = item.base.slice(start, stop), item.blend.slice(start, stop)
            offsets = split_rows(item.table.blend(blend), base) if blend.adds else None
            storage.write(table, item.start + start, base, offsets)


def in_one_pass(pages: KernelSlots, table: SlotTable, items: Sequence[Translation]) -> None:
    """Translate each segment with one kernel. Sums are rounded once, not after every step as in `in_chunks`."""
    if not items:
        return
    from kedge.kv.translate_kernel import translate

    # What the kernels read is sent once, for all segments, from memory of which a copy waits for nothing.
    device, blends = pages.addresses.device, [item.blend for item in items]
    parts = [torch.cat([one.rows.flatten() for one in blends]), torch.cat([one.weights.flatten() for one in blends])]
    parts = [part.pin_memory() for part in parts] if device.type == "cuda" else parts
    slots, rows, weights = (one.to(device, non_blocking=True) for one in (table.slots, *parts))
    sent = 0
    for item in items:
        item.table.check(item.blend)
        its, shape = slots[item.start : item.start + item.tokens], item.blend.rows.shape
        part = slice(sent, sent := sent + shape.numel())
        of_rows, of_weights = rows[part].view(shape), weights[part].view(shape)
        translate(pages, its, item.start, item.base, item.table.arena, of_rows, of_weights)
