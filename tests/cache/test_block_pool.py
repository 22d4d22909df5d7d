import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.cache.block_pool import BlockPool
from kedge.errors import ConfigError, OutOfBlocks, PlanError


@pytest.mark.parametrize("blocks", [[3], [0, 3], [0, 0], [-1], [4], [1, 2, 3]])
def test_a_bad_free_changes_nothing(blocks: list[int]) -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(PlanError):
        pool.free(blocks)
    assert [pool.is_free(block) for block in range(4)] == [False, False, False, True]
    pool.check_integrity()


@given(st.lists(st.booleans(), min_size=16, max_size=16))
def test_the_run_that_continues_else_the_best_fit_else_the_fewest(is_free: list[bool]) -> None:
    free = {at for at, one in enumerate(is_free) if one}
    runs = {at: next(size for size in range(1, 17) if at + size not in free) for at in free if at - 1 not in free}
    for n, after in itertools.product(range(1, len(free) + 1), (None, *(at - 1 for at in runs))):
        pool = BlockPool(16)
        pool.allocate(16)
        pool.free(free)
        blocks = pool.allocate(n, after)
        taken = [at for at in blocks if at - 1 not in blocks]
        if after is not None and runs[after + 1] >= n:
            assert blocks == list(range(after + 1, after + 1 + n))
        elif fitting := [size for size in runs.values() if size >= n]:
            assert len(taken) == 1 and runs[taken[0]] == min(fitting)
        else:
            longest = sorted(runs.values(), reverse=True)
            assert sum(longest[: len(taken) - 1]) < n, "with one run less there were too few"


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
