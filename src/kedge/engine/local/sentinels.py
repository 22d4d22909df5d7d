"""Sentinel tokens: a few tokens of every translated value that the model computes as well.

What translation wrote for them is remembered and compared with what the model computes, in the same pass that computes
the rest of the prompt. It costs these tokens, and no other pass. Where the two are far apart, something is wrong with
what translation is made from, and the prompt is computed before its first token is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.kv.storage import PagedStorage, SlotTable


@dataclass(frozen=True, slots=True)
class SentinelRows:
    """Translated KV of sentinel tokens, before the model computes them."""

    positions: tuple[int, ...]
    keys: Tensor
    """As attention reads them, rotated: [layers - 1, tokens, kv_heads, head_dim]"""
    values: Tensor
    """[layers - 1, tokens, kv_heads, head_dim]"""


class Sentinels:
    """Sentinel tokens in one storage. The first layer is left out: its KV depends on no context."""

    def __init__(self, storage: PagedStorage) -> None:
        self._storage = storage

    def read(self, table: SlotTable, positions: Sequence[int]) -> SentinelRows:
        """Return the KV at these positions as it is now."""
        slots = table.slots[torch.tensor(positions, dtype=torch.int64)].to(self._storage.keys.device)
        keys, values = self._storage.keys[1:, slots], self._storage.values[1:, slots]
        return SentinelRows(tuple(positions), keys, values)

    def errors(self, table: SlotTable, before: SentinelRows) -> list[float]:
        """Return for each sentinel the relative error of what translation wrote: the norm of the difference over that
        of the computed KV, keys or values, whichever is larger.
        """
        now = self.read(table, before.positions)
        pairs = (before.keys, now.keys), (before.values, now.values)
        return torch.stack([_relative(*pair) for pair in pairs]).amax(0).tolist()


def _relative(translated: Tensor, computed: Tensor) -> Tensor:
    """Return the relative error of each token, over all layers [tokens]."""
    translated, computed = translated.float(), computed.float()
    dims = (0, 2, 3)
    return (translated - computed).square().sum(dims).sqrt() / computed.square().sum(dims).sqrt().clamp(min=1e-12)
