"""Where the keys and values of a block are, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.integrations.vllm.plugin.block_axes import BlockAxis
from kedge.integrations.vllm.plugin.kv_layers import KVLayer


@dataclass(frozen=True, slots=True)
class Places:
    """Positions of a block's keys, or of its values, in the block as a flat row."""

    index: Tensor
    """int64 [block_size, kv_heads, head_dim]"""
    first: int
    strides: tuple[int, ...] | None
    """Strides of a view of the row, from `first` on, with the same numbers, if there is one: four times as fast"""

    @classmethod
    def of(cls, index: Tensor) -> Places:
        """Return places from their index, as a strided view where that is possible."""
        first, regular = int(index[0, 0, 0]), torch.zeros_like(index)
        strides = []
        for axis, size in enumerate(index.shape):
            strides.append(int(index.select(axis, min(1, size - 1))[0, 0]) - first)
            regular += (torch.arange(size, device=index.device) * strides[-1]).view(-1, *[1] * (2 - axis))
        is_view = min(strides) >= 0 and torch.equal(first + regular, index)
        return cls(index, first, tuple(strides) if is_view else None)

    def read(self, rows: Tensor) -> Tensor:
        """Return the numbers of `rows` [blocks, numbers of a block] as [blocks, block_size, kv_heads, head_dim]."""
        if self.strides is None:
            return rows[:, self.index]
        return rows.as_strided((len(rows), *self.index.shape), (rows.stride(0), *self.strides), self.first)


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How pages keep a number: as it is, or as a float of 8 bits that is multiplied by a scale of its layer."""

    float8: torch.dtype | None = None

    def plain(self, codes: Tensor) -> Tensor:
        """Return what is kept, without the scale."""
        return codes if self.float8 is None else codes.view(self.float8).float()

    def decoded(self, codes: Tensor, scale: Any, dtype: torch.dtype) -> Tensor:
        """Return the numbers that attention sees, in `dtype`."""
        return codes.to(dtype) if self.float8 is None else (self.plain(codes) * scale).to(dtype)

    @property
    def rounding(self) -> float:
        """The largest relative error of a kept number, 0 where it is kept as it is."""
        return 0.0 if self.float8 is None else torch.finfo(self.float8).eps / 2

    def nearest(self, given: Tensor, scale: Any) -> Tensor:
        """Return the nearest numbers, in the dtype of `given`, that pages in this format can keep."""
        return given if self.float8 is None else (self._nearest(given, scale) * scale).to(given.dtype)

    def writable(self, given: Tensor, scale: Any) -> Tensor:
        """Return what vLLM's op keeps as the numbers nearest to `given`, whether it rounds or, as on x86, truncates."""
        if self.float8 is None:
            return given
        above = 1 + self.rounding / 4  # by less than half a step, by more than an error of dividing by the scale
        most = torch.finfo(given.dtype).max
        return (self._nearest(given, scale) * (scale * above)).clamp(-most, most).to(given.dtype)

    def _nearest(self, given: Tensor, scale: Any) -> Tensor:
        assert self.float8 is not None
        most = self._most(scale, given)
        return (given.float() / scale).clamp(-most, most).to(self.float8).float()

    def _most(self, scale: Any, like: Tensor) -> Tensor:
        """Return the largest number that the dtype of `like` holds, before it rounds, once multiplied by the scale."""
        assert self.float8 is not None
        finite = torch.full((), torch.finfo(like.dtype).max, device=like.device, dtype=torch.float32)
        most = (finite / scale).clamp(max=torch.finfo(self.float8).max).to(self.float8)
        one_less = (most.view(torch.uint8) - 1).view(self.float8)
        return torch.where(most.float() * scale <= finite, most.float(), one_less.float())


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The places of keys and values in the blocks of a layer, and the format of their numbers."""

    axis: BlockAxis
    numbers: NumberFormat
    keys: Places
    values: Places

    def read(self, layer: KVLayer, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys (rotated) and values of `blocks`, each [blocks, block_size, kv_heads, head_dim]."""
        rows = self.axis.blocks(layer.codes)[blocks].reshape(len(blocks), -1)
        of_keys, of_values = self.scales(layer)
        keys = self.numbers.decoded(self.keys.read(rows), of_keys, layer.dtype)
        return keys, self.numbers.decoded(self.values.read(rows), of_values, layer.dtype)

    def store(self, layer: KVLayer, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write rotated keys and values [tokens, kv_heads, head_dim] to `slots` [tokens], rounded to the nearest."""
        of_keys, of_values = self.scales(layer)
        layer.store(self.numbers.writable(keys, of_keys), self.numbers.writable(values, of_values), slots)

    def scales(self, layer: KVLayer) -> tuple[Any, Any]:
        """Return what a layer's kept keys and values are multiplied by, where they are."""
        return layer.scales if self.numbers.float8 else (1.0, 1.0)
