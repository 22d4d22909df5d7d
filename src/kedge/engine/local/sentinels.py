"""Sentinel tokens: a few tokens of every translated value that the model computes as well.

Their translated KV is remembered and compared with what the model computes, in the same pass as the rest of the prompt.
Most of them are computed anyway, and one chain of operations compares all requests of a pass. Where the two are far
apart, base KV or offsets are wrong, and the prompt is computed before its first token is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.plan import Sentinel


@dataclass(frozen=True, slots=True)
class SentinelRows:
    """Translated KV of sentinel tokens, before the model computes them."""

    sentinels: tuple[Sentinel, ...]
    slots: Tensor
    """int64 [tokens], on the storage's device"""
    kv: Tensor
    """Keys, rotated as attention reads them, and values: [2, layers - 1, tokens, kv_heads, head_dim]"""


class Sentinels:
    """Sentinel tokens in one storage. The first layer is left out: its KV depends on no context."""

    def __init__(self, storage: PagedStorage) -> None:
        self._storage = storage

    def read(self, table: SlotTable, sentinels: Sequence[Sentinel]) -> SentinelRows:
        """Return the KV of these sentinels as it is now."""
        slots = table.slots[[one.position for one in sentinels]].to(self._storage.keys.device)
        return SentinelRows(tuple(sentinels), slots, self._read(slots))

    def errors(self, before: Sequence[SentinelRows]) -> list[float]:
        """Return the relative error of the translated KV of each sentinel: the norm of its difference from the computed
        KV over the norm of that, of keys or of values, whichever is larger.
        """
        slots, kv = torch.cat([rows.slots for rows in before]), torch.cat([rows.kv for rows in before], dim=2)
        computed, dims = self._read(slots).float(), (1, 3, 4)
        errors = torch.linalg.vector_norm(kv.float() - computed, dim=dims)  # over all layers: of keys, and of values
        of_computed = torch.linalg.vector_norm(computed, dim=dims).clamp_(min=1e-12)
        return (errors / of_computed).amax(0).tolist()

    def _read(self, slots: Tensor) -> Tensor:
        return torch.stack([self._storage.keys[1:, slots], self._storage.values[1:, slots]])
