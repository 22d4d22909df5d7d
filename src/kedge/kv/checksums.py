"""Checksums of the host tier's blocks: noted when a block goes to the host, compared when it comes back.

A block's checksum is the sum of its 64-bit words, each times the odd number of its place, modulo 2^64. A change within
one word always shows; any other change, and a block in another's place, but for one in 2^63. It is taken on the
device's side of both copies, so it covers the copies too, at about the speed of memory, on a CPU and on a GPU.
"""

from __future__ import annotations

import math
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
_OUTER = 1 << 32
"""More than the first dimensions of all pools together."""


class BlockSums:
    """The function from blocks of some pools to their checksums. Equal shapes give equal functions."""

    def __init__(self, pools: Sequence[Tensor], block_size: int) -> None:
        """A block is `block_size` neighbours along the second dimension of every pool."""
        self._pools = [_words(pool, block_size) for pool in pools]
        self._weights: list[tuple[Tensor, Tensor]] = []
        """For each pool the numbers of its first dimension, and those of the places below it; a place has the product,
        so what is read beside the blocks stays small
        """
        outer = 0
        for pool in self._pools:
            places = _odd_numbers(_OUTER, math.prod(pool.shape[2:])).view(pool.shape[2:])
            self._weights.append((_odd_numbers(outer, pool.shape[0]).to(pool.device), places.to(pool.device)))
            outer += pool.shape[0]

    def of(self, runs: Iterable[tuple[int, int]]) -> Sums:
        """Return the checksums of runs of blocks `(first, count)`, one after the other. Waits for the device."""
        found = [_NONE]
        for first, count in runs:
            total: Any = 0
            for pool, (outer, places) in zip(self._pools, self._weights, strict=True):
                weigh = _weighed_on_gpu if pool.is_cuda else _weighed_on_one_thread
                total = total + weigh(pool[:, first : first + count], outer, places)
            found.append(total.cpu().numpy() if isinstance(total, Tensor) else total)
        return np.concatenate(found)


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
    """Return a view as [outer, blocks, ..., words], in the longest words and fewest dimensions of its layout."""
    steps = [pool.shape[-1], pool.storage_offset(), *pool.stride()[:-1]]
    word = next(one for one in _WORDS if all(step * pool.itemsize % one.itemsize == 0 for step in steps))
    words = pool.view(word).unflatten(1, (-1, block_size))
    for at in range(words.ndim - 2, 1, -1):
        if words.stride(at) == words.stride(at + 1) * words.shape[at + 1]:
            words = words.flatten(at, at + 1)
    return words


def _weighed_on_gpu(blocks: Tensor, outer: Tensor, places: Tensor) -> Tensor:
    inner = (blocks * places).sum([*range(2, blocks.ndim)])
    return (inner * outer[:, None]).sum(0)


def _weighed_on_one_thread(blocks: Tensor, outer: Tensor, places: Tensor) -> Sums:
    """Sum without a buffer for the products, and without the interpreter's lock."""
    letters = ascii_lowercase[: blocks.ndim]
    inner = np.einsum(f"{letters},{letters[2:]}->{letters[:2]}", blocks.numpy(), places.numpy())
    sums: Sums = np.einsum("ab,a->b", inner, outer.numpy())
    return sums


def _odd_numbers(first: int, count: int) -> Tensor:
    """Return the numbers of some places: the same in every process, and without a pattern (SplitMix64)."""
    mixed = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64))
