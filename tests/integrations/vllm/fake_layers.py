"""Attention layers whose op writes KV in a layout that a test chooses, in plain PyTorch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kedge.integrations.vllm.plugin.block_layout import KVLayer

Keep = Callable[[Tensor], Tensor]
"""What is kept of keys or values [tokens, heads, dim]"""


@dataclass(frozen=True)
class Shape:
    blocks: int = 6
    size: int = 4
    heads: int = 2
    dim: int = 8


@dataclass(frozen=True)
class Layout:
    """Pages [blocks, 2, size, heads, dim], the blocks first, in memory with their dimensions in another `order`; from
    dimension `merged` of that on, two are one. `parts`: smaller blocks of which one is made.
    """

    order: Sequence[int] = (0, 1, 2, 3, 4)
    merged: int | None = None
    parts: int = 1

    def _sizes(self, shape: Shape) -> list[int]:
        """In the order of memory."""
        sizes = (shape.blocks * self.parts, 2, shape.size // self.parts, shape.heads, shape.dim)
        return [sizes[axis] for axis in self.order]

    @property
    def _blocks_at(self) -> int:
        """The dimension of memory that counts blocks, or blocks and another one."""
        at = list(self.order).index(0)
        return at - (self.merged is not None and self.merged < at)

    def pages(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        ordered = torch.randint(1, 100, self._sizes(shape)).to(dtype)
        merged = ordered if self.merged is None else ordered.flatten(self.merged, self.merged + 1)
        return merged.movedim(self._blocks_at, 0)

    def logical(self, pages: Tensor, shape: Shape) -> Tensor:
        """A view [blocks * parts, 2, size / parts, heads, dim]."""
        pages = pages.movedim(0, self._blocks_at)
        if self.merged is not None:
            pages = pages.unflatten(self.merged, self._sizes(shape)[self.merged : self.merged + 2])
        return pages.permute([list(self.order).index(axis) for axis in range(5)])

    def held(self, pages: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """Keys and values, each [blocks, size, heads, dim]."""
        logical = self.logical(pages, shape).unflatten(0, (shape.blocks, self.parts))
        keys, values = logical.transpose(1, 2).unbind(2 - 1)
        return keys.flatten(1, 2), values.flatten(1, 2)


def fake_layer(
    layout: Layout = Layout(),
    shape: Shape = Shape(),
    dtype: torch.dtype = torch.float32,
    keep: Sequence[Keep] = (lambda keys: keys, lambda values: values),
    slots_written: Callable[[Tensor], Tensor] = lambda slots: slots,
    pages: Tensor | None = None,
    **attributes: Any,
) -> KVLayer:
    """A layer that keeps what `keep` gives for keys and for values, at what `slots_written` gives for slots."""

    def write(_: object, keys: Tensor, values: Tensor, pages: Tensor, slots: Tensor) -> None:
        logical, size = layout.logical(pages, shape), shape.size // layout.parts
        slots = slots_written(slots)
        for side, (kept, given) in enumerate(zip(keep, (keys, values), strict=True)):
            logical[slots // size, side, slots % size] = kept(given).to(pages.dtype)

    impl = SimpleNamespace(do_kv_cache_update=write)
    layer = SimpleNamespace(impl=impl, num_kv_heads=shape.heads, head_size=shape.dim, **attributes)
    pages = layout.pages(shape, dtype) if pages is None else pages
    return KVLayer(layer, pages, attributes.get("computed", dtype), shape.blocks)


def truncated(given: Tensor, float8: torch.dtype) -> Tensor:
    """Numbers without the bits that do not fit, as vLLM's op for x86 gives them."""
    codes = given.clamp(-torch.finfo(float8).max, torch.finfo(float8).max).to(float8)
    is_above = codes.float().abs() > given.abs()
    lower = torch.where(is_above, codes.view(torch.uint8) - 1, codes.view(torch.uint8))
    return torch.where(lower % 128 == 0, 0, lower).to(torch.uint8)


def float8_layer(
    float8: torch.dtype,
    scales: tuple[float, float] = (0.5, 0.02),
    error: float = 1.0,
    rounded: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to,
    **more: Any,
) -> KVLayer:
    """A layer with pages of bytes, which divides by its scales, and by `error`."""

    def kept(scale: float) -> Keep:
        return lambda given: rounded(given.float() / scale / error, float8).view(torch.uint8)

    given = {"_k_scale": torch.tensor(scales[0]), "_v_scale": torch.tensor(scales[1]), "computed": torch.float32}
    return fake_layer(**{"dtype": torch.uint8, "keep": [kept(scale) for scale in scales], **given, **more})
