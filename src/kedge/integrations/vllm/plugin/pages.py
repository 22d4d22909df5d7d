"""vLLM's own pages as KV that Kedge can read and write, whatever the attention backend's layout.

KV is written with the model's own op. How that op lays out a block is found by writing numbered tokens into a scratch
block, so no backend is recognised by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kedge.errors import TranslationRefused
from kedge.kv.rotary import Rotary
from kedge.kv.segment import KVSegment
from kedge.kv.storage import SlotTable, add_offsets

_BASE = 128
"""Base of the digits that number the places in a block: smaller integers are exact in every dtype that is served"""
_SKIPPED = -1
"""Stands in a table for the slot of a position that is not to be written"""


class Layer(NamedTuple):
    """An attention layer (`vllm.model_executor.layers.attention.Attention`) and its pages [blocks, …]."""

    layer: Any
    pages: Tensor

    def store(self, keys: Tensor, values: Tensor, pages: Tensor, slots: Tensor) -> None:
        """Write rotated keys and values [tokens, kv_heads, head_dim] to `slots` [tokens] with the model's own op."""
        self.layer.impl.do_kv_cache_update(self.layer, keys, values, pages, slots)


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
class BlockLayout:
    """The places of keys and values in a block of one attention backend."""

    keys: Places
    values: Places

    @classmethod
    def probe(cls, layer: Layer, block_size: int) -> BlockLayout:
        """Find the layout of a layer. Raises `TranslationRefused` where a block is more than its tokens' numbers."""
        shape = (2, block_size, layer.layer.num_kv_heads, layer.layer.head_size)
        scratch = torch.zeros_like(layer.pages[:1])
        numbers = torch.arange(scratch.numel(), device=scratch.device)
        if scratch.numel() != torch.Size(shape).numel() or not scratch.dtype.is_floating_point:
            raise TranslationRefused(
                "pages", tuple(scratch.shape), f"a block must be the {shape} numbers of its tokens"
            )
        slots, found, power = torch.arange(block_size, device=scratch.device), torch.zeros_like(numbers), 1
        while power < len(numbers):
            keys, values = (numbers // power % _BASE).to(scratch.dtype).view(shape)
            layer.store(keys.contiguous(), values.contiguous(), scratch, slots)
            found += scratch.reshape(-1).long() * power
            power *= _BASE
        if not torch.equal(found.sort().values, numbers):
            raise TranslationRefused(
                "pages", tuple(scratch.shape), "the backend does not keep keys and values as given"
            )
        keys, values = found.argsort().view(shape)
        return cls(Places.of(keys), Places.of(values))

    def read(self, pages: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys (rotated) and values of `blocks`, each [blocks, block_size, kv_heads, head_dim]."""
        rows = pages[blocks].reshape(len(blocks), -1)
        return self.keys.read(rows), self.values.read(rows)


class Pages:
    """The KV of one rank. Reads and writes as `kedge.kv.storage.PagedStorage` does."""

    def __init__(self, layers: Sequence[Layer], block_size: int, rotary: Rotary) -> None:
        """`layers` are in the model's order and have the same shape. Raises `TranslationRefused` as `probe` does."""
        self._layers, self._block_size, self._rotary = layers, block_size, rotary
        self._layout = BlockLayout.probe(layers[0], block_size)
        self._device = layers[0].pages.device

    @property
    def empty(self) -> KVSegment:
        """KV of no tokens, of this rank's shape, dtype and device."""
        shape = len(self._layers), *self._layout.keys.index.shape[1:]
        return KVSegment.empty(shape, self._layers[0].pages.dtype, self._device)

    def synchronize(self) -> None:
        """Wait for what the device has been given so far: another thread has a stream of its own there."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def first(self, tokens: int) -> SlotTable:
        """Return the slots of the first so many tokens, or of all there are."""
        return SlotTable(torch.arange(min(tokens, len(self._layers[0].pages) * self._block_size)))

    def table(self, blocks: Sequence[int], only: Sequence[range] | None = None) -> SlotTable:
        """Return the slots of a request with these blocks. Nothing is written to positions that are not in `only`."""
        table = SlotTable.of(blocks, self._block_size)
        if only is None:
            return table
        slots = torch.full_like(table.slots, _SKIPPED)
        for span in only:
            slots[span.start : span.stop] = table.slots[span.start : span.stop]
        return SlotTable(slots)

    def read(self, table: SlotTable, start: int, stop: int) -> KVSegment:
        """Return a copy of positions [start, stop) of a request, keys unrotated."""
        size = self._block_size
        first = start // size
        blocks = (table.slots[first * size : stop : size] // size).to(self._device)
        part = slice(start - first * size, stop - first * size)
        shape = (2, len(self._layers), len(blocks), *self._layout.keys.index.shape)
        read = self._layers[0].pages.new_empty(shape)  # torch.stack would keep the strides of its arguments
        for number, layer in enumerate(self._layers):
            read[0, number], read[1, number] = self._layout.read(layer.pages, blocks)
        keys, values = read.flatten(2, 3)[:, :, part]
        return KVSegment(self._rotary.unrotate(keys, slice(start, stop)), values.contiguous())

    def write(self, table: SlotTable, start: int, base: KVSegment, offsets: KVSegment) -> None:
        """Write `base` plus `offsets` (of all layers but the first) to the positions from `start` on, keys rotated."""
        self.store(table, start, self.translated(start, base, offsets))

    def put(self, table: SlotTable, start: int, kv: KVSegment) -> None:
        """Write `kv` to the positions from `start` on, keys rotated, but to none that the table leaves out."""
        self.store(table, start, KVSegment(self._rotated(kv.keys, start), kv.values))

    def translated(self, start: int, base: KVSegment, offsets: KVSegment) -> KVSegment:
        """Return `base` plus `offsets` (of all layers but the first), its keys rotated to the positions from `start`
        on.
        """
        keys, values = torch.empty_like(base.keys), torch.empty_like(base.values)
        add_offsets(base.keys, offsets.keys, out=keys)
        add_offsets(base.values, offsets.values, out=values)
        return KVSegment(self._rotated(keys, start), values)

    def _rotated(self, keys: Tensor, start: int) -> Tensor:
        rotated = torch.empty_like(keys)
        self._rotary.rotate(keys, slice(start, start + keys.shape[1]), out=rotated)
        return rotated

    def store(self, table: SlotTable, start: int, kv: KVSegment) -> None:
        """Write `kv`, whose keys are rotated, to the positions from `start` on, but to none that the table leaves
        out.
        """
        slots, rotated, values = table.slots[start : start + kv.tokens], kv.keys, kv.values
        written = slots != _SKIPPED
        if not written.any():
            return
        if not written.all():
            slots, chosen = slots[written], written.nonzero().flatten().to(self._device)
            rotated, values = rotated[:, chosen], values[:, chosen]
        slots = slots.to(self._device)
        for number, layer in enumerate(self._layers):
            layer.store(rotated[number], values[number].contiguous(), layer.pages, slots)


class RopeModule(nn.Module):
    """vLLM's table of cosines and sines with the interface of Transformers' rotary modules."""

    def __init__(self, table: Tensor) -> None:
        """`table` [positions, rotary_dim] has cosines, then sines (`RotaryEmbedding.cos_sin_cache`)."""
        super().__init__()
        self._table = table

    def forward(self, probe: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [1, positions, rotary_dim] each, in the dtype of `probe`."""
        cos, sin = self._table[position_ids].to(probe.dtype).chunk(2, dim=-1)
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def rotation_error(tokens: Sequence[int], first_layer: Tensor) -> float | None:
    """Return how much the unrotated keys [tokens, kv_heads, head_dim] of equal tokens differ, relative to their norm.

    In the first layer a key depends on nothing but its token and its position. So this is zero, up to rounding, if
    keys were rotated back as the model rotates them. None if no token occurs twice.
    """
    seen: dict[int, int] = {}
    pairs = [(seen.setdefault(token, at), at) for at, token in enumerate(tokens)]
    repeated = [(a, b) for a, b in pairs if a != b]
    if not repeated:
        return None
    one, other = (
        first_layer[torch.tensor(side, device=first_layer.device)].float() for side in zip(*repeated, strict=True)
    )
    return float((one - other).norm() / one.norm().clamp_min(1e-30))


def memory_order(pages: Tensor) -> Tensor:
    """Return a view of pages [blocks, …] with its dimensions in the order of their strides, blocks first."""
    strides = pages.stride()
    inner = sorted(range(1, pages.ndim), key=strides.__getitem__, reverse=True)
    return pages.permute(0, *inner)
