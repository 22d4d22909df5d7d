from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.cache import BlockPool
from kedge.errors import ConfigError, OutOfBlocks, PlanError


def test_best_fit_takes_the_smallest_run_that_is_long_enough() -> None:
    pool = BlockPool(20)
    pool.allocate(20)
    pool.free([0, 1, 2, 3, 4, 8, 9, 10, 15, 16])
    assert pool.allocate(3) == [8, 9, 10]
    assert pool.allocate(2) == [15, 16]
    assert pool.allocate(2) == [0, 1]
    pool.check_integrity()


def test_several_runs_when_no_single_one_is_long_enough() -> None:
    pool = BlockPool(12)
    pool.allocate(12)
    pool.free([1, 2, 5, 6, 7, 10])
    assert pool.allocate(4) == [5, 6, 7, 10], "the longest run, then the best fit for the rest"
    assert pool.allocate(2) == [1, 2]
    pool.check_integrity()


def test_a_run_that_continues_is_preferred() -> None:
    pool = BlockPool(20)
    pool.allocate(20)
    pool.free([3, 4, 10, 11, 12])
    assert pool.allocate(2, after=9) == [10, 11]
    assert pool.allocate(2, after=11) == [3, 4], "only one block follows 11"


@pytest.mark.parametrize("blocks", [[3], [0, 3], [0, 0], [-1], [4], [1, 2, 3]])
def test_a_bad_free_changes_nothing(blocks: list[int]) -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(PlanError):
        pool.free(blocks)
    assert [pool.is_free(block) for block in range(4)] == [False, False, False, True]
    pool.check_integrity()


def test_bad_sizes() -> None:
    with pytest.raises(ConfigError, match="num_blocks=-1"):
        BlockPool(-1)
    with pytest.raises(PlanError, match="blocks=-1"):
        BlockPool(1).allocate(-1)
    assert BlockPool(1).allocate(0) == []
    nothing = BlockPool(0)
    nothing.check_integrity()
    assert nothing.allocate(0) == []
    with pytest.raises(OutOfBlocks, match="0 of 0"):
        nothing.allocate(1)
    pool = BlockPool(2)
    pool.allocate(1)
    assert pool.allocate(0, after=0) == []


@given(st.lists(st.tuples(st.integers(0, 12), st.randoms(use_true_random=False)), max_size=40))
def test_any_sequence_keeps_the_pool_whole(steps: list) -> None:
    pool, taken = BlockPool(24), set[int]()
    for n, random in steps:
        if n <= pool.num_free:
            new = pool.allocate(n)
            assert len(new) == n and new == sorted(new) and not taken & set(new)
            taken.update(new)
        else:
            with pytest.raises(OutOfBlocks):
                pool.allocate(n)
            back = random.sample(sorted(taken), random.randint(0, len(taken)))
            pool.free(back)
            taken.difference_update(back)
        assert {block for block in range(24) if not pool.is_free(block)} == taken
        pool.check_integrity()


@given(st.sets(st.integers(0, 19)), st.integers(1, 20))
def test_one_run_whenever_there_is_one(free: set[int], n: int) -> None:
    pool = BlockPool(20)
    pool.allocate(20)
    pool.free(free)
    if n > len(free):
        return
    starts = [start for start in range(21 - n) if set(range(start, start + n)) <= free]
    blocks = pool.allocate(n)
    assert (blocks[-1] - blocks[0] == n - 1) == bool(starts)
