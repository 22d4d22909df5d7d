"""The host tier behind vLLM's device blocks, as the scheduler sees it: a second block pool and the copies between both.

| blocks of a copy | from its order to its end                       | afterwards                                   |
|------------------|-------------------------------------------------|----------------------------------------------|
| sources          | held (`touch`), so nothing is written over them | as free as they were                         |
| targets          | held, without a hash: nobody can find them      | hashed, owned and free; without KV if failed |

Both pools find blocks by vLLM's own hashes and evict by the same policy (`StepFreeQueue`). A load never fails a
request: what has not come is computed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from kedge.cache import Copy, Direction
from kedge.cache.copies import Outcome, Purpose
from kedge.integrations.vllm.plugin.free_queue import Owner, StepFreeQueue
from kedge.integrations.vllm.plugin.messages import Ended
from kedge.policies.cost import CostModel
from kedge.policies.eviction import StepPolicy, StepView

GROUP = 0
"""The only KV cache group."""


def replace_queue(pool: BlockPool, policy: StepPolicy) -> StepFreeQueue:
    """Puts a queue with this policy into a pool that has handed out nothing but its null block."""
    queue = StepFreeQueue(pool.free_block_queue.get_all_free_blocks(), len(pool.blocks), policy)
    pool.free_block_queue = queue
    return queue


def cached(pool: BlockPool, block_hash: BlockHash) -> KVCacheBlock | None:
    """A block of `pool` with this hash."""
    found = pool.get_cached_block(block_hash, [GROUP])
    return found[0] if found else None


def leading(pool: BlockPool, hashes: Sequence[BlockHash]) -> list[KVCacheBlock]:
    """The blocks of the longest prefix that `pool` has."""
    return list(itertools.takewhile(lambda block: block is not None, (cached(pool, one) for one in hashes)))


def label(pool: BlockPool, hashes: Sequence[BlockHash], owner: Owner) -> int:
    """What `pool` has of a fixed prompt belongs to `owner` from now on; returns how many blocks."""
    queue = pool.free_block_queue
    blocks = leading(pool, hashes)
    pool.touch(blocks)
    queue.own([block.block_id for block in blocks], owner)
    pool.free_blocks(reversed(blocks))
    return len(blocks)


@dataclass(eq=False, slots=True)
class Job:
    """A copy that has been ordered, with the blocks that it holds."""

    copy: Copy
    purpose: Purpose
    hashes: tuple[BlockHash, ...]
    first: int
    """Number of the first block in its prompt"""
    sources: list[KVCacheBlock]
    targets: list[KVCacheBlock]
    owner: Owner | None
    demanded: bool = False
    """A request waits for it."""
    ended: Ended | None = None


class HostTier:
    """Fixed prompts in host memory. One owner: the scheduler."""

    def __init__(self, device: BlockPool, num_blocks: int, policy: StepPolicy, ranks: int) -> None:
        """`num_blocks` of host memory; `ranks` workers copy, each its share of every block."""
        self.device = device
        self.pool = BlockPool(num_blocks + 1, True, device.hash_block_size)  # vLLM keeps block 0 for itself
        self.queue = replace_queue(self.pool, policy)
        self.cost = CostModel()
        self.counters: Counter[str] = Counter()
        self._ranks = ranks
        self._ids = itertools.count()
        self._jobs: dict[int, Job] = {}
        self._loading: dict[BlockHash, Job] = {}
        self._storing: set[BlockHash] = set()
        self._orders: list[Copy] = []

    @property
    def busy(self) -> bool:
        """Whether a copy has been ordered and has not ended."""
        return bool(self._jobs)

    @property
    def prefetching(self) -> int:
        """Prefetches that have not ended."""
        return sum(job.purpose is Purpose.PREFETCH for job in self._jobs.values())

    def holds(self, block_hash: BlockHash) -> bool:
        return cached(self.pool, block_hash) is not None

    def loading(self, block_hash: BlockHash) -> Job | None:
        """The load that brings this block."""
        return self._loading.get(block_hash)

    def missing(self, hashes: Sequence[BlockHash]) -> tuple[int, list[BlockHash]]:
        """The first unbroken run of `hashes` that is on the host only: its place, and its hashes."""
        at = next((i for i, one in enumerate(hashes) if self._only_here(one)), len(hashes))
        return at, list(itertools.takewhile(self._only_here, hashes[at:]))

    def _only_here(self, block_hash: BlockHash) -> bool:
        elsewhere = cached(self.device, block_hash) is not None or block_hash in self._loading
        return not elsewhere and self.holds(block_hash)

    def pays(self, blocks: int) -> bool:
        """Whether loading so many blocks beats computing them, as far as this has been measured."""
        ahead = sum(len(job.hashes) for job in set(self._loading.values()))
        return self.cost.load_pays(blocks, blocks * self.device.hash_block_size, ahead)

    # orders ---------------------------------------------------------------------------------------------------

    def load(
        self,
        hashes: Sequence[BlockHash],
        purpose: Purpose,
        owner: Owner | None,
        allowed: Callable[[StepView], bool],
        reserve: int = 0,
    ) -> Job | None:
        """Orders what of a prompt is on the host only; None, having changed nothing, where that is nothing, or where
        free blocks and those that `allowed` gives away, `reserve` apart, are too few.
        """
        first, wanted = self.missing(hashes)
        above = leading(self.device, hashes[:first])
        self.device.touch(above)  # what it follows is no victim
        room = bool(wanted) and self._room(self.device, len(wanted) + reserve, allowed)
        targets = self.device.get_new_blocks(len(wanted)) if room else []
        self.device.free_blocks(reversed(above))
        if not targets:
            self.counters["denied_loads"] += bool(wanted)
            return None
        sources = leading(self.pool, wanted)
        job = self._order(Direction.LOAD, purpose, wanted, first, sources, targets, owner)
        self._loading.update(dict.fromkeys(wanted, job))
        return job

    def store(self, hashes: Sequence[BlockHash], owner: Owner, allowed: Callable[[StepView], bool]) -> None:
        """Orders what of a prompt's leading device blocks is not on the host yet, if there is room."""
        blocks = leading(self.device, hashes)
        have = [one in self._storing or self.holds(one) for one in hashes[: len(blocks)]]
        wanted = [one for one, known in zip(hashes, have, strict=False) if not known]
        if not wanted:
            return
        if not self._room(self.pool, len(wanted), allowed):
            self.counters["skipped_backups"] += 1
            return
        sources = [block for block, known in zip(blocks, have, strict=True) if not known]
        targets = self.pool.get_new_blocks(len(wanted))
        self._order(Direction.OFFLOAD, Purpose.BACKUP, wanted, 0, sources, targets, owner)
        self._storing.update(wanted)

    @staticmethod
    def _room(pool: BlockPool, blocks: int, allowed: Callable[[StepView], bool]) -> bool:
        queue = pool.free_block_queue
        return blocks <= queue.num_free_blocks and queue.has_room(blocks, allowed)

    def _order(
        self,
        direction: Direction,
        purpose: Purpose,
        hashes: Sequence[BlockHash],
        first: int,
        sources: list[KVCacheBlock],
        targets: list[KVCacheBlock],
        owner: Owner | None,
    ) -> Job:
        self._pools(direction)[0].touch(sources)
        copy = Copy(next(self._ids), direction, _ids(sources), _ids(targets))
        job = Job(copy, purpose, tuple(hashes), first, sources, targets, owner, purpose is Purpose.DEMAND)
        self._jobs[copy.copy_id] = job
        self._orders.append(copy)
        return job

    def take_orders(self) -> tuple[Copy, ...]:
        """What was ordered since the last call."""
        orders, self._orders = tuple(self._orders), []
        return orders

    # ends -----------------------------------------------------------------------------------------------------

    def reported(self, copy_id: int, ended: Ended) -> None:
        """Some ranks are done with a copy; once all are, it lands."""
        job = self._jobs[copy_id]
        job.ended = job.ended.merged(ended) if job.ended else ended
        if job.ended.ranks == self._ranks:
            del self._jobs[copy_id]
            self._land(job, job.ended)

    def _land(self, job: Job, ended: Ended) -> None:
        source, target = self._pools(job.copy.direction)
        if ended.ok:
            self._publish(job, target)
        self._count(job, ended)
        target.free_blocks(reversed(job.targets))
        source.free_blocks(reversed(job.sources))
        for one in job.hashes:
            self._loading.pop(one, None) if job.copy.direction is Direction.LOAD else self._storing.discard(one)

    def _publish(self, job: Job, target: BlockPool) -> None:
        """From now on the targets are found by their hashes; those that somebody computed meanwhile are not needed."""
        fresh = [i for i, one in enumerate(job.hashes) if cached(target, one) is None]
        for i in fresh:
            tokens = (job.first + i + 1) * target.hash_block_size
            key = make_block_hash_with_group_id(job.hashes[i], GROUP)
            target._insert_block_hash(key, job.targets[i], num_tokens=tokens)
        if job.owner is not None and target.free_block_queue.knows(job.owner):
            target.free_block_queue.own([job.targets[i].block_id for i in fresh], job.owner)

    def _count(self, job: Job, ended: Ended) -> None:
        blocks, is_load = len(job.hashes), job.copy.direction is Direction.LOAD
        if not ended.ok:
            self.counters["failed_copies"] += 1
        else:
            self.counters["blocks_loaded" if is_load else "blocks_offloaded"] += blocks
            if is_load:
                self.cost.load.observe(blocks, ended.seconds)
        if job.purpose is Purpose.PREFETCH:
            late = Outcome.LATE if job.demanded else Outcome.COMPLETED
            self.counters[f"prefetches_{late if ended.ok else Outcome.FAILED}"] += 1

    def _pools(self, direction: Direction) -> tuple[BlockPool, BlockPool]:
        """(source, target)"""
        return (self.pool, self.device) if direction is Direction.LOAD else (self.device, self.pool)

    def clear(self) -> bool:
        """Forgets all that is on the host; False, having changed nothing, while a copy is under way."""
        if self.busy or not self.pool.reset_prefix_cache():
            return False
        self.queue.forget_blocks()
        return True


def _ids(blocks: Sequence[Any]) -> tuple[int, ...]:
    return tuple(block.block_id for block in blocks)
