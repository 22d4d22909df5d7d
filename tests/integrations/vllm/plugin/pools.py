"""vLLM's block pools as its scheduler uses them, without an engine."""

import math
from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from kedge.cache import Copied, Copy
from kedge.integrations.vllm.plugin.block_pools import ONE_GROUP, CacheGroups, leading_blocks, replace_queue
from kedge.integrations.vllm.plugin.host_tier import HostTier
from kedge.policies.eviction import steps_to_execution

SIZE = 16
POLICY = steps_to_execution(math.inf)


def opened(blocks: int, groups: CacheGroups = ONE_GROUP) -> BlockPool:
    """A pool of so many blocks, which sessions may own."""
    pool = BlockPool(blocks + 1, True, SIZE)  # vLLM keeps one for itself
    replace_queue(pool, POLICY, groups)
    return pool


def chain(name: str, length: int, letter: int = 0) -> list[BlockHash]:
    """Hashes of a prompt. Where a `letter` of a name stands for so many blocks, names of one beginning share those."""
    return [BlockHash(f"{name[: 1 + at // letter] if letter else name}-{at}".encode()) for at in range(length)]


def admitted(pool: BlockPool, hashes: Sequence[BlockHash]) -> tuple[list[KVCacheBlock], int] | None:
    """The blocks of a request that runs now, and how many of them were cached; None: there is no room."""
    found = leading_blocks(pool, hashes)
    pool.touch(found)
    if len(hashes) - len(found) > pool.get_num_free_blocks():
        pool.free_blocks(reversed(found))
        return None
    return found + pool.get_new_blocks(len(hashes) - len(found)), len(found)


def computed(pool: BlockPool, hashes: Sequence[BlockHash], blocks: Sequence[KVCacheBlock]) -> None:
    """Let blocks hold a prompt's KV. Behind a hole there may be another block with the hash: vLLM knows both."""
    for block, one in zip(blocks, hashes, strict=True):
        if block.block_hash is None:
            pool._insert_block_hash(make_block_hash_with_group_id(one, 0), block, num_tokens=SIZE)


def evicted(pool: BlockPool, blocks: int = 10**9) -> None:
    """Compute something that is needed by nobody."""
    pool.free_blocks(pool.get_new_blocks(min(blocks, pool.get_num_free_blocks())))


def land(tier: HostTier, copies: Sequence[Copy] = (), ok: bool = True) -> None:
    """End these copies, and all that no worker was given yet."""
    for copy in (*copies, *tier.take_copies()):
        tier.on_copied(Copied(copy.copy_id, ok, 0.1))
