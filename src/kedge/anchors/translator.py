"""Translation: base KV plus a blend of offsets, rotated to its new position (KVCOMM, Eq. 6 and 7)."""

from __future__ import annotations

from collections.abc import Iterable

from kedge.anchors.offsets import add_rows
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.runtime.plan import Translation


class Translator:
    """Writes translated segments straight into a request's slots, all layers at once."""

    def __init__(self, storage: PagedStorage) -> None:
        self._storage = storage

    def write(self, table: SlotTable, translations: Iterable[Translation]) -> None:
        """Translates each segment and writes it; later ones may not overlap earlier ones."""
        for item in translations:
            kv = add_rows(item.base, item.table.blend(item.blend))
            self._storage.write(table, item.start, kv)
