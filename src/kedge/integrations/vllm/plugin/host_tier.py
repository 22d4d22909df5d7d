"""The host tier behind vLLM's device blocks, as the scheduler sees it: a second block pool and the copies between both.

Both pools find blocks by vLLM's own hashes and evict by the same policy (`StepFreeQueue`). A load never fails a
request: blocks that did not arrive are computed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from kedge.cache import Copied, Copy
from kedge.cache.copies import Outcome, Purpose, Transfer, Transfers
from kedge.cache.owners import Owner, Owners
from kedge.errors import PlanError
from kedge.integrations.vllm.plugin.block_pools import (
    NeededBlocks,
    any_of,
    cached_block,
    cached_prefix,
    groups_in,
    known_blocks,
    name_blocks,
    own_known,
    replace_queue,
)
from kedge.integrations.vllm.plugin.settings import OTHERS
from kedge.policies.eviction import EvictionPolicy, StepView
from kedge.settings import QuotaSettings
from kedge.structures.prefixes import leading_count
from kedge.types import TenantId

SHARE = 2
"""One of so many device blocks may be held by backups."""


class HostQuotas:
    """The tenants of all host blocks with KV, or that KV is being copied to. Owned by the scheduler."""

    def __init__(self, limits: Mapping[str, int], num_blocks: int) -> None:
        """`limits` are the most blocks by tenant, `OTHERS` for each that is not named; ids are below `num_blocks`."""
        self._limits = dict(limits)
        self._tenants: list[TenantId | None] = [None] * num_blocks
        self.held: Counter[TenantId] = Counter()
        """Blocks of each tenant"""

    @classmethod
    def of(cls, quotas: Mapping[str, QuotaSettings], block_bytes: int, num_blocks: int) -> Self | None:
        """Return the quotas in whole blocks, None where no tenant has one."""
        limits = {one: quota.host_memory // block_bytes for one, quota in quotas.items() if quota.host_memory}
        return cls(limits, num_blocks) if limits else None

    def excess(self, tenant: TenantId, blocks: int) -> int:
        """Return how many blocks a tenant would have too many with `blocks` more."""
        limit = self._limits.get(tenant, self._limits.get(OTHERS))
        return 0 if limit is None else max(0, self.held[tenant] + blocks - limit)

    def is_of(self, block_id: int, tenant: TenantId) -> bool:
        """Return whether a block is a tenant's."""
        return self._tenants[block_id] == tenant

    def take(self, block_ids: Iterable[int], tenant: TenantId | None) -> None:
        """Give blocks to a tenant, or to none, whoever they were of."""
        for block_id in block_ids:
            before, self._tenants[block_id] = self._tenants[block_id], tenant
            if before is not None:
                self.held[before] -= 1
                if not self.held[before]:
                    del self.held[before]
            if tenant is not None:
                self.held[tenant] += 1

    def clear(self) -> None:
        """Give all blocks to none."""
        self.take(range(len(self._tenants)), None)

    def check_integrity(self) -> None:
        """Raise `PlanError` unless the sums are those over all blocks, and within the limits."""
        found = Counter(tenant for tenant in self._tenants if tenant is not None)
        if found != self.held:
            raise PlanError("held", self.held, f"the blocks sum to {found}")
        over = [tenant for tenant in found if self.excess(tenant, 0)]
        if over:
            raise PlanError("held", self.held, f"{over} have more than they may")


@dataclass(eq=False, slots=True, kw_only=True)
class BlockTransfer(Transfer):
    """A copy of blocks that a hit needs, with all that it holds."""

    needed: NeededBlocks
    """What its blocks hold: nothing where a tier was emptied since"""
    sources: list[KVCacheBlock]
    targets: list[KVCacheBlock]
    prefix: list[KVCacheBlock]
    """Device blocks of the prompt before those that are loaded"""
    owner: Owner | None
    behind: Sequence[bytes] = ()
    """Keys of the prompt behind what is backed up of it, where that is a part"""


class HostTier:
    """Fixed prompts and histories of sessions in host memory, and the copies from and to them that have been ordered
    and have not ended. Owned by the scheduler.

    | blocks of a copy | from its order to its end                  | afterwards                                    |
    |------------------|--------------------------------------------|-----------------------------------------------|
    | sources          | held (`touch`), so nothing overwrites them | as free as before                             |
    | targets          | held, without a hash: lookups miss them    | hashed, owned and free; without KV on failure |
    | before them in a | held on the device, since a load behind    | free, and evicted after the targets           |
    | loaded prompt    | them is no use without them                |                                               |

    When a tier is emptied, copies bring nothing any more, and hold their blocks all the same until they end, so that no
    late write meets new KV.
    """

    def __init__(
        self,
        device: BlockPool,
        num_blocks: int,
        policy: EvictionPolicy,
        ranks: int,
        quotas: HostQuotas | None = None,
    ) -> None:
        """`num_blocks` of host memory; each of the `ranks` workers copies its share of every block. `quotas`, of
        `num_blocks` + 1, keep tenants to what they may hold.
        """
        self.device, self.groups = device, groups_in(device)
        self.host = BlockPool(num_blocks + 1, True, device.hash_block_size)  # vLLM keeps one for itself
        self.owners: Owners = device.free_block_queue.owners
        self.queue = replace_queue(self.host, policy, self.groups, self.owners)
        self._new_copies: list[Copy] = []
        self.transfers: Transfers[BlockTransfer] = Transfers(lambda copy: self._new_copies.append(copy), ranks)
        self.counters = self.transfers.counters
        self.quotas = quotas
        self._loading: dict[bytes, BlockTransfer] = {}
        self._backing_up: dict[bytes, BlockTransfer] = {}

    @property
    def busy(self) -> bool:
        """Whether a copy has been ordered and has not ended."""
        return bool(self.transfers.pending())

    def loading(self, block_hash: BlockHash) -> BlockTransfer | None:
        """Return the load that brings this block of the main group, if there is one."""
        return self._loading.get(block_hash + self.groups.main.key_end)

    def load_pays(self, blocks: int) -> bool:
        """Return whether loading that many blocks is faster than computing them, by what has been measured so far."""
        return self.transfers.cost.load_pays(blocks, blocks * self.device.hash_block_size, len(self._loading))

    # what the tiers have, and what one of them lacks: nothing changes ------------------------------------------

    def holds(self, block_hash: BlockHash) -> bool:
        """Return whether the host has this block of the main group."""
        return cached_block(self.host, block_hash) is not None

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

    def extent(self, hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """Return how many leading blocks of a prompt are on the device, and how many in either tier.

        What is being loaded counts as being on the device. O(log n) look-ups; O(n) with several groups.
        """
        first = cached_prefix(self.device, hashes, self._loading)
        if not self.groups.others:
            return first, cached_prefix(self.host, hashes, start=first)
        tiers = (known_blocks(self.device), self._loading, known_blocks(self.host))
        return first, self.groups.reach(hashes, lambda key: any(key in one for one in tiers))

    def next_load(self, hashes: Sequence[BlockHash], block: int) -> tuple[BlockTransfer | None, bool]:
        """Return the load under way that brings a block of a prompt, and whether one could bring it from the host."""
        if not self.groups.others:
            one = hashes[block]  # a draft's head lets vLLM compute the last block that it finds again
            return self.loading(one), self.holds(one) and cached_block(self.device, one) is None
        first, stop = self.extent(hashes)
        coming = self.groups.needed(hashes[:first]).keys if first > block else ()
        return next(filter(None, map(self._loading.get, reversed(coming))), None), stop > max(block, first)

    def _split(self, hashes: Sequence[BlockHash]) -> tuple[list[KVCacheBlock], NeededBlocks, list[KVCacheBlock]]:
        """Return what the device has of what a hit needs, and what the host has to bring, with its blocks there."""
        on_device, on_host, above = known_blocks(self.device), known_blocks(self.host), list[KVCacheBlock]()
        needed, brought, sources = self.groups.needed(hashes), list[int](), list[KVCacheBlock]()
        for at, key in enumerate(needed.keys):
            if block := on_device.get(key):
                above.append(any_of(block))
            elif key in self._loading:
                continue
            elif block := on_host.get(key):
                brought.append(at)
                sources.append(any_of(block))
            else:
                break
        return above, needed.chosen(brought), sources

    def _lacking(self, hashes: Sequence[BlockHash], start: int, most: int) -> tuple[list[KVCacheBlock], NeededBlocks]:
        """Return device blocks that the host lacks, and what they hold."""
        blocks, found = list[KVCacheBlock](), list[int]()
        on_device, on_host, under_way = known_blocks(self.device), known_blocks(self.host), self._backing_up
        needed = self.groups.needed(hashes, start)
        for at, key in enumerate(needed.keys):
            if len(blocks) >= most:
                break
            if key in on_host or key in under_way:
                continue
            block = on_device.get(key)
            if block is None:
                break
            blocks.append(any_of(block))
            found.append(at)
        return blocks, needed.chosen(found)

    # copies ---------------------------------------------------------------------------------------------------

    def load(
        self,
        hashes: Sequence[BlockHash],
        purpose: Purpose,
        owner: Owner | None,
        may_evict: Callable[[StepView], bool],
    ) -> BlockTransfer | None:
        """Order the load of what a prompt has on the host only.

        Returns None, having changed nothing, where that is nothing, or where the free device blocks and those that
        `may_evict` accepts are too few.
        """
        first, stop = self.extent(hashes)
        if first == stop:
            return None
        above, needed, sources = self._split(hashes[:stop])
        blocks, targets, queue = len(sources), list[KVCacheBlock](), self.device.free_block_queue
        if sources and queue.room(blocks, may_evict) == blocks:
            self.device.touch(above)
            if queue.room(blocks, may_evict) == blocks:
                targets = self.device.get_new_blocks(blocks)
            else:
                self.device.free_blocks(reversed(above))
        if not targets:
            self.counters["denied_loads"] += 1
            return None
        return self._begin(purpose, needed, sources, targets, above, owner)

    def back_up(
        self,
        hashes: Sequence[BlockHash],
        owner: Owner,
        may_evict: Callable[[StepView], bool],
        start: int = 0,
    ) -> None:
        """Order the offload of blocks of a prompt, from `start` on, that the device has and the host lacks: as many as
        may evict others, and while backups hold one of `SHARE` device blocks at most.
        """
        sources, needed = self._lacking(hashes, start, self.device.num_gpu_blocks // SHARE - len(self._backing_up))
        room = self.queue.room(self._within_quota(owner, len(sources), may_evict), may_evict)
        self.counters["skipped_backups"] += room < len(sources)
        sources, needed = sources[:room], needed.chosen(range(room))
        if sources:
            targets = self.host.get_new_blocks(room)
            if self.quotas:
                self.quotas.take((block.block_id for block in targets), _tenant_of(owner))
            transfer = self._begin(Purpose.BACKUP, needed, sources, targets, [], owner)
            transfer.behind = [one + self.groups.main.key_end for one in hashes[max(needed.places) + 1 :]]

    def _within_quota(self, owner: Owner, blocks: int, may_evict: Callable[[StepView], bool]) -> int:
        """Evict what the tenant of `owner` would have too much with so many `blocks` more, and needs no sooner. Returns
        how many of them it may have then.

        Nothing of others is evicted, and nothing that `owner` owns: the blocks belong behind that.
        """
        if self.quotas is None or not (excess := self.quotas.excess(_tenant_of(owner), blocks)):
            return blocks
        is_own = partial(self.quotas.is_of, tenant=_tenant_of(owner))
        victims = self.queue.victims(excess, lambda owners: owner not in owners.owners and may_evict(owners), is_own)
        self.host.evict_blocks({block.block_id for block in victims})
        self.host.touch(victims)
        self.host.free_blocks(victims)  # without KV, so that they are used first
        self._release(victims)
        self.counters["host_evictions_over_quota"] += len(victims)
        return max(0, blocks - excess + len(victims))

    def _release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Count host blocks without KV to no tenant."""
        if self.quotas:
            self.quotas.take((block.block_id for block in blocks if block.block_hash is None), None)

    def _begin(
        self,
        purpose: Purpose,
        needed: NeededBlocks,
        sources: list[KVCacheBlock],
        targets: list[KVCacheBlock],
        prefix: list[KVCacheBlock],
        owner: Owner | None,
    ) -> BlockTransfer:
        copy, demanded = self.transfers.new_copy(purpose, _ids(sources), _ids(targets)), purpose is Purpose.DEMAND
        transfer = BlockTransfer(
            copy, purpose, demanded, needed=needed, sources=sources, targets=targets, prefix=prefix, owner=owner
        )
        self._pools(transfer)[0].touch(sources)
        self._under_way(transfer).update(dict.fromkeys(needed.keys, transfer))
        return self.transfers.begin(transfer)

    def take_copies(self) -> tuple[Copy, ...]:
        """Return the copies that were ordered since the last call."""
        copies, self._new_copies = tuple(self._new_copies), []
        return copies

    def _pools(self, transfer: BlockTransfer) -> tuple[BlockPool, BlockPool]:
        """Return (source, target)."""
        return (self.host, self.device) if transfer.is_load else (self.device, self.host)

    def _under_way(self, transfer: BlockTransfer) -> dict[bytes, BlockTransfer]:
        return self._loading if transfer.is_load else self._backing_up

    # ends of copies -------------------------------------------------------------------------------------------

    def on_copied(self, copied: Copied) -> bool:
        """Take the end of a copy on one rank; it lands once all ranks have finished. Returns whether it has landed."""
        transfer = self.transfers.end(copied)
        if transfer is None:
            return False
        self._land(transfer)
        return not transfer.has_failed

    def _land(self, transfer: BlockTransfer) -> None:
        if transfer.purpose is Purpose.PREFETCH:
            landed = Outcome.LATE if transfer.demanded else Outcome.COMPLETED
            self.counters[f"prefetches_{Outcome.FAILED if transfer.has_failed else landed}"] += 1
        if transfer.needed.keys and not transfer.has_failed:
            self._publish(transfer, self._pools(transfer)[1])
        self._let_go(transfer)
        known = known_blocks(self.device)
        behind = [any_of(known[key]) for key in transfer.behind if key in known]
        self.device.touch(behind)
        self.device.free_blocks(reversed(behind))  # before its beginning, which is the last to be evicted
        self._release(transfer.sources if transfer.is_load else transfer.targets)
        for one in transfer.needed.keys:
            self._under_way(transfer).pop(one, None)

    def _publish(self, transfer: BlockTransfer, target: BlockPool) -> None:
        """Make the targets known by their keys, except for those that a request has computed meanwhile, which are owned
        in their place.
        """
        named = name_blocks(target, transfer.needed, transfer.targets)
        if transfer.owner not in self.owners.next_runs:
            return
        if named == len(transfer.targets):
            target.free_block_queue.own(transfer.copy.targets, transfer.owner)
        else:
            own_known(target, transfer.needed.keys, transfer.owner)

    # emptying a tier ------------------------------------------------------------------------------------------

    def held_on_device(self) -> list[int]:
        """Return the ids of the device blocks that copies hold, each as often as it is held."""
        held = ((one.prefix + one.targets if one.is_load else one.sources) for one in self.transfers.pending())
        return [block.block_id for blocks in held for block in blocks]

    @contextmanager
    def without_copies(self) -> Iterator[None]:
        """Drop what all copies bring. They hold no block inside of the `with`, and the same ones again afterwards."""
        for transfer in self.transfers.pending():
            self._let_go(transfer)
            transfer.needed = NeededBlocks((), ())
        self._loading.clear()
        self._backing_up.clear()
        try:
            yield
        finally:
            for transfer in self.transfers.pending():
                source, target = self._pools(transfer)
                source.touch(transfer.sources)
                target.touch(transfer.prefix + transfer.targets)

    def _let_go(self, transfer: BlockTransfer) -> None:
        """Free the blocks that a copy holds."""
        source, target = self._pools(transfer)
        target.free_blocks(reversed(transfer.prefix + transfer.targets))
        source.free_blocks(reversed(transfer.sources))

    def clear(self) -> None:
        """Empty the host tier. What copies under way bring is dropped."""
        with self.without_copies():
            self.host.reset_prefix_cache()
            self.queue.forget_blocks()
            if self.quotas:
                self.quotas.clear()


def _ids(blocks: Sequence[KVCacheBlock]) -> tuple[int, ...]:
    return tuple([block.block_id for block in blocks])


def _tenant_of(owner: Any) -> TenantId:
    """Return the tenant of an agent or a session."""
    tenant: TenantId = owner.namespace.tenant
    return tenant
