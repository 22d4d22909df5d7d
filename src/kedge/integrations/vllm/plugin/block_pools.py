"""Helpers for vLLM's block pools, which find blocks by hash and evict them in the order of their free queue.

vLLM's own methods go block by block, through several calls for each. Copies between the tiers move thousands of blocks
a second, so what they need is done here for many blocks at once, to the same effect.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from kedge.integrations.vllm.plugin.cache_groups import ONE_GROUP, CacheGroups, NeededBlocks
from kedge.integrations.vllm.plugin.free_queue import StepFreeQueue
from kedge.integrations.vllm.plugin.owner_sets import Owner
from kedge.policies.eviction import StepPolicy
from kedge.structures.prefixes import leading_count


def replace_queue(
    pool: BlockPool, policy: StepPolicy, whole_sets: bool = False, groups: CacheGroups = ONE_GROUP
) -> StepFreeQueue:
    """Give a pool of blocks of `groups` a queue with this policy. It has handed out its null block alone."""
    queue = StepFreeQueue(pool.free_block_queue.get_all_free_blocks(), len(pool.blocks), policy, whole_sets)
    pool.free_block_queue = queue
    queue.groups = groups
    return queue


def groups_in(pool: BlockPool) -> CacheGroups:
    """Return the KV cache groups whose blocks are in a pool."""
    return getattr(pool.free_block_queue, "groups", ONE_GROUP)


# look-ups -----------------------------------------------------------------------------------------------------


def known_blocks(pool: BlockPool) -> dict[bytes, Any]:
    """Return the blocks of `pool` by key, which is a hash and the end of a group: each a block, or several by id."""
    return cast("dict[bytes, Any]", pool.cached_block_hash_to_block._cache)


def any_of(known: Any) -> KVCacheBlock:
    """Return a block, or the first of several, that a pool knows by one key."""
    return next(iter(known.values())) if known.__class__ is dict else known


def cached_block(pool: BlockPool, block_hash: BlockHash) -> KVCacheBlock | None:
    """Return a block of `pool` with this hash in the main group, if there is one."""
    return pool.cached_block_hash_to_block.get_one_block(block_hash + groups_in(pool).main.key_end)


def has_end(pool: BlockPool, hashes: Sequence[BlockHash]) -> bool:
    """Return whether `pool` has the last block of a prompt in every group."""
    known, groups = known_blocks(pool), groups_in(pool)
    ends = ((group, group.places(len(hashes))) for group in groups)
    return all(hashes[places[-1]] + group.key_end in known for group, places in ends if places)


def leading_blocks(pool: BlockPool, hashes: Sequence[BlockHash]) -> list[KVCacheBlock]:
    """Return the blocks in the main group of the longest prefix of `hashes` that `pool` has."""
    known, end, blocks = known_blocks(pool), groups_in(pool).main.key_end, list[KVCacheBlock]()
    for one in hashes:
        block = known.get(one + end)
        if block is None:
            break
        blocks.append(any_of(block))
    return blocks


def hit_blocks(pool: BlockPool, hashes: Sequence[BlockHash]) -> list[KVCacheBlock]:
    """Return what `pool` has of a prompt in all groups: its longest prefix, and what else the longest hit needs."""
    blocks, known, groups = leading_blocks(pool, hashes), known_blocks(pool), groups_in(pool)
    if groups.others:
        hit = groups.fitted(hashes, len(blocks), known.__contains__)
        blocks += [any_of(known[key]) for key in groups.needed(hashes[:hit], hit).keys]
    return blocks


def cached_prefix(
    pool: BlockPool,
    hashes: Sequence[BlockHash],
    others: Container[bytes] = (),
    start: int = 0,
    stop: int | None = None,
    guess: int = -1,
) -> int:
    """Return how many leading blocks of a prompt are in `pool`, or among `others` by their keys: `start` at least,
    `stop` at most.

    O(log n) look-ups, since prompts are evicted from their ends, and two where the answer is `guess`. Where there are
    several groups, those that a hit needs of the others have to be there as well.
    """
    known, groups = known_blocks(pool), groups_in(pool)
    end = groups.main.key_end

    def is_cached(at: int) -> bool:
        key = hashes[at] + end
        return key in known or key in others

    length = leading_count(is_cached, len(hashes) if stop is None else stop, start, guess)
    if not groups.others:
        return length
    return groups.fitted(hashes, length, lambda key: key in known or key in others)


# many blocks at once ------------------------------------------------------------------------------------------


def hold_blocks(pool: BlockPool, blocks: Sequence[KVCacheBlock]) -> None:
    """Do what `BlockPool.touch` does, for different blocks, none of them the null block."""
    if pool.metrics_collector:
        pool.touch(blocks)
        return
    pool.free_block_queue.remove_n([block for block in blocks if not block.ref_cnt])
    for block in blocks:
        block.ref_cnt += 1


def free_blocks(pool: BlockPool, blocks: Sequence[KVCacheBlock]) -> None:
    """Do what `BlockPool.free_blocks` does, for blocks of `pool` that were held in this order: the last goes first."""
    known, lost = list[KVCacheBlock](), list[KVCacheBlock]()
    for block in reversed(blocks):
        block.ref_cnt -= 1
        if not block.ref_cnt:
            (lost if block._block_hash is None else known).append(block)
    pool.free_block_queue.prepend_n(lost)
    pool.free_block_queue.append_n(known)


def take_blocks(pool: BlockPool, count: int) -> list[KVCacheBlock]:
    """Do what `BlockPool.get_new_blocks` does, for at most as many blocks as are free."""
    if not _is_plain(pool):
        return pool.get_new_blocks(count)
    known, queue = known_blocks(pool), cast("StepFreeQueue", pool.free_block_queue)
    blocks: list[KVCacheBlock] = queue.popleft_n(count)
    for block in blocks:
        block.ref_cnt = 1
        if (key := block._block_hash) is not None:
            found = known.pop(key, None)
            if found is not block and found is not None:
                known[key] = found
                pool._remove_cached_block_hashes(block)
            block._block_hash = block._block_hash_num_tokens = None
    return blocks


def _is_plain(pool: BlockPool) -> bool:
    """Return whether a block that is handed out only loses its hash: nothing counts it, or waits for it."""
    watched = pool.metrics_collector or pool.enable_kv_cache_events or getattr(pool, "_reuse_watchers", None)
    return not watched and not pool.cached_block_hashes_by_block


def name_blocks(
    pool: BlockPool, needed: NeededBlocks, blocks: Sequence[KVCacheBlock], skipped: Container[int] = ()
) -> int:
    """Make blocks without a key known by theirs: all but the `skipped` ones, by index, and where the pool has a block
    with this key. Returns how many are known now.
    """
    known, size, named = known_blocks(pool), pool.hash_block_size, 0
    for at, (one, place, block) in enumerate(zip(needed.keys, needed.places, blocks, strict=True)):
        key: Any = one
        if at not in skipped and known.setdefault(key, block) is block:
            block._block_hash, block._block_hash_num_tokens = key, (place + 1) * size
            named += 1
    return named


def own_prefix(pool: BlockPool, hashes: Sequence[BlockHash], owner: Owner) -> None:
    """Mark what `pool` has of a prompt, in all groups, as owned by `owner`."""
    own_blocks(pool, hit_blocks(pool, hashes), owner)


def own_known(pool: BlockPool, keys: Sequence[bytes], owner: Owner) -> None:
    """Mark the blocks with these keys that `pool` has as owned by `owner`."""
    known = known_blocks(pool)
    own_blocks(pool, [any_of(known[one]) for one in keys if one in known], owner)


def own_blocks(pool: BlockPool, blocks: Sequence[KVCacheBlock], owner: Owner) -> None:
    """Mark different blocks of one prompt as owned by `owner`, which uses them."""
    hold_blocks(pool, blocks)
    pool.free_block_queue.own([block.block_id for block in blocks], owner)
    free_blocks(pool, blocks)
