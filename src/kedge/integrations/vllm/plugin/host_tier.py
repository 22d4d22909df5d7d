"""The host tier behind vLLM's device blocks, as the scheduler sees it: a second block pool and the copies between both.

Both pools find blocks by vLLM's own hashes and evict by the same policy (`StepFreeQueue`). A load never fails a
request: blocks that did not arrive, or that a rank found corrupt, are computed. The host forgets those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from kedge.cache import Direction
from kedge.cache.copies import Outcome, Purpose
from kedge.integrations.vllm.plugin.block_pools import (
    free_blocks,
    hold_blocks,
    name_blocks,
    own_known,
    replace_queue,
    take_blocks,
)
from kedge.integrations.vllm.plugin.block_transfers import BlockTransfer
from kedge.integrations.vllm.plugin.free_queue import StepFreeQueue
from kedge.integrations.vllm.plugin.host_quotas import HostQuotas
from kedge.integrations.vllm.plugin.kv_events import TierEvents, pool_options
from kedge.integrations.vllm.plugin.messages import CopyResult
from kedge.integrations.vllm.plugin.owner_sets import Owner
from kedge.integrations.vllm.plugin.tier_lookups import TierLookups
from kedge.policies.eviction import StepPolicy, StepView
from kedge.policies.prefetch import CostModel
from kedge.types import TenantId


class HostTier(TierLookups):
    """Fixed prompts and histories of sessions in host memory. Owned by the scheduler."""

    def __init__(
        self,
        device: BlockPool,
        num_blocks: int,
        policy: StepPolicy,
        ranks: int,
        quotas: HostQuotas | None = None,
    ) -> None:
        """`num_blocks` of host memory; each of the `ranks` workers copies its share of every block. `quotas`, of
        `num_blocks` + 1, keep tenants to what they may hold.
        """
        options = pool_options(device)
        host = BlockPool(num_blocks + 1, True, device.hash_block_size, **options)  # vLLM keeps one for itself
        super().__init__(device, host)
        self.events = TierEvents(device, host) if options else None
        self.queue = replace_queue(self.host, policy, whole_sets=True, groups=self.groups)
        self.cost = CostModel()
        self.counters: Counter[str] = Counter()
        self._ranks = ranks
        self.quotas = quotas

    def load_pays(self, blocks: int) -> bool:
        """Return whether loading that many blocks is faster than computing them, by what has been measured so far."""
        ahead = self.blocks_loading
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
        first, stop = self.extent(hashes)
        if first == stop:
            return None
        above, needed, sources = self._split(hashes[:stop])
        if not sources or not self._has_room(self.device, len(sources) + reserve, may_evict):
            self.counters["denied_loads"] += 1
            return None
        targets = self._load_targets(above, len(sources), may_evict, reserve)
        if not targets:
            self.counters["denied_loads"] += 1
            return None
        transfer = self._enqueue(Direction.LOAD, purpose, needed, sources, targets, owner)
        transfer.prefix = above
        self._loading.update(dict.fromkeys(needed.keys, transfer))
        return transfer

    def _load_targets(
        self, above: Sequence[KVCacheBlock], blocks: int, may_evict: Callable[[StepView], bool], reserve: int
    ) -> list[KVCacheBlock]:
        """Take device blocks for a load, and hold those that it needs besides; [] without room."""
        hold_blocks(self.device, above)
        if self._has_room(self.device, blocks + reserve, may_evict):
            return take_blocks(self.device, blocks)
        free_blocks(self.device, above)
        return []

    def back_up(
        self,
        hashes: Sequence[BlockHash],
        owner: Owner,
        may_evict: Callable[[StepView], bool],
        start: int = 0,
        limit: int | None = None,
    ) -> int:
        """Order the offload of blocks of a prompt, from `start` on, that the device has and the host lacks.

        At most `limit` blocks, and as many as may evict others. Returns the index from which on it is not done, among
        the blocks that a hit needs (`CacheGroups.needed`).
        """
        sources, needed, done = self._lacking(hashes, start, limit)
        room = self._within_quota(owner, len(sources), may_evict)
        room = self._room(self.host, room, may_evict)
        if room < len(sources):
            self.counters["skipped_backups"] += 1
            sources, done = sources[:room], self.groups.count(len(hashes))
        if sources:
            needed = needed.chosen(range(room))
            targets = take_blocks(self.host, room)
            if self.quotas:
                self.quotas.take((block.block_id for block in targets), _tenant_of(owner))
            transfer = self._enqueue(Direction.OFFLOAD, Purpose.BACKUP, needed, sources, targets, owner)
            self._backing_up.update(dict.fromkeys(needed.keys, transfer))
        return done

    def _within_quota(self, owner: Owner, blocks: int, may_evict: Callable[[StepView], bool]) -> int:
        """Evict what the tenant of `owner` would have too much with so many `blocks` more, and needs no sooner. Returns
        how many of them it may have then.

        Nothing of others is evicted, and nothing that `owner` owns: the blocks belong behind that.
        """
        if self.quotas is None or not (excess := self.quotas.excess(_tenant_of(owner), blocks)):
            return blocks
        is_own = partial(self.quotas.is_of, tenant=_tenant_of(owner))
        victims = self.queue.victims(excess, lambda owners: owner not in owners.owners and may_evict(owners), is_own)
        self._forget(victims)
        self.counters["host_evictions_over_quota"] += len(victims)
        return max(0, blocks - excess + len(victims))

    def _forget(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Drop the KV of free host blocks."""
        self.host.evict_blocks({block.block_id for block in blocks})
        self.queue.remove_n(blocks)
        self.queue.prepend_n(blocks)
        self._release(blocks)

    def _let_go(self, transfer: BlockTransfer) -> None:
        super()._let_go(transfer)
        if not transfer.is_load:
            self._release(transfer.targets)

    def _release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Count host blocks without KV to no tenant."""
        if self.quotas:
            self.quotas.take((block.block_id for block in blocks if block.block_hash is None), None)

    @staticmethod
    def _room(pool: BlockPool, blocks: int, may_evict: Callable[[StepView], bool]) -> int:
        queue: StepFreeQueue = pool.free_block_queue
        return queue.room(min(blocks, queue.num_free_blocks), may_evict)

    def _has_room(self, pool: BlockPool, blocks: int, may_evict: Callable[[StepView], bool]) -> bool:
        return self._room(pool, blocks, may_evict) == blocks

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
        if transfer.abandoned:
            free_blocks(target, transfer.targets)
            return
        if result.ok:
            self._publish(transfer, target, result.corrupt)
        source.evict_blocks({transfer.sources[i].block_id for i in result.corrupt})
        self._count(transfer, result)
        free_blocks(target, transfer.prefix + transfer.targets)
        free_blocks(source, transfer.sources)
        self._release(transfer.sources if transfer.is_load else transfer.targets)
        under_way = self._loading if transfer.is_load else self._backing_up
        for one in transfer.needed.keys:
            under_way.pop(one, None)

    def _publish(self, transfer: BlockTransfer, target: BlockPool, corrupt: frozenset[int]) -> None:
        """Make the targets known by their keys, except for corrupt ones and those that a request has computed
        meanwhile, which are owned in their place.
        """
        named = name_blocks(target, transfer.needed, transfer.targets, corrupt)
        if self.events:
            landed = (block.block_hash for block in transfer.targets if block.block_hash)
            self.events.stored(target, landed, transfer.owner)
        queue: StepFreeQueue = target.free_block_queue
        if transfer.owner is None or not queue.has_step(transfer.owner):
            return
        if named == len(transfer.targets):
            queue.own(transfer.copy.targets, transfer.owner)
        else:
            own_known(target, transfer.needed.keys, transfer.owner)

    def _count(self, transfer: BlockTransfer, result: CopyResult) -> None:
        blocks = len(transfer.targets) - len(result.corrupt)
        self.counters["corrupt_blocks"] += len(result.corrupt)
        if not result.ok:
            self.counters["failed_copies"] += 1
        elif transfer.is_load:
            self.counters["blocks_loaded"] += blocks
            self.cost.load.observe(len(transfer.targets), result.seconds)
        else:
            self.counters["blocks_offloaded"] += blocks
        if transfer.purpose is Purpose.PREFETCH:
            landed = Outcome.LATE if transfer.demanded else Outcome.COMPLETED
            is_whole = result.ok and not result.corrupt
            self.counters[f"prefetches_{landed if is_whole else Outcome.FAILED}"] += 1

    def clear(self) -> None:
        """Empty the host tier. Copies under way are abandoned."""
        with self.without_copies():
            self.events.clear() if self.events else self.host.reset_prefix_cache()
            self.queue.forget_blocks()
            if self.quotas:
                self.quotas.clear()


def _tenant_of(owner: Any) -> TenantId:
    """Return the tenant of an agent or a session."""
    tenant: TenantId = owner.namespace.tenant
    return tenant
