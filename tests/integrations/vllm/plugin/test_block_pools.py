"""Look-ups of prompts in a pool, and blocks that are made known in it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kedge.integrations.vllm.plugin.block_pools import (
    NeededBlocks,
    cached_prefix,
    leading_blocks,
    name_blocks,
    own_prefix,
    replace_queue,
)
from kedge.policies.eviction import steps_to_execution

SIZE, BLOCKS = 16, 10
HASHES = [BlockHash(f"x-{at}".encode()) for at in range(8)]
KEYS = [make_block_hash_with_group_id(one, 0) for one in HASHES]


@pytest.fixture
def pool() -> BlockPool:
    built = BlockPool(BLOCKS + 1, True, SIZE)
    replace_queue(built, steps_to_execution(), whole_sets=True).on_forecast({"a": (1.0, 1.0)})
    return built


def test_a_prefix_is_that_of_the_pool_and_of_others(pool: BlockPool) -> None:
    assert name_blocks(pool, NeededBlocks(KEYS[:3], range(3)), pool.get_new_blocks(3)) == 3
    assert [block.block_hash_num_tokens for block in leading_blocks(pool, HASHES)] == [SIZE, 2 * SIZE, 3 * SIZE]
    assert cached_prefix(pool, HASHES) == 3
    assert cached_prefix(pool, HASHES, others=set(KEYS[3:5])) == 5
    assert cached_prefix(pool, HASHES, stop=2) == 2
    assert cached_prefix(pool, HASHES, start=4) == 4
    assert [cached_prefix(pool, HASHES, guess=guess) for guess in range(9)] == [3] * 9


def test_what_is_known_is_not_named_and_what_a_pool_has_is_owned(pool: BlockPool) -> None:
    first, again = pool.get_new_blocks(2), pool.get_new_blocks(3)
    name_blocks(pool, NeededBlocks(KEYS[:2], range(2)), first)
    assert name_blocks(pool, NeededBlocks(KEYS[:3], range(3)), again) == 1
    assert leading_blocks(pool, HASHES) == [*first, again[2]]
    pool.free_blocks([*again, *first])
    own_prefix(pool, HASHES, "a")
    assert pool.free_block_queue.members_of("a") == 3 and pool.get_num_free_blocks() == BLOCKS
    pool.free_block_queue.check_integrity()
