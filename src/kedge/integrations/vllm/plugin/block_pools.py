"""Helpers for vLLM's block pools, which find blocks by hash and evict them in the order of their free queue."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from kedge.integrations.vllm.plugin.free_queue import StepFreeQueue
from kedge.integrations.vllm.plugin.owner_sets import Owner
from kedge.policies.eviction import StepPolicy

GROUP = 0
"""The only KV cache group."""


def replace_queue(pool: BlockPool, policy: StepPolicy, whole_sets: bool = False) -> StepFreeQueue:
    """Give a pool a queue with this policy. The pool must have handed out nothing but its null block."""
    queue = StepFreeQueue(pool.free_block_queue.get_all_free_blocks(), len(pool.blocks), policy, whole_sets)
    pool.free_block_queue = queue
    return queue


def cached_block(pool: BlockPool, block_hash: BlockHash) -> KVCacheBlock | None:
    """Return a block of `pool` with this hash, if there is one."""
    return pool.cached_block_hash_to_block.get_one_block(make_block_hash_with_group_id(block_hash, GROUP))


def leading_blocks(pool: BlockPool, hashes: Sequence[BlockHash]) -> list[KVCacheBlock]:
    """Return the blocks of the longest prefix of `hashes` that `pool` has."""
    return list(itertools.takewhile(lambda block: block is not None, (cached_block(pool, one) for one in hashes)))


def cached_prefix(pool: BlockPool, hashes: Sequence[BlockHash]) -> int:
    """Return how many leading blocks of a prompt `pool` has. O(log n) look-ups: prompts are evicted from their ends."""
    return bisect_left(hashes, True, key=lambda one: cached_block(pool, one) is None)


def own_prefix(pool: BlockPool, hashes: Sequence[BlockHash], owner: Owner) -> None:
    """Mark the longest prefix of `hashes` that `pool` has as owned by `owner`."""
    queue = pool.free_block_queue
    blocks = leading_blocks(pool, hashes)
    pool.touch(blocks)
    queue.own([block.block_id for block in blocks], owner)
    pool.free_blocks(reversed(blocks))
