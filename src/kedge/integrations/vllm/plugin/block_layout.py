"""Where the keys and values of a block are: found by writing with vLLM's own op, and assumed of no attention backend.

The places of numbered keys and values in a block are found first. Then they are tried with random numbers in random
order, layer by layer, and anything that is not clear is refused with its reason. It happens once, when vLLM registers
the pages and no request has any; what was in the blocks is put back.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from kedge.errors import LayoutUnknown

_FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class KVLayer(NamedTuple):
    """An attention layer (`Attention` of vLLM's `model_executor.layers.attention`) and its pages."""

    layer: Any
    pages: Tensor
    """As vLLM registers them with a connector"""
    dtype: torch.dtype
    """Of the keys and values that the model computes"""
    num_blocks: int

    @property
    def shape(self) -> tuple[int, int]:
        """(kv_heads, head_dim)"""
        return self.layer.num_kv_heads, self.layer.head_size

    @property
    def blocks(self) -> Tensor:
        """The pages as [blocks, …]; bytes where a number has 8 bits, since PyTorch does little with float8."""
        blocks = blocks_of(self.pages, self.num_blocks)
        return blocks.view(torch.uint8) if blocks.itemsize == 1 else blocks

    @property
    def scales(self) -> tuple[Any, Any]:
        """What vLLM divides keys and values by before it keeps them in 8 bits, as they are now."""
        return self.layer._k_scale, self.layer._v_scale

    def store(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write rotated keys and values [tokens, kv_heads, head_dim] to `slots` [tokens] with the model's own op."""
        self.layer.impl.do_kv_cache_update(self.layer, keys, values, self.pages, slots)


def blocks_of(pages: Tensor, num_blocks: int) -> Tensor:
    """Return a view of a layer's pages as [blocks, parts, …]. vLLM counts blocks by the first dimension of all its
    caches, and smaller ones where the attention backend works on these. Raises `LayoutUnknown` for other pages.
    """
    if pages.shape[0] % num_blocks:
        raise LayoutUnknown("pages", tuple(pages.shape), f"the first dimension does not count {num_blocks} blocks")
    return pages.unflatten(0, (num_blocks, -1))


def slots_of(block: int, block_size: int, device: torch.device) -> Tensor:
    """Return the slots of a block, int64 [block_size]."""
    return torch.arange(block * block_size, (block + 1) * block_size, device=device)


@contextmanager
def restored(view: Tensor, blocks: list[int]) -> Iterator[None]:
    """Put back what some blocks of a view [blocks, …] held."""
    before = view[blocks]
    try:
        yield
    finally:
        view[blocks] = before


@contextmanager
def own_errors(layer: KVLayer) -> Iterator[None]:
    """Turn whatever a backend's op raises into a `LayoutUnknown`: the rest of the plug-in goes on."""
    try:
        yield
    except LayoutUnknown:
        raise
    except Exception as error:
        why = f"writing KV with the op of {type(layer.layer.impl).__name__} failed: {error!r}"
        raise LayoutUnknown("pages", tuple(layer.pages.shape), why) from error


def memory_order(blocks: Tensor) -> Tensor:
    """Return a view of [blocks, …] with its other dimensions in the order of their strides."""
    strides = blocks.stride()
    inner = sorted(range(1, blocks.ndim), key=strides.__getitem__, reverse=True)
    return blocks.permute(0, *inner)


@dataclass(frozen=True, slots=True)
class Places:
    """Positions of a block's keys, or of its values, in the block as a flat row."""

    index: Tensor
    """int64 [block_size, kv_heads, head_dim]"""
    first: int
    strides: tuple[int, ...] | None
    """Strides of a view of the row, from `first` on, with the same numbers, if there is one: four times as fast"""

    @classmethod
    def of(cls, index: Tensor) -> Self:
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
        # the largest number that the dtype of `given` holds, before it rounds, once multiplied by the scale
        finite = torch.full((), torch.finfo(given.dtype).max, device=given.device, dtype=torch.float32)
        most = (finite / scale).clamp(max=torch.finfo(self.float8).max).to(self.float8)
        one_less = (most.view(torch.uint8) - 1).view(self.float8)
        most = torch.where(most.float() * scale <= finite, most.float(), one_less.float())
        return (given.float() / scale).clamp(-most, most).to(self.float8).float()


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The places of keys and values in the blocks of a layer, and the format of their numbers."""

    numbers: NumberFormat
    keys: Places
    values: Places

    def read(self, layer: KVLayer, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys (rotated) and values of `blocks`, each [blocks, block_size, kv_heads, head_dim]."""
        rows = layer.blocks[blocks].reshape(len(blocks), -1)
        of_keys, of_values = self.scales(layer)
        keys = self.numbers.decoded(self.keys.read(rows), of_keys, layer.dtype)
        return keys, self.numbers.decoded(self.values.read(rows), of_values, layer.dtype)

    def store(self, layer: KVLayer, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write rotated keys and values [tokens, kv_heads, head_dim] to `slots` [tokens], rounded to the nearest."""
        of_keys, of_values = self.scales(layer)
        layer.store(self.numbers.writable(keys, of_keys), self.numbers.writable(values, of_values), slots)

    def in_memory(self, block: Tensor) -> tuple[Places, Places]:
        """Return the places of a block's keys and values in memory, from its first number on."""
        places = torch.zeros((), dtype=torch.int64)
        for size, stride in zip(block.shape, block.stride(), strict=True):
            places = places[..., None] + torch.arange(size) * stride
        keys, values = (Places.of(places.flatten()[one.index.cpu()]) for one in (self.keys, self.values))
        return keys, values

    def scales(self, layer: KVLayer) -> tuple[Any, Any]:
        """Return what a layer's kept keys and values are multiplied by, where they are."""
        return layer.scales if self.numbers.float8 else (1.0, 1.0)


def find_layouts(layers: Sequence[KVLayer], block_size: int) -> list[BlockLayout]:
    """Find the layout of each layer's blocks, by the first two and the last one.

    Raises `LayoutUnknown` where a layer does not keep keys and values in places, and in a format, that it finds.
    """
    if len({layer.pages.data_ptr() for layer in layers}) < len(layers):
        raise _unknown(layers[0], "a layer has no KV of its own: it shares another's")
    found = list[BlockLayout]()
    for layer in layers:
        view, probed = layer.blocks, sorted({0, 1, layer.num_blocks - 1})
        with restored(view, probed), own_errors(layer):
            slots = torch.cat([slots_of(block, block_size, view.device) for block in probed])
            if found:  # a layer may have the layout of the one before it
                last, is_byte = found[-1], layer.pages.itemsize == 1
                is_alike = last.keys.index.shape[1:] == layer.shape
                if is_alike and is_byte == bool(last.numbers.float8) and _is_right(layer, last, slots):
                    found.append(last)
                    continue
            for numbers in _formats(layer):
                if (index := _index(layer, numbers, view, probed, block_size)) is not None:
                    found.append(BlockLayout(numbers, *map(Places.of, index)))
                    break
            else:
                raise _unknown(layer, "the backend does not keep keys and values as given")
            if not _is_right(layer, found[-1], slots):
                raise _unknown(layer, "keys and values that were written are not read again")
    return found


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
    shape = torch.Size((2, block_size, *layer.shape))
    count = shape.numel()
    ordinals = torch.arange(count, device=view.device)
    base = 128 if numbers.float8 is None else 8  # so many integers from 1 on are exact in every dtype
    scales = layer.scales if numbers.float8 else (1, 1)
    found, power = torch.zeros(len(probed), view[0].numel(), dtype=torch.int64, device=view.device), 1
    is_used = None
    while power < count or power == 1:
        view[probed] = 0
        digits = (ordinals // power % base + 1).view(shape)
        keys, values = (
            numbers.writable((one * scale).to(layer.dtype), scale) for one, scale in zip(digits, scales, strict=True)
        )
        for block in probed:
            layer.store(keys.contiguous(), values.contiguous(), slots_of(block, block_size, view.device))
        kept = numbers.plain(torch.stack([view[block].reshape(-1) for block in probed])).float()
        was_used, is_used = is_used, kept != 0
        are_digits = ((kept == kept.round()) & (kept >= 0) & (kept <= base)).all()
        if not are_digits or (was_used is not None and not torch.equal(was_used, is_used)):
            return None
        found += (kept.long() - 1) * power
        power *= base
    assert is_used is not None
    if not (torch.equal(found, found[:1].expand_as(found)) and torch.equal(is_used, is_used[:1].expand_as(is_used))):
        return None  # not in the same places of all blocks
    used = is_used[0].nonzero().flatten()
    held = found[0, used]
    if len(used) != count or not torch.equal(held.sort().values, ordinals):
        return None  # not each of them once
    keys, values = used[held.argsort()].view(shape)
    return keys, values


def _is_right(layer: KVLayer, layout: BlockLayout, slots: Tensor) -> bool:
    """Write random keys and values to blocks' slots in random order, and return whether they are read again, and
    negative zeros as zeros.
    """
    random = torch.Generator().manual_seed(0)  # vLLM samples with the global one
    order = torch.randperm(len(slots), generator=random).to(slots.device)
    drawn = torch.randn((2, len(slots), *layer.shape), generator=random).to(slots.device)
    scales, numbers = layout.scales(layer), layout.numbers
    keys, values = ((one * scale).to(layer.dtype) for one, scale in zip(drawn, scales, strict=True))
    layout.store(layer, keys[order], values[order], slots[order])
    kept = [numbers.nearest(one, scale) for one, scale in zip((keys, values), scales, strict=True)]
    if numbers.float8 is None:
        kept = [one.to(layer.pages.dtype).to(layer.dtype) for one in kept]
    if not all(map(torch.equal, _read(layer, layout, slots), kept)):
        return False
    # some formats differ in nothing but negative zeros and a factor
    zeros = torch.full((len(slots), *layer.shape), -0.0, dtype=layer.dtype, device=slots.device)
    layer.store(zeros, zeros, slots)
    return not any(one.any() for one in _read(layer, layout, slots))


def _read(layer: KVLayer, layout: BlockLayout, slots: Tensor) -> list[Tensor]:
    """Return the keys and values of some blocks' slots, each [tokens, kv_heads, head_dim]."""
    size = len(layout.keys.index)
    return [one.flatten(0, 1) for one in layout.read(layer, slots[::size] // size)]
