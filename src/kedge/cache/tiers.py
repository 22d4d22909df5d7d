"""The device pool and the host pool under one tree, and what moves between them (KVFlow, section 3.2).

| blocks of a pool        | owner                                                     |
|-------------------------|-----------------------------------------------------------|
| free                    | the pool                                                  |
| cached                  | a node of the tree                                        |
| in flight               | the transfer that writes them, until it lands             |
| leased                  | a request (device only; the manager knows which)          |

A transfer locks its lowest node from before it looks for room until it has landed, so nothing that it reads, writes
or depends on can be evicted meanwhile.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from kedge.cache.block_pool import BlockPool
from kedge.cache.copies import Copier, Direction, Outcome, Purpose, Transfers
from kedge.cache.node import DEVICE, HOST, NodeTransfer, State, Tier, TreeNode
from kedge.cache.radix_tree import Allowed, RadixTree, Removed
from kedge.errors import ConfigError, OutOfBlocks, PlanError
from kedge.policies.eviction import EvictionPolicy
from kedge.settings import TierSettings
from kedge.types import Namespace, TenantId


def _no_transfers() -> dict[str, dict[str, int]]:
    return {purpose.value: {outcome.value: 0 for outcome in Outcome} for purpose in Purpose}


@dataclass(slots=True)
class CacheStats:
    """Counts since the start, and blocks by owner now."""

    hits: int = 0
    """Admissions that were allowed to reuse and found something."""
    misses: int = 0
    """Admissions that were allowed to reuse and found nothing."""
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    """Those of the hit tokens whose load a request had to wait for."""
    prefetched_hit_tokens: int = 0
    """Those of the hit tokens that a prefetch had brought in time."""
    copied_hit_tokens: int = 0
    """Those of the hit tokens that were copied from a block that goes on differently."""
    missed_tokens: int = 0
    evictions: int = 0
    """Blocks evicted from the device."""
    host_evictions: int = 0
    blocks_loaded: int = 0
    blocks_offloaded: int = 0
    bytes_loaded: int = 0
    bytes_offloaded: int = 0
    transfers: Mapping[str, dict[str, int]] = field(default_factory=_no_transfers)
    """How many ended how, by `Purpose` and `Outcome`; a prefetch that landed ends with its first hit or eviction."""
    failed_copies: int = 0
    skipped_backups: int = 0
    """For want of host blocks."""
    denied_loads: int = 0
    """Loads that found no room on the device at the time."""
    free_blocks: int = 0
    cached_blocks: int = 0
    leased_blocks: int = 0
    loading_blocks: int = 0
    """Device blocks that a transfer is writing, or is going to."""
    host_free_blocks: int = 0
    host_cached_blocks: int = 0
    offloading_blocks: int = 0
    """Host blocks that a transfer is writing, or is going to."""


def missing(node: TreeNode) -> list[TreeNode]:
    """Return the nodes that one load towards `node` brings, top down: the first unbroken run that is on the host only.

    What is above it is on the device or on its way. What may be below it and on its way comes down in its own time.
    """
    run: list[TreeNode] = []
    for step in node.path_down():
        if step.state is State.HOST:
            run.append(step)
        elif run:
            break
    return run


class Tiers:
    """Both tiers and what moves between them."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        policy: EvictionPolicy,
        settings: TierSettings,
        copier: Copier | None,
        block_bytes: int,
    ) -> None:
        """Begin with empty tiers; `block_bytes` is the size of one block's KV. Raises `ConfigError` for a host tier
        without a copier, or with memory for not a single block.
        """
        self.host_blocks = settings.host_pool_size(block_bytes)
        if self.host_blocks and copier is None:
            raise ConfigError("host_blocks", self.host_blocks, "a host tier needs a copier")
        self.settings, self.block_bytes = settings, block_bytes
        self.tree = RadixTree(block_size, policy)
        self.pools = BlockPool(num_blocks), BlockPool(self.host_blocks)
        """By tier: which blocks are free"""
        self._copier = cast("Copier", copier)  # without one there is no host tier, and nothing is copied
        self.transfers: Transfers[NodeTransfer] = Transfers(lambda copy: self._copier.submit(copy))
        self.counters = self.transfers.counters
        self.ended = _no_transfers()
        self.limits: dict[TenantId, int] = {}
        """Host blocks that a tenant may have; no limit for one that is not in it"""
        self._waiting: dict[TreeNode, None] = {}
        """Nodes to be backed up whose ancestors are being backed up"""
        self._landed: list[NodeTransfer] = []
        """Loads whose copy has ended while the load of their ancestors has not"""

    # blocks ---------------------------------------------------------------------------------------------------

    def allocate(self, tier: Tier, n: int, after: int | None = None, allowed: Allowed | None = None) -> list[int]:
        """Return `n` blocks, evicting what is not free. Raises `OutOfBlocks`, having changed nothing."""
        pool = self.pools[tier]
        if (short := n - pool.num_free) > 0:
            self._evict(tier, short, allowed)
        return pool.allocate(n, after)

    def _evict(self, tier: Tier, n: int, allowed: Allowed | None, tenant: TenantId | None = None) -> None:
        self.release(self.tree.evict(tier, n, allowed, tenant))
        self.counters["evictions" if tier is DEVICE else "host_evictions"] += n

    def release(self, removed: Iterable[Removed]) -> None:
        """Free the blocks that left the tree."""
        for one in removed:
            self.pools[one.tier].free(one.blocks)
            if one.tier is DEVICE and not one.node.blocks[DEVICE] and one.node.arrival:
                self._end_arrival(one.node, Outcome.WASTED)

    def hit(self, node: TreeNode) -> None:
        """Count a request that uses `node`: the load that brought it was worth it."""
        node.hits += 1
        if node.arrival:
            self._end(node.arrival, Outcome.COMPLETED)
            self._end_arrival(node, Outcome.COMPLETED)

    def _end_arrival(self, node: TreeNode, outcome: Outcome) -> None:
        transfer, node.arrival = node.arrival, None
        assert transfer is not None
        transfer.live -= 1
        if not transfer.live:
            self._end(transfer, outcome)

    def _end(self, transfer: NodeTransfer, outcome: Outcome) -> None:
        """Record how a transfer ended; the first outcome stands."""
        if transfer.outcome is None:
            transfer.outcome = outcome
            self.ended[transfer.purpose.value][outcome.value] += 1

    # copies to either tier ------------------------------------------------------------------------------------

    def load_pays(self, blocks: int) -> bool:
        """Return whether loading so many blocks, behind all that requests wait for, is faster than computing them, by
        what has been measured so far.
        """
        ahead = sum(one.blocks for one in self.transfers.pending(Direction.LOAD) if one.demanded)
        return self.transfers.cost.load_pays(blocks, blocks * self.tree.block_size, ahead)

    def load(self, node: TreeNode, purpose: Purpose, allowed: Allowed) -> NodeTransfer | None:
        """Queue a load of the nodes that `missing(node)` finds. Returns None, having changed nothing, without room on
        the device or where nothing is missing.
        """
        nodes = missing(node)
        if not nodes:
            return None
        self.tree.lock_path(nodes[-1])
        try:
            targets = self.allocate(DEVICE, sum(step.size for step in nodes), allowed=allowed)
        except OutOfBlocks:
            self.counters["denied_loads"] += 1
            self.tree.unlock(nodes[-1])
            return None
        return self._begin(purpose, nodes, HOST, targets)

    def _begin(self, purpose: Purpose, nodes: list[TreeNode], source: Tier, targets: list[int]) -> NodeTransfer:
        sources = [block for step in nodes for block in step.blocks[source]]
        transfer = NodeTransfer(self.transfers.new_copy(purpose, sources, targets), purpose, nodes=nodes)
        for node in nodes:
            node.transfer = transfer
        self.transfers.begin(transfer)
        if purpose is Purpose.DEMAND:
            self.promote(transfer)
        return transfer

    def promote(self, transfer: NodeTransfer) -> None:
        """Move a transfer, which a request waits for now, before all that no request waits for."""
        if not transfer.demanded:
            transfer.demanded = True
            self._copier.hurry(transfer.copy.copy_id)

    def back_up(self, node: TreeNode) -> None:
        """Queue a copy of the path to `node` to the host, as far as it is not there, if there is room.

        Free blocks are room, and copies that are worth no more than this one. While ancestors are being backed up, the
        node waits for them: the host tier is closed under prefixes.
        """
        nodes = [step for step in node.path_down() if not step.blocks[HOST]]
        if not nodes or not self.host_blocks or all(step.transfer for step in nodes):
            return
        if any(step.transfer for step in nodes):
            self._waiting[node] = None
            return
        self.tree.lock_path(node)
        try:
            targets = self._room_for(node, sum(step.size for step in nodes))
        except OutOfBlocks:
            self.counters["skipped_backups"] += 1
            self.tree.unlock(node)
            return
        self._begin(Purpose.BACKUP, nodes, DEVICE, targets)

    def _room_for(self, node: TreeNode, needed: int) -> list[int]:
        """Return host blocks for `node`, of its tenant's own where that is at its limit. Raises `OutOfBlocks` where
        nothing that is worth no more may go for it.
        """
        tenant, worth, policy = node.namespace.tenant, self.tree.policy(node), self.tree.policy
        if (limit := self.limits.get(tenant)) is not None:
            backups = self.transfers.pending(Direction.OFFLOAD)
            moving = (one.blocks for one in backups if one.end.namespace.tenant == tenant)
            excess = self.tree.shares[HOST].by_tenant[tenant] + sum(moving) + needed - limit
            if excess > 0:
                short = max(excess, needed - self.pools[HOST].num_free)  # all of it is its own, or nothing goes
                self._evict(HOST, short, lambda victim: policy(victim) <= worth, tenant)
        return self.allocate(HOST, needed, allowed=lambda victim: policy(victim) <= worth)

    # ends -----------------------------------------------------------------------------------------------------

    def cancel(self, transfer: NodeTransfer) -> bool:
        """End a transfer that has not begun, and the loads that depend on it. Returns whether it was cancelled."""
        if not self._copier.cancel(transfer.copy.copy_id):
            return False
        self.transfers.drop(transfer)
        self._end(transfer, Outcome.CANCELLED)
        self._settle(transfer, keep=False)
        self._cancel_orphans()
        return True

    def clear(self, namespace: Namespace) -> int:
        """Forget all unlocked blocks of `namespace`, cancelling what has not begun. Returns how many blocks went."""
        for transfer in self.transfers.pending():
            if transfer.end.namespace == namespace:
                self.cancel(transfer)
        removed = self.tree.clear(namespace)
        self.release(removed)
        return sum(len(one.blocks) for one in removed)

    def drain(self) -> list[NodeTransfer]:
        """Land what has been copied. Returns the transfers that ended."""
        ended = []
        copied = self._copier.drain() if self.host_blocks else ()
        for transfer in filter(None, map(self.transfers.end, copied)):
            if transfer.is_load and not transfer.has_failed:
                self._landed.append(transfer)
            else:
                self._land(transfer)
                ended.append(transfer)
        while ready := next((one for one in self._landed if one.nodes[0].above is not State.LOADING), None):
            self._landed.remove(ready)
            self._land(ready)
            ended.append(ready)
        return ended

    def _land(self, transfer: NodeTransfer) -> None:
        if transfer.has_failed:
            self._end(transfer, Outcome.FAILED)
        self._settle(transfer, not transfer.has_failed)
        if not transfer.is_load:
            self._end(transfer, Outcome.COMPLETED)
            waiting, self._waiting = self._waiting, {}
            for node in waiting:  # for its ancestors
                if node.blocks[DEVICE]:
                    self.back_up(node)
        elif transfer.live:
            self.tree.touch(transfer.end)  # as just used: a policy by recency would evict it first otherwise
            if transfer.purpose is Purpose.DEMAND:
                self._end(transfer, Outcome.COMPLETED)
            elif transfer.demanded:
                self._end(transfer, Outcome.LATE)
        else:
            late = transfer.demanded and transfer.purpose is Purpose.PREFETCH
            self._end(transfer, Outcome.LATE if late else Outcome.WASTED)
            self._cancel_orphans()

    def _settle(self, transfer: NodeTransfer, keep: bool) -> None:
        """Give the targets to the nodes that still lack them below what is resident, or back to the pool."""
        tier = DEVICE if transfer.is_load else HOST
        spare: list[int] = []
        for node, blocks in transfer.shares():
            node.transfer = None
            assert node.parent is not None
            if keep and not node.blocks[tier] and node.parent.holds(tier):
                self.tree.place(node, tier, blocks)
                if tier is DEVICE:
                    node.arrival = transfer
                    transfer.live += 1
            else:
                spare += blocks
        self.pools[tier].free(spare)
        self.tree.unlock(transfer.end)

    def _cancel_orphans(self) -> None:
        """Cancel loads that have not begun whose ancestors are neither on the device nor on their way any more."""
        for transfer in self.transfers.pending(Direction.LOAD):
            if transfer.nodes[0].above is State.HOST:
                self.cancel(transfer)

    def pending(self) -> list[NodeTransfer]:
        """Return what is queued, under way, or copied and waiting for its ancestors."""
        return [*self.transfers.pending(), *self._landed]

    # proof ----------------------------------------------------------------------------------------------------

    def in_flight(self, direction: Direction) -> list[int]:
        """Return the target blocks of all that is pending in a direction."""
        return [block for one in self.pending() if one.copy.direction is direction for block in one.copy.targets]

    def check_integrity(self, leased: list[int], locked: Iterable[TreeNode]) -> None:
        """Raise `PlanError` unless every block of both pools has exactly one owner (`leased`: device blocks of
        requests), locks are those on `locked` nodes and of transfers, and every state is legal.
        """
        pending = self.pending()
        self.tree.check_integrity([*locked, *(transfer.end for transfer in pending)])
        nodes = list(self.tree.nodes())
        _check_owners(self.pools[DEVICE], DEVICE, nodes, [*leased, *self.in_flight(Direction.LOAD)])
        _check_owners(self.pools[HOST], HOST, nodes, self.in_flight(Direction.OFFLOAD))
        _check_transfers(nodes, pending)


def _check_owners(pool: BlockPool, tier: Tier, nodes: Sequence[TreeNode], others: Sequence[int]) -> None:
    """Check that each block of the pool is either free, cached by one of `nodes`, or one of `others`."""
    pool.check_integrity()
    owned = [*others, *(block for node in nodes for block in node.blocks[tier])]
    if len(owned) + pool.num_free != pool.num_blocks or len(set(owned)) != len(owned):
        raise PlanError(f"owned {tier.name} blocks", sorted(owned), "free + cached + in flight + leased is not all")
    if any(pool.is_free(block) for block in owned):
        raise PlanError(f"owned {tier.name} blocks", sorted(owned), "one is free as well")


def _check_transfers(nodes: Sequence[TreeNode], pending: Sequence[NodeTransfer]) -> None:
    """Check that nodes and transfers agree, states are legal (see `node.py`), and arrivals are counted."""
    moving = {node: transfer for transfer in pending for node in transfer.nodes}
    for node in nodes:
        if node.transfer is not moving.pop(node, None):
            raise PlanError("transfer", node.transfer, "is not the one that has this node")
        if node.transfer is None:
            continue
        legal = (State.LOADING, State.BOTH) if node.transfer.is_load else (State.OFFLOADING,)
        if node.state not in legal or not node.locks:
            raise PlanError("state", node.state, f"with a {node.transfer.copy.direction}, under {node.locks} locks")
    if moving:
        raise PlanError("transfers", list(moving.values()), "have nodes that are not in the tree")
    arrived = Counter(node.arrival for node in nodes if node.arrival)
    if any(transfer.live != count for transfer, count in arrived.items()):
        raise PlanError("arrivals", arrived, "are not what the transfers count")
