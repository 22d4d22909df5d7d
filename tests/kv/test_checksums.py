"""Checksums of blocks, against sums with Python's own integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.kv import checksums
from kedge.kv.checksums import BlockSums, Seals

SHAPES = [((3, 24, 2, 16), torch.float32), ((2, 24, 1, 8), torch.bfloat16), ((1, 24, 2, 3), torch.uint8)]


def pools(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Pools with random content."""
    return [torch.randint(0, 100, shape).to(dtype) for _ in range(2)]


def naive(filled: list[torch.Tensor], size: int, block: int) -> int:
    """Sum the words of a block, each times the number of its place, with integers of any length."""
    total = outer = 0
    for pool in filled:
        nbytes = pool.shape[-1] * pool.itemsize
        word = next(one for one in (8, 4, 2, 1) if nbytes % one == 0)
        for layer in pool:
            outer += 1
            rows = layer[block * size : (block + 1) * size].contiguous().view(torch.uint8).view(-1, word).tolist()
            for at, row in enumerate(rows, 1):
                total += int.from_bytes(row, "little", signed=word > 1) * odd(outer) * odd((1 << 32) + at)
    return total % (1 << 64)


def odd(at: int) -> int:
    """Return SplitMix64's number `at`, made odd."""
    mask = (1 << 64) - 1
    mixed = at * 0x9E3779B97F4A7C15 & mask
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & mask
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & mask
    return mixed ^ (mixed >> 31) | 1


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_sums_are_those_of_a_naive_twin(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    filled = pools(shape, dtype)
    found = BlockSums(filled, 4).of([(1, 2), (5, 1), (0, 1)])
    assert [int(one) % (1 << 64) for one in found] == [naive(filled, 4, block) for block in (1, 2, 5, 0)]


def test_pages_whose_blocks_are_in_pieces_have_the_sums_of_whole_ones() -> None:
    whole = torch.randn(1, 6, 2, 4, 8)
    in_pieces = whole.transpose(1, 2).contiguous().transpose(1, 2)
    assert not in_pieces.is_contiguous()
    assert (BlockSums([whole], 1).of([(0, 6)]) == BlockSums([in_pieces], 1).of([(0, 6)])).all()


@given(st.integers(0, 23), st.integers(0, 7), st.data())
def test_every_flipped_bit_shows_in_its_block_and_no_other(slot: int, bit: int, data: st.DataObject) -> None:
    filled = pools((2, 24, 1, 8), torch.bfloat16)
    seals = Seals(filled, 4, 6)
    seals.note([(0, 0, 6)])
    assert seals.broken([(0, 0, 6)]) == []
    flat = filled[data.draw(st.integers(0, 1))][data.draw(st.integers(0, 1)), slot].view(torch.uint8).view(-1)
    flat[data.draw(st.integers(0, 15))] ^= 1 << bit
    assert seals.broken([(0, 0, 6)]) == [slot // 4]


def test_a_block_in_anothers_place_and_swapped_layers_or_words_show() -> None:
    filled = pools((2, 8, 2, 16), torch.float32)
    seals = Seals(filled, 4, 2)
    seals.note([(0, 1, 1), (1, 0, 1)])
    assert seals.broken([(1, 0, 1), (0, 1, 1)]) == []
    assert seals.broken([(0, 0, 1), (1, 1, 1)]) == [0, 1]
    seals.note([(0, 0, 2)])
    filled[0][:, :4] = filled[0][:, :4].flip(0)
    filled[1][:, 4:] = filled[1][:, 4:].flip(2)
    assert seals.broken([(0, 0, 2)]) == [0, 1]


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_what_runs_on_a_gpu_gives_the_sums_of_the_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    sums = BlockSums(pools(shape, dtype), 4)
    for pool, weights in zip(sums._pools, sums._weights, strict=True):
        expected = checksums._weighed_on_one_thread(pool, *weights)
        assert checksums._weighed_on_gpu(pool, *weights).tolist() == expected.tolist()
