"""How vLLM lays out a block: found by writing numbered keys and values with vLLM's own op, and looking where they are.

No backend is recognised by its name. What was found is tried with random numbers in random order, layer by layer, and
anything that is not clear is refused with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kedge.errors import LayoutUnknown
from kedge.integrations.vllm.plugin.block_axes import (
    BlockAxis,
    clear,
    find_block_axis,
    own_errors,
    probed_blocks,
    restored,
    slots_of,
)
from kedge.integrations.vllm.plugin.block_layout import BlockLayout, NumberFormat, Places
from kedge.integrations.vllm.plugin.kv_layers import KVLayer

_FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def find_block_axes(layers: Sequence[KVLayer], num_blocks: int, block_size: int) -> list[BlockAxis]:
    """Find the blocks of each layer. Raises `LayoutUnknown` where that is not possible for one of them."""
    return [find_block_axis(layer, num_blocks, block_size) for layer in layers]


def find_layouts(
    layers: Sequence[KVLayer], axes: Sequence[BlockAxis], num_blocks: int, block_size: int
) -> list[BlockLayout]:
    """Find the layout of each layer's blocks. `axes`: from `find_block_axes`, of the same layers.

    Raises `LayoutUnknown` where a layer does not keep keys and values in places, and in a format, that it finds.
    """
    if len({layer.pages.data_ptr() for layer in layers}) < len(layers):
        raise _unknown(layers[0], "a layer has no KV of its own: it shares another's")
    probed, found = probed_blocks(num_blocks), list[BlockLayout]()
    for layer, axis in zip(layers, axes, strict=True):
        view = axis.blocks(layer.codes)
        with restored([view], probed), own_errors(layer):
            slots = torch.cat([slots_of(block, block_size, view.device) for block in probed])
            if found and _may_share(found[-1], layer, axis) and _is_right(layer, found[-1], slots):
                found.append(found[-1])
                continue
            found.append(_layout(layer, axis, view, probed, block_size))
            if not _is_right(layer, found[-1], slots):
                raise _unknown(layer, "keys and values that were written are not read again")
    return found


def _may_share(layout: BlockLayout, layer: KVLayer, axis: BlockAxis) -> bool:
    """Return whether a layer may have the layout of the one before it, which is then tried."""
    is_byte = layer.pages.itemsize == 1
    return layout.axis == axis and layout.keys.index.shape[1:] == layer.shape and is_byte == bool(layout.numbers.float8)


def _layout(layer: KVLayer, axis: BlockAxis, view: Tensor, probed: list[int], block_size: int) -> BlockLayout:
    for numbers in _formats(layer):
        if (index := _index(layer, numbers, view, probed, block_size)) is not None:
            return BlockLayout(axis, numbers, *map(Places.of, index))
    raise _unknown(layer, "the backend does not keep keys and values as given")


def _unknown(layer: KVLayer, why: str) -> LayoutUnknown:
    return LayoutUnknown("pages", tuple(layer.pages.shape), why)


def _formats(layer: KVLayer) -> list[NumberFormat]:
    """Return the formats in which the numbers of a layer may be kept."""
    pages, size = layer.pages, layer.layer.head_size
    if getattr(layer.layer, "head_size_v", size) != size:
        raise _unknown(layer, "keys and values differ in size")
    if pages.itemsize > 1:
        if not pages.dtype.is_floating_point:
            raise _unknown(layer, f"its numbers are {pages.dtype}")
        return [NumberFormat()]
    if any(not isinstance(scale, float) and scale.numel() != 1 for scale in layer.scales):
        raise _unknown(layer, "its 8-bit numbers have a scale for each head")
    return [NumberFormat(float8) for float8 in _FLOATS8 if pages.dtype in (torch.uint8, float8)]


def _index(
    layer: KVLayer, numbers: NumberFormat, view: Tensor, probed: list[int], block_size: int
) -> tuple[Tensor, Tensor] | None:
    """Return the places of keys and values in a block, each [block_size, kv_heads, head_dim], or None.

    Every number of a token is written digit by digit, and every place is to hold the digits of one number, or is never
    written.
    """
    shape = (2, block_size, *layer.shape)
    count = torch.Size(shape).numel()
    ordinals = torch.arange(count, device=view.device)
    base = 128 if numbers.float8 is None else 8  # so many integers from 1 on are exact in every dtype
    found, power = torch.zeros(len(probed), view[0].numel(), dtype=torch.int64, device=view.device), 1
    is_used = None
    while power < count or power == 1:
        _store(layer, numbers, (ordinals // power % base + 1).view(shape), probed, block_size, view)
        kept = numbers.plain(torch.stack([view[block].reshape(-1) for block in probed])).float()
        was_used, is_used = is_used, kept != 0
        if (was_used is not None and not torch.equal(was_used, is_used)) or not _are_digits(kept, base):
            return None
        found += (kept.long() - 1) * power
        power *= base
    return _places(found, is_used, shape)


def _are_digits(kept: Tensor, base: int) -> bool:
    return bool(((kept == kept.round()) & (kept >= 0) & (kept <= base)).all())


def _places(found: Tensor, is_used: Tensor | None, shape: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    """Return the places of numbers from 0 on, if all blocks have each of them once, in the same place."""
    assert is_used is not None
    count = torch.Size(shape).numel()
    if not (torch.equal(found, found[:1].expand_as(found)) and torch.equal(is_used, is_used[:1].expand_as(is_used))):
        return None
    used = is_used[0].nonzero().flatten()
    held = found[0, used]
    if len(used) != count or not torch.equal(held.sort().values, torch.arange(count, device=held.device)):
        return None
    keys, values = used[held.argsort()].view(tuple(shape))
    return keys, values


def _store(
    layer: KVLayer, numbers: NumberFormat, digits: Tensor, probed: list[int], block_size: int, view: Tensor
) -> None:
    """Write small integers [2, block_size, kv_heads, head_dim] as keys and values of every probed block."""
    clear([view], probed)
    scales = layer.scales if numbers.float8 else (1, 1)
    keys, values = (
        numbers.writable((one * scale).to(layer.dtype), scale) for one, scale in zip(digits, scales, strict=True)
    )
    for block in probed:
        layer.store(keys.contiguous(), values.contiguous(), slots_of(block, block_size, view.device))


def _is_right(layer: KVLayer, layout: BlockLayout, slots: Tensor) -> bool:
    """Write random keys and values to blocks' slots in random order, and return whether they are read again."""
    random = torch.Generator().manual_seed(0)  # vLLM samples with the global one
    order = torch.randperm(len(slots), generator=random).to(slots.device)
    drawn = torch.randn((2, len(slots), *layer.shape), generator=random).to(slots.device)
    scales, numbers = layout.scales(layer), layout.numbers
    keys, values = ((one * scale).to(layer.dtype) for one, scale in zip(drawn, scales, strict=True))
    layout.store(layer, keys[order], values[order], slots[order])
    kept = [numbers.nearest(one, scale) for one, scale in zip((keys, values), scales, strict=True)]
    if numbers.float8 is None:
        kept = [one.to(layer.pages.dtype).to(layer.dtype) for one in kept]
    return all(map(torch.equal, _read(layer, layout, slots), kept)) and _keeps_zeros(layer, layout, slots)


def _keeps_zeros(layer: KVLayer, layout: BlockLayout, slots: Tensor) -> bool:
    """Return whether negative zeros are read as zeros: some formats differ in nothing but these and a factor."""
    zeros = torch.full((len(slots), *layer.shape), -0.0, dtype=layer.dtype, device=slots.device)
    layer.store(zeros, zeros, slots)
    return not any(one.any() for one in _read(layer, layout, slots))


def _read(layer: KVLayer, layout: BlockLayout, slots: Tensor) -> list[Tensor]:
    """Return the keys and values of some blocks' slots, each [tokens, kv_heads, head_dim]."""
    size = len(layout.keys.index)
    return [one.flatten(0, 1) for one in layout.read(layer, slots[::size] // size)]
