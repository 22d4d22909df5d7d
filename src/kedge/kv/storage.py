"""The device tier's memory: one pool of KV slots per layer, in blocks, with keys rotated as attention reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from kedge.kv.rotary import Rotary, Rotation
from kedge.kv.segment import KVSegment
from kedge.kv.spec import KVSpec

Runs = tuple[slice, ...]
"""Slots in order of positions, as contiguous slices; most requests have one or two."""


@dataclass(frozen=True, slots=True)
class SlotTable:
    """The map from a request's positions to slots."""

    slots: Tensor
    """int64 [capacity], on the CPU"""

    @classmethod
    def of(cls, blocks: Sequence[int], block_size: int) -> Self:
        """Return the slots of `blocks`, in their order."""
        starts = torch.tensor(blocks, dtype=torch.int64) * block_size
        return cls((starts[:, None] + torch.arange(block_size)).flatten())

    def runs(self, start: int, stop: int) -> Runs:
        """Return the slots of positions [start, stop) as contiguous slices."""
        slots = self.slots[start:stop]
        if not len(slots):
            return ()
        edges = [0, *(i + 1 for i in (slots.diff() != 1).nonzero().flatten().tolist()), len(slots)]
        first = slots[torch.tensor(edges[:-1])].tolist()
        return tuple(slice(slot, slot + b - a) for slot, (a, b) in zip(first, pairwise(edges), strict=True))


@dataclass(frozen=True, slots=True)
class KernelSlots:
    """The slots of all layers as Kedge's Triton kernels find them, with a head's dimensions side by side."""

    addresses: Tensor
    """int64 [2, layers], on the device: where the keys and the values of each layer begin, multiples of 16"""
    block_size: int
    strides: tuple[int, int, int]
    """Numbers from one block, token and head to the next, of keys as of values"""
    rotary: Rotary
    """Of all layers, with tables"""


def has_kernels(device: torch.device) -> bool:
    """Return whether Kedge's Triton kernels can run: on a GPU, where Triton comes with PyTorch (on Linux) and finds
    what it needs to build them.
    """
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    from kedge.kv.attention_kernel import can_build

    return can_build(device)


def kernel_slots(
    addresses: Sequence[Sequence[int]], pages: Tensor, block_size: int, strides: tuple[int, int, int], rotary: Rotation
) -> KernelSlots | None:
    """Return the slots of layers on the device of `pages`; None where layers are not rotated alike, in halves."""
    is_aligned = not any(one % 16 for side in addresses for one in side)
    if not is_aligned or not isinstance(rotary, Rotary) or rotary.tables is None:
        return None
    return KernelSlots(torch.tensor(addresses, device=pages.device), block_size, strides, rotary)


class PagedStorage:
    """The keys and values of all slots, each [layers, slots, kv_heads, head_dim]; a slot holds one token of one
    request. What a layer does not fill, where layers have different shapes, is zero.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, block_size: int, device: torch.device, rotary: Rotation) -> None:
        self.spec, self.block_size, self.rotary = spec, block_size, rotary
        shape = (spec.layers, num_blocks * block_size, spec.kv_heads, spec.head_dim)
        if spec.latent:  # one row for each token, values in its first half: attention reads it whole
            rows = torch.empty(*shape[:-1], 2 * shape[-1], dtype=spec.dtype, device=device)
            self.keys, self.values = halves(rows)
        else:
            allocate = torch.zeros if spec.shapes else torch.empty
            self.keys, self.values = (allocate(shape, dtype=spec.dtype, device=device) for _ in range(2))
        self.parts = layer_parts(spec, self.keys, self.values)
        """The keys and values of each layer as they are written, each [slots, kv_heads, key_dim]: views"""
        self.pools = [(layer, layer) for layer in rows] if spec.latent else self.parts
        """The keys and values of each layer as attention reads them: with a latent both are the whole row [slots, 1,
        latent + rotary_dim], else `parts`
        """

    @property
    def has_kernels(self) -> bool:
        """Whether Kedge's Triton kernels can run on it."""
        return has_kernels(self.keys.device)

    @property
    def kernel_slots(self) -> KernelSlots | None:
        """Its slots for kernels; None where they cannot run, or not all layers are rotated alike."""
        if not self.has_kernels:
            return None
        addresses = [[layer.data_ptr() for layer in pool] for pool in (self.keys, self.values)]
        return kernel_slots(addresses, self.keys, 1, (self.keys.stride(1), 0, self.keys.stride(2)), self.rotary)

    def store(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write one layer's rotated keys [tokens, kv_heads, key_dim] and values [tokens, kv_heads, value_dim] to
        `slots` [tokens].
        """
        key_pool, value_pool = self.parts[layer]
        key_pool.index_copy_(0, slots, keys)
        if values.shape[2] < value_pool.shape[2]:
            value_pool = value_pool[..., : values.shape[2]]
        value_pool.index_copy_(0, slots, values)

    def read(self, table: SlotTable, start: int, stop: int) -> KVSegment:
        """Return a copy of positions [start, stop) of a request, keys unrotated."""
        runs = table.runs(start, stop)
        keys = torch.cat([self.keys[:, run] for run in runs], dim=1)
        values = torch.cat([self.values[:, run] for run in runs], dim=1)
        return KVSegment(self.rotary.unrotate(keys, slice(start, stop)), values)

    def write(self, table: SlotTable, start: int, base: KVSegment, offsets: KVSegment | None) -> None:
        """Write `base` plus `offsets` (of all layers but the first, which has offset zero; None: of no layer) to the
        positions from `start` on, with keys rotated to them. Bound by memory: the sum of the keys is copied on the way
        and, where the slots are scattered, the result.
        """
        runs = table.runs(start, start + base.tokens)
        if len(runs) == 1:
            self._translate(start, base, offsets, KVSegment(self.keys[:, runs[0]], self.values[:, runs[0]]))
            return
        made, done = KVSegment(torch.empty_like(base.keys), torch.empty_like(base.values)), 0
        self._translate(start, base, offsets, made)
        for run in runs:
            part = made.slice(done, done := done + run.stop - run.start)
            self.keys[:, run], self.values[:, run] = part.keys, part.values

    def _translate(self, start: int, base: KVSegment, offsets: KVSegment | None, out: KVSegment) -> None:
        total, positions = base.keys, slice(start, start + base.tokens)
        if offsets is None:
            out.values.copy_(base.values)
        else:
            add_offsets(base.keys, offsets.keys, out=(total := torch.empty_like(base.keys)))
            add_offsets(base.values, offsets.values, out=out.values)
        self.rotary.rotate(total, positions, out=out.keys)

    def copy_beginning(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of block `source` to block `target`, for the same positions."""
        there, here = source * self.block_size, target * self.block_size
        for pool in (self.keys, self.values):
            pool[:, here : here + tokens] = pool[:, there : there + tokens]


def halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [..., latent + rotary_dim] as keys, their second half, and values, their first: views."""
    values, keys = rows.chunk(2, dim=-1)
    return keys, values


def layer_parts(spec: KVSpec, keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return each layer's part of keys and values. Values are read as wide as keys, which fused kernels require."""
    if not spec.shapes:
        return list(zip(keys, values, strict=True))
    parts = zip(keys, values, spec.shapes, strict=True)
    return [(k[:, : of.kv_heads, : of.key_dim], v[:, : of.kv_heads, : of.key_dim]) for k, v, of in parts]


def add_offsets(base: Tensor, offsets: Tensor, out: Tensor) -> None:
    """Write `base` [layers, ...] plus `offsets` [layers - 1, ...], in the dtype of `base`."""
    out[0] = base[0]
    if offsets.dtype == base.dtype:
        torch.add(base[1:], offsets, out=out[1:])
    else:  # converted into the result: a tensor of converted offsets would be written and read on top
        out[1:].copy_(offsets).add_(base[1:])
