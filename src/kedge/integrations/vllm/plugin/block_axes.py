"""Which part of a layer's pages is a block: found by writing into blocks with vLLM's own op, assumed of no backend.

It happens once, when vLLM registers the pages and no request has any. What was in the blocks is put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.errors import LayoutUnknown
from kedge.integrations.vllm.plugin.kv_layers import KVLayer


class BlockAxis(NamedTuple):
    """The dimension of pages that counts blocks, and how many of its places are one block."""

    axis: int
    parts: int
    """Above 1 where the attention backend works on smaller blocks than vLLM's scheduler"""

    def blocks(self, pages: Tensor) -> Tensor:
        """Return a view of `pages` as [blocks, …]."""
        blocks = pages.movedim(self.axis, 0)
        return blocks.unflatten(0, (-1, self.parts)) if self.parts > 1 else blocks


def find_block_axis(layer: KVLayer, num_blocks: int, block_size: int) -> BlockAxis:
    """Find the blocks of a layer: the slots of a block, `block_size` tokens, are to be in that block and in no other.

    Raises `LayoutUnknown` where they are not, or where the layer has no op that writes.
    """
    shape = tuple(layer.pages.shape)
    axes = [BlockAxis(axis, size // num_blocks) for axis, size in enumerate(shape) if size % num_blocks == 0]
    if not axes or num_blocks < 2:
        raise LayoutUnknown("pages", shape, f"no dimension counts {num_blocks} blocks")
    probed = probed_blocks(num_blocks)
    with restored([axis.blocks(layer.codes) for axis in axes], probed) as views, own_errors(layer):
        for block in probed:
            clear(views, probed)
            layer.fill(slots_of(block, block_size, layer.pages.device))
            axes = [axis for axis in axes if _written(axis.blocks(layer.codes), probed) == [block]]
    if len(axes) != 1:
        raise LayoutUnknown("pages", shape, "what is written to the slots of a block is not in one block")
    return axes[0]


def probed_blocks(num_blocks: int) -> list[int]:
    """Return the blocks into which probes write: the first two and the last."""
    return sorted({0, 1, num_blocks - 1})


def slots_of(block: int, block_size: int, device: torch.device) -> Tensor:
    """Return the slots of a block, int64 [block_size]."""
    return torch.arange(block * block_size, (block + 1) * block_size, device=device)


def clear(views: Sequence[Tensor], blocks: Sequence[int]) -> None:
    """Set all of some blocks to zero. `views` are pages as [blocks, …]."""
    for view in views:
        for block in blocks:
            view[block].zero_()


def _written(view: Tensor, blocks: Sequence[int]) -> list[int]:
    return [block for block in blocks if (view[block] != 0).any()]


@contextmanager
def restored(views: list[Tensor], blocks: Sequence[int]) -> Iterator[list[Tensor]]:
    """Put back what some blocks held. `views` are pages as [blocks, …]."""
    before = [[view[block].clone() for block in blocks] for view in views]
    try:
        yield views
    finally:
        for view, contents in zip(views, before, strict=True):
            for block, content in zip(blocks, contents, strict=True):
                view[block].copy_(content)


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
