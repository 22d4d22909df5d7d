"""The memory of a pool of blocks as views by block, each byte in one of them.

Layers of different KV cache groups lie over one another: a block is of one group at a time, and where it is copied as a
whole it does not matter of which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from kedge.errors import LayoutUnknown
from kedge.integrations.vllm.plugin.block_axes import find_block_axis
from kedge.integrations.vllm.plugin.kv_layers import KVLayer

Registered = Mapping[str, Tensor | Sequence[Tensor]]
"""By layer, as vLLM registers it with a connector: pages of KV, or the tensors of states"""


class BlockMemory(NamedTuple):
    """Where a view [blocks, …] has its blocks, in bytes."""

    start: int
    end: int
    """Behind the last byte of the first block"""
    stride: int
    nbytes: int
    """Of one block"""

    @classmethod
    def of(cls, view: Tensor) -> BlockMemory:
        """Return the memory of a view with one block at least."""
        size, block = view.itemsize, view[0]
        last = sum((count - 1) * stride for count, stride in zip(block.shape, block.stride(), strict=True))
        start = view.data_ptr()
        return cls(start, start + (last + 1) * size, view.stride(0) * size, block.numel() * size)

    def covers(self, other: BlockMemory) -> bool:
        """Return whether all bytes of the other's blocks are in these blocks."""
        is_dense = self.nbytes == self.end - self.start
        is_within = self.stride == other.stride and self.start <= other.start and other.end <= self.end
        return self == other or (is_dense and is_within)


def pool_views(
    registered: Registered, layers: Mapping[str, Any], kv_cache: KVCacheConfig, dtype: torch.dtype
) -> list[Tensor]:
    """Return views [blocks, …] of all pages. `layers` are vLLM's, by their names; `dtype` is the model's.

    Raises `LayoutUnknown` where the blocks of a layer are not found.
    """
    specs = {name: group.kv_cache_spec for group in kv_cache.kv_cache_groups for name in group.layer_names}
    views = list[Tensor]()
    for name, pages in registered.items():
        if isinstance(pages, Tensor) and not isinstance(specs[name], MambaSpec):
            layer = KVLayer(layers[name], pages, dtype)
            views.append(find_block_axis(layer, kv_cache.num_blocks, specs[name].block_size).blocks(pages))
        else:
            states = [pages] if isinstance(pages, Tensor) else pages
            views += [_state_view(state, kv_cache.num_blocks) for state in states]
    return distinct(views)


def _state_view(state: Tensor, num_blocks: int) -> Tensor:
    """Return a tensor of states, one for each block."""
    if state.shape[:1] != (num_blocks,):
        raise LayoutUnknown("state", tuple(state.shape), f"its first dimension does not count {num_blocks} blocks")
    return state


def distinct(views: Iterable[Tensor]) -> list[Tensor]:
    """Return those of views [blocks, …] that have bytes which none of the others has."""
    kept = list[tuple[BlockMemory, Tensor]]()
    for memory, view in sorted(((BlockMemory.of(one), one) for one in views), key=lambda pair: -pair[0].nbytes):
        if not any(other.covers(memory) for other, _ in kept):
            kept.append((memory, view))
    return [view for _, view in kept]
