"""The host tier behind vLLM's device blocks, as the scheduler sees it: a second block pool and the copies between both.

| blocks of a copy | from its order to its end                  | afterwards                                    |
|------------------|--------------------------------------------|-----------------------------------------------|
| sources          | held (`touch`), so nothing overwrites them | as free as before                             |
| targets          | held, without a hash: lookups miss them    | hashed, owned and free; without KV on failure |

Both pools find blocks by vLLM's own hashes and evict by the same policy (`StepFreeQueue`). A load never fails a
request: blocks that did not arrive, or that a rank found corrupt, are computed. The host forgets those.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from kedge.cache import Copy, Direction
from kedge.cache.copies import Outcome, Purpose
from kedge.integrations.vllm.plugin.block_pools import GROUP, cached_block, leading_blocks, replace_queue
from kedge.integrations.vllm.plugin.messages import CopyResult
from kedge.integrations.vllm.plugin.owner_sets import Owner
from kedge.policies.cost import CostModel
from kedge.policies.eviction import StepPolicy, StepView


@dataclass(eq=False, slots=True)
class BlockTransfer:
    """A copy that has been ordered, with the blocks that it holds."""

    copy: Copy
    purpose: Purpose
    hashes: tuple[BlockHash, ...]
    first: int
    """Index of the first block in its prompt"""
    sources: list[KVCacheBlock]
    targets: list[KVCacheBlock]
    owner: Owner | None
    demanded: bool = False
    """Whether a request waits for it."""
    result: CopyResult | None = None
    """Merged over the ranks that have finished"""

    @property
    def is_load(self) -> bool:
        """Whether it goes from the host to the device."""
        return self.copy.direction is Direction.LOAD


class HostTier:
    """Fixed prompts in host memory. Owned by the scheduler."""

    def __init__(self, device: BlockPool, num_blocks: int, policy: StepPolicy, ranks: int) -> None:
        """`num_blocks` of host memory; each of the `ranks` workers copies its share of every block."""
        self.device = device
        self.host = BlockPool(num_blocks + 1, True, device.hash_block_size)  # vLLM keeps block 0 for itself
        self.queue = replace_queue(self.host, policy)
        self.cost = CostModel()
        self.counters: Counter[str] = Counter()
        self._ranks = ranks
        self._ids = itertools.count()
        self._transfers: dict[int, BlockTransfer] = {}
        self._loading: dict[BlockHash, BlockTransfer] = {}
        self._backing_up: set[BlockHash] = set()
        self._new_copies: list[Copy] = []

    @property
    def busy(self) -> bool:
        """Whether a copy has been ordered and has not ended."""
        return bool(self._transfers)

    @property
    def prefetching(self) -> int:
        """Number of prefetches that have not ended."""
        return sum(transfer.purpose is Purpose.PREFETCH for transfer in self._transfers.values())

    def holds(self, block_hash: BlockHash) -> bool:
        """Return whether the host has this block."""
        return cached_block(self.host, block_hash) is not None

    def loading(self, block_hash: BlockHash) -> BlockTransfer | None:
        """Return the load that brings this block, if there is one."""
        return self._loading.get(block_hash)

    def missing(self, hashes: Sequence[BlockHash]) -> tuple[int, list[BlockHash]]:
        """Find the first unbroken run of `hashes` that is on the host only: its index, and its hashes."""
        at = next((i for i, one in enumerate(hashes) if self._only_on_host(one)), len(hashes))
        return at, list(itertools.takewhile(self._only_on_host, hashes[at:]))

    def _only_on_host(self, block_hash: BlockHash) -> bool:
        on_device = cached_block(self.device, block_hash) is not None or block_hash in self._loading
        return not on_device and self.holds(block_hash)

    def load_pays(self, blocks: int) -> bool:
        """Return whether loading that many blocks is faster than computing them, by what has been measured so far."""
        ahead = sum(len(transfer.hashes) for transfer in set(self._loading.values()))
        return self.cost.load_pays(blocks, blocks * self.device.hash_block_size, ahead)

    # copies ---------------------------------------------------------------------------------------------------

    def load(
        self,
        hashes: Sequence[BlockHash],
        purpose: Purpose,
        owner: Owner | None,
        may_evict: Callable[[StepView], bool],
        reserve: int = 0,
    ) -> BlockTransfer | None:
        """Order the load of what a prompt has on the host only.

        Returns None, having changed nothing, where that is nothing, or where the free device blocks and those that
        `may_evict` accepts, except for `reserve` of them, are too few.
        """
        first, wanted = self.missing(hashes)
        targets = self._load_targets(hashes[:first], len(wanted), may_evict, reserve)
        if not targets:
            self.counters["denied_loads"] += bool(wanted)
            return None
        sources = leading_blocks(self.host, wanted)
        transfer = self._enqueue(Direction.LOAD, purpose, wanted, first, sources, targets, owner)
        self._loading.update(dict.fromkeys(wanted, transfer))
        return transfer

    def _load_targets(
        self, prefix: Sequence[BlockHash], blocks: int, may_evict: Callable[[StepView], bool], reserve: int
    ) -> list[KVCacheBlock]:
        """Take device blocks for a load behind `prefix`, whose own blocks are not evicted for it; [] without room."""
        above = leading_blocks(self.device, prefix)
        self.device.touch(above)
        has_room = blocks > 0 and self._has_room(self.device, blocks + reserve, may_evict)
        targets = self.device.get_new_blocks(blocks) if has_room else []
        self.device.free_blocks(reversed(above))
        return targets

    def back_up(self, hashes: Sequence[BlockHash], owner: Owner, may_evict: Callable[[StepView], bool]) -> None:
        """Order the offload of those leading device blocks of a prompt that the host lacks, if there is room."""
        blocks = leading_blocks(self.device, hashes)
        known = [one in self._backing_up or self.holds(one) for one in hashes[: len(blocks)]]
        wanted = [one for one, is_known in zip(hashes, known, strict=False) if not is_known]
        if not wanted:
            return
        if not self._has_room(self.host, len(wanted), may_evict):
            self.counters["skipped_backups"] += 1
            return
        sources = [block for block, is_known in zip(blocks, known, strict=True) if not is_known]
        targets = self.host.get_new_blocks(len(wanted))
        self._enqueue(Direction.OFFLOAD, Purpose.BACKUP, wanted, 0, sources, targets, owner)
        self._backing_up.update(wanted)

    @staticmethod
    def _has_room(pool: BlockPool, blocks: int, may_evict: Callable[[StepView], bool]) -> bool:
        queue = pool.free_block_queue
        return blocks <= queue.num_free_blocks and queue.has_room(blocks, may_evict)

    def _enqueue(
        self,
        direction: Direction,
        purpose: Purpose,
        hashes: Sequence[BlockHash],
        first: int,
        sources: list[KVCacheBlock],
        targets: list[KVCacheBlock],
        owner: Owner | None,
    ) -> BlockTransfer:
        self._pools(direction)[0].touch(sources)
        copy = Copy(next(self._ids), direction, _ids(sources), _ids(targets))
        is_demand = purpose is Purpose.DEMAND
        transfer = BlockTransfer(copy, purpose, tuple(hashes), first, sources, targets, owner, is_demand)
        self._transfers[copy.copy_id] = transfer
        self._new_copies.append(copy)
        return transfer

    def take_copies(self) -> tuple[Copy, ...]:
        """Return the copies that were ordered since the last call."""
        copies, self._new_copies = tuple(self._new_copies), []
        return copies

    # ends of copies -------------------------------------------------------------------------------------------

    def on_copied(self, copy_id: int, result: CopyResult) -> None:
        """Take the result of some ranks for a copy; it lands once all ranks have finished."""
        transfer = self._transfers[copy_id]
        transfer.result = transfer.result.merged(result) if transfer.result else result
        if transfer.result.ranks == self._ranks:
            del self._transfers[copy_id]
            self._land(transfer, transfer.result)

    def _land(self, transfer: BlockTransfer, result: CopyResult) -> None:
        source, target = self._pools(transfer.copy.direction)
        if result.ok:
            self._publish(transfer, target, result.corrupt)
        source.evict_blocks({transfer.sources[i].block_id for i in result.corrupt})
        self._count(transfer, result)
        target.free_blocks(reversed(transfer.targets))
        source.free_blocks(reversed(transfer.sources))
        for one in transfer.hashes:
            self._loading.pop(one, None) if transfer.is_load else self._backing_up.discard(one)

    def _publish(self, transfer: BlockTransfer, target: BlockPool, corrupt: frozenset[int]) -> None:
        """Make the targets known by their hashes, except for corrupt ones and those that a request has computed
        meanwhile.
        """
        fresh = [i for i, one in enumerate(transfer.hashes) if i not in corrupt and cached_block(target, one) is None]
        for i in fresh:
            tokens = (transfer.first + i + 1) * target.hash_block_size
            key = make_block_hash_with_group_id(transfer.hashes[i], GROUP)
            target._insert_block_hash(key, transfer.targets[i], num_tokens=tokens)
        if transfer.owner is not None and target.free_block_queue.has_step(transfer.owner):
            target.free_block_queue.own([transfer.targets[i].block_id for i in fresh], transfer.owner)

    def _count(self, transfer: BlockTransfer, result: CopyResult) -> None:
        blocks = len(transfer.hashes) - len(result.corrupt)
        self.counters["corrupt_blocks"] += len(result.corrupt)
        if not result.ok:
            self.counters["failed_copies"] += 1
        elif transfer.is_load:
            self.counters["blocks_loaded"] += blocks
            self.cost.load.observe(len(transfer.hashes), result.seconds)
        else:
            self.counters["blocks_offloaded"] += blocks
        if transfer.purpose is Purpose.PREFETCH:
            landed = Outcome.LATE if transfer.demanded else Outcome.COMPLETED
            is_whole = result.ok and not result.corrupt
            self.counters[f"prefetches_{landed if is_whole else Outcome.FAILED}"] += 1

    def _pools(self, direction: Direction) -> tuple[BlockPool, BlockPool]:
        """Return (source, target)."""
        return (self.host, self.device) if direction is Direction.LOAD else (self.device, self.host)

    def clear(self) -> bool:
        """Empty the host tier. Returns False, having changed nothing, while a copy is under way."""
        if self.busy or not self.host.reset_prefix_cache():
            return False
        self.queue.forget_blocks()
        return True


def _ids(blocks: Sequence[KVCacheBlock]) -> tuple[int, ...]:
    return tuple(block.block_id for block in blocks)
