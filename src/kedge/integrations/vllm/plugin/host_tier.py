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
    KEY_END,
    cached_block,
    cached_prefix,
    free_blocks,
    hold_blocks,
    known_blocks,
    leading_blocks,
    name_blocks,
    one_of,
    own_prefix,
    replace_queue,
    take_blocks,
)
from kedge.integrations.vllm.plugin.block_transfers import BlockTransfer, BlockTransfers
from kedge.integrations.vllm.plugin.free_queue import StepFreeQueue
from kedge.integrations.vllm.plugin.host_quotas import HostQuotas
from kedge.integrations.vllm.plugin.kv_events import HOST_MEDIUM, TierEvents, are_possible
from kedge.integrations.vllm.plugin.messages import CopyResult
from kedge.integrations.vllm.plugin.owner_sets import Owner
from kedge.policies.cost import CostModel
from kedge.policies.eviction import StepPolicy, StepView
from kedge.structures.prefixes import leading_count
from kedge.types import TenantId


class HostTier(BlockTransfers):
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
        options = {"enable_kv_cache_events": True, "medium": HOST_MEDIUM} if are_possible(device) else {}
        host = BlockPool(num_blocks + 1, True, device.hash_block_size, **options)  # vLLM keeps one for itself
        super().__init__(device, host)
        self.events = TierEvents(device, host) if options else None
        self.queue = replace_queue(self.host, policy, whole_sets=True)
        self.cost = CostModel()
        self.counters: Counter[str] = Counter()
        self._ranks = ranks
        self.quotas = quotas

    def holds(self, block_hash: BlockHash) -> bool:
        """Return whether the host has this block."""
        return block_hash + KEY_END in known_blocks(self.host)

    def prefixes(self, hashes: Sequence[BlockHash], owner: Owner) -> tuple[int, int]:
        """Return how many leading blocks of a prompt the host has or is about to have, and how many of them `owner`
        owns there. O(log n) look-ups, and O(1) where these are all that it owns.

        What is in a tier is a prefix, since prompts are evicted from their ends.
        """
        guess = self.queue.members_of(owner)
        held = cached_prefix(self.host, hashes, self._backing_up, guess=guess)

        def is_owned(at: int) -> bool:
            block = cached_block(self.host, hashes[at])
            return block is not None and self.queue.owns(block.block_id, owner)

        return held, leading_count(is_owned, held, guess=guess)

    def extent(self, hashes: Sequence[BlockHash], stop: int | None = None) -> tuple[int, int]:
        """Return how many of the first `stop` blocks of a prompt are on the device, and how many in either tier.

        What is being loaded counts as being on the device. O(log n) look-ups.
        """
        first = cached_prefix(self.device, hashes, self._loading, 0, stop)
        return first, cached_prefix(self.host, hashes, (), first, stop)

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
        if first == stop or not self._has_room(self.device, stop - first + reserve, may_evict):
            self.counters["denied_loads"] += first < stop
            return None
        wanted = hashes[first:stop]
        sources = leading_blocks(self.host, wanted)
        wanted = wanted[: len(sources)]
        prefix, targets = self._load_targets(hashes[:first], len(wanted), may_evict, reserve)
        if not targets:
            self.counters["denied_loads"] += 1
            return None
        transfer = self._enqueue(Direction.LOAD, purpose, wanted, first, sources, targets, owner)
        transfer.prefix = prefix
        self._loading.update(dict.fromkeys(wanted, transfer))
        return transfer

    def _load_targets(
        self, prefix: Sequence[BlockHash], blocks: int, may_evict: Callable[[StepView], bool], reserve: int
    ) -> tuple[list[KVCacheBlock], list[KVCacheBlock]]:
        """Take device blocks for a load, and hold those of the `prefix` before it; both are [] without room."""
        above = leading_blocks(self.device, prefix)
        hold_blocks(self.device, above)
        if self._has_room(self.device, blocks + reserve, may_evict):
            return above, take_blocks(self.device, blocks)
        free_blocks(self.device, above)
        return [], []

    def back_up(
        self,
        hashes: Sequence[BlockHash],
        owner: Owner,
        may_evict: Callable[[StepView], bool],
        start: int = 0,
        limit: int | None = None,
    ) -> int:
        """Order the offload of blocks of a prompt, from `start` on, that the device has and the host lacks.

        At most `limit` blocks, and as many as may evict others. Returns the index from which on it is not done.
        """
        sources, places, done = self._lacking(hashes, start, limit)
        room = self._within_quota(owner, len(sources), may_evict)
        room = self._room(self.host, room, may_evict)
        if room < len(sources):
            self.counters["skipped_backups"] += 1
            sources, done = sources[:room], len(hashes)
        if sources:
            wanted = [hashes[at] for at in places[:room]]
            targets = take_blocks(self.host, room)
            if self.quotas:
                self.quotas.take((block.block_id for block in targets), _tenant_of(owner))
            transfer = self._enqueue(Direction.OFFLOAD, Purpose.BACKUP, wanted, places[0], sources, targets, owner)
            self._backing_up.update(dict.fromkeys(wanted, transfer))
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

    def _lacking(
        self, hashes: Sequence[BlockHash], start: int, limit: int | None
    ) -> tuple[list[KVCacheBlock], list[int], int]:
        """Return device blocks that the host lacks, their places in the prompt, and the place after the last look."""
        blocks, places = list[KVCacheBlock](), list[int]()
        on_device, on_host, under_way = known_blocks(self.device), known_blocks(self.host), self._backing_up
        for at, one in enumerate(hashes[start:], start):
            if len(blocks) == limit:
                return blocks, places, at
            key = one + KEY_END
            if key in on_host or one in under_way:
                continue
            block = on_device.get(key)
            if block is None:
                break
            blocks.append(one_of(block) if block.__class__ is dict else block)
            places.append(at)
        return blocks, places, len(hashes)

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
        for one in transfer.hashes:
            under_way.pop(one, None)

    def _publish(self, transfer: BlockTransfer, target: BlockPool, corrupt: frozenset[int]) -> None:
        """Make the targets known by their hashes, except for corrupt ones and those that a request has computed
        meanwhile, which are owned in their place.
        """
        named = name_blocks(target, transfer.hashes, transfer.targets, transfer.first, corrupt)
        if self.events:
            landed = (one for one, block in zip(transfer.hashes, transfer.targets, strict=True) if block.block_hash)
            self.events.stored(target, landed, transfer.owner)
        queue: StepFreeQueue = target.free_block_queue
        if transfer.owner is None or not queue.has_step(transfer.owner):
            return
        if named == len(transfer.targets):
            queue.own(transfer.copy.targets, transfer.owner)
        else:
            own_prefix(target, transfer.hashes, transfer.owner)

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
