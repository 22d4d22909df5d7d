"""Checksums of the host tier's blocks: noted when a block goes to the host, compared when it comes back.

A block's checksum is the sum of its 64-bit words, each times an odd number of its place, modulo 2^64. A change within
one word always shows; any other change, and a block in another's place, but for one in 2^63. It is taken on the
device's side of both copies, so it covers the copies too, at about the speed of memory, on a CPU and on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
Sums = np.ndarray[tuple[int], np.dtype[np.int64]]
"""One checksum per block."""
_NONE: Sums = np.empty(0, np.int64)


class BlockSums:
    """The function from blocks of some pools to their checksums. Equal shapes give equal functions."""

    def __init__(self, pools: Sequence[Tensor], block_size: int) -> None:
        """A block is `block_size` neighbours along the second dimension of every pool."""
        self._pools = [_words(pool, block_size) for pool in pools]
        self._weights: list[Tensor] = []
        first = 0
        for pool in self._pools:
            place = (pool.shape[0], *pool.shape[2:])
            weights = _odd_numbers(first, count := int(np.prod(place)))
            self._weights.append(torch.from_numpy(weights).view(place).to(pool.device))
            first += count

    def of(self, runs: Iterable[tuple[int, int]]) -> Sums:
        """Return the checksums of runs of blocks `(first, count)`, one after the other. Waits for the device."""
        return np.concatenate([_NONE, *(self._of_run(first, count) for first, count in runs)])

    def _of_run(self, first: int, count: int) -> Sums:
        total: Any = 0
        for pool, weights in zip(self._pools, self._weights, strict=True):
            blocks = pool[:, first : first + count]
            total = total + (_weighed_on_gpu if pool.is_cuda else _weighed_on_one_thread)(blocks, weights)
        return total.cpu().numpy() if isinstance(total, Tensor) else total


class Seals:
    """The checksums of what the host's blocks hold. Belongs to the copier's thread."""

    def __init__(self, device: Sequence[Tensor], block_size: int, host_blocks: int) -> None:
        """Begin without checksums; `device` are the device's pools."""
        self._sums = BlockSums(device, block_size)
        self._noted = np.zeros(host_blocks, np.int64)

    def note(self, runs: Sequence[tuple[int, int, int]]) -> None:
        """Take the checksums of blocks on their way to the host, as runs (first on the device, first there, count)."""
        sums, at = self._sums.of((first, count) for first, _, count in runs), 0
        for _, target, count in runs:
            self._noted[target : target + count] = sums[at : at + count]
            at += count

    def broken(self, runs: Sequence[tuple[int, int, int]]) -> list[int]:
        """Return the places, within the runs (first on the host, first on the device, count), of the blocks that have
        come to the device with another content than was noted.
        """
        sums = self._sums.of((target, count) for _, target, count in runs)
        noted = [self._noted[first : first + count] for first, _, count in runs]
        return [int(at) for at in np.flatnonzero(sums != np.concatenate([_NONE, *noted]))]


def _words(pool: Tensor, block_size: int) -> Tensor:
    """Return a view as [outer, blocks, block_size, ..., words], in the longest words that its layout allows."""
    steps = [pool.shape[-1], pool.storage_offset(), *pool.stride()[:-1]]
    word = next(one for one in _WORDS if all(step * pool.itemsize % one.itemsize == 0 for step in steps))
    return pool.view(word).unflatten(1, (-1, block_size))


def _weighed_on_gpu(blocks: Tensor, weights: Tensor) -> Tensor:
    return (blocks * weights[:, None]).sum([0, *range(2, blocks.ndim)])


def _weighed_on_one_thread(blocks: Tensor, weights: Tensor) -> Sums:
    """Sum without a buffer for the products, and without the interpreter's lock."""
    letters = ascii_lowercase[: blocks.ndim]
    places = letters[0] + letters[2:]
    sums: Sums = np.einsum(f"{letters},{places}->{letters[1]}", blocks.numpy(), weights.numpy())
    return sums


def _odd_numbers(first: int, count: int) -> Sums:
    """Return the numbers of some places: the same in every process, and without a pattern (SplitMix64)."""
    mixed = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64)
