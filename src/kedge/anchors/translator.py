"""Translation: base KV plus a blend of offsets, rotated to its new position (KVCOMM, Eq. 6 and 7)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kedge.anchors.offsets import split_rows
from kedge.kv.segment import KVSegment
from kedge.kv.storage import SlotTable
from kedge.runtime.plan import Translation

CHUNK = 256
"""Tokens at a time: what is between reading offsets and writing slots then stays in the processor's cache"""


class Storage(Protocol):
    """Where KV is written to: `kedge.kv.storage.PagedStorage`, or the pages of another engine."""

    def write(self, table: SlotTable, start: int, base: KVSegment, offsets: KVSegment) -> None:
        """As `PagedStorage.write`."""


class Translator:
    """Writes translated segments straight into a request's slots, all layers at once."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def write(self, table: SlotTable, translations: Iterable[Translation]) -> None:
        """Translates each segment and writes it. Raises `PlanError` for a blend that is out of date."""
        for item in translations:
            for start in range(0, item.base.tokens, CHUNK):
                stop = min(start + CHUNK, item.base.tokens)
                base, rows = item.base.slice(start, stop), item.table.blend(item.blend.slice(start, stop))
                self._storage.write(table, item.start + start, base, split_rows(rows.to(base.dtype), base))
