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

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kedge.cache import integrity
from kedge.cache.block_pool import BlockPool
from kedge.cache.copies import Copied, Copier, Direction, Outcome, Purpose
from kedge.cache.counters import Counters, Reason
from kedge.cache.node import DEVICE, HOST, Handle, Node, State, Tier, Transfer
from kedge.cache.radix_tree import RadixTree, Removed
from kedge.cache.transfer import TransferQueue
from kedge.errors import ConfigError, OutOfBlocks
from kedge.policies.cost import CostModel
from kedge.policies.eviction import EvictionPolicy
from kedge.settings import TierSettings
from kedge.types import TenantId


def missing(node: Node) -> list[Node]:
    """The nodes that one load towards `node` brings, top down: the first unbroken run that is on the host only.

    What is above it is on the device or on its way. What may be below it and on its way comes down in its own time.
    """
    run: list[Node] = []
    for step in node.path_down():
        if step.state is State.HOST:
            run.append(step)
        elif run:
            break
    return run


@dataclass(slots=True)
class _Late:
    """What waits for something else to land."""

    landed: list[Transfer] = field(default_factory=list)
    """Loads whose copy has ended while the load of their ancestors has not."""
    backups: dict[Handle, None] = field(default_factory=dict)
    """Nodes to be backed up whose ancestors are being backed up."""


class Tiers:
    """Blocks of both tiers: allocated by evicting, loaded, backed up."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        policy: EvictionPolicy,
        settings: TierSettings,
        copier: Copier | None,
        on_lost: Callable[[Node], None],
        block_bytes: int,
    ) -> None:
        """`on_lost` is called with every node that has left the device; `block_bytes` is the size of one block's KV.

        Raises `ConfigError` for a host tier without a copier, or with memory for not a single block.
        """
        self.host_blocks = settings.host_pool_size(block_bytes)
        if self.host_blocks and copier is None:
            raise ConfigError("host_blocks", self.host_blocks, "a host tier needs a copier")
        self.settings, self.block_bytes = settings, block_bytes
        self.tree = RadixTree(block_size, policy)
        self.pools = (BlockPool(num_blocks), BlockPool(self.host_blocks))
        self.transfers = TransferQueue(copier, settings, block_bytes)
        self.counters = Counters()
        self.host_limits: dict[TenantId, int] = {}
        """Host blocks that a tenant may have; no limit for one that is not in it."""
        self.cost = CostModel()
        self._on_lost = on_lost
        self._late = _Late()

    # room -----------------------------------------------------------------------------------------------------

    def allocate(
        self,
        tier: Tier,
        n: int,
        reason: Reason,
        after: int | None = None,
        allowed: Callable[[Node], bool] | None = None,
    ) -> list[int]:
        """`n` blocks, of which those that are not free are evicted. Raises `OutOfBlocks`, having changed nothing."""
        pool = self.pools[tier]
        if (short := n - pool.num_free) > 0:
            removed = self.tree.evict(tier, short, allowed)
            self.counters.evicted(removed, reason)
            self.release(removed)
        return pool.allocate(n, after)

    def release(self, removed: Iterable[Removed]) -> None:
        """What left the tree is free now."""
        for one in removed:
            self.pools[one.tier].free(one.blocks)
            if one.tier is DEVICE and not one.node.blocks[DEVICE]:
                self._lost(one.node)

    def _lost(self, node: Node) -> None:
        if node.arrival:
            self._unhit(node, Outcome.WASTED)
        self._on_lost(node)

    def hit(self, node: Node) -> None:
        """A request uses `node`: the load that brought it was worth it."""
        node.hits += 1
        if node.arrival:
            self.counters.ended(node.arrival, Outcome.COMPLETED)
            self._unhit(node, Outcome.COMPLETED)

    def _unhit(self, node: Node, outcome: Outcome) -> None:
        transfer, node.arrival = node.arrival, None
        assert transfer is not None
        transfer.live -= 1
        if not transfer.live:
            self.counters.ended(transfer, outcome)

    # host to device -------------------------------------------------------------------------------------------

    def load(self, node: Node, purpose: Purpose, allowed: Callable[[Node], bool], reserve: int = 0) -> Transfer | None:
        """Queues the load of what `missing(node)` finds, if there is room on the device; None, having changed
        nothing, where there is none, or where nothing is missing.
        """
        nodes = missing(node)
        if not nodes:
            return None
        self.tree.lock_path(nodes[-1])
        targets = self._room_for(nodes, purpose, allowed, reserve)
        if targets is None:
            self.counters.denied_loads += 1
            self.tree.unlock(nodes[-1])
            return None
        sources = [block for step in nodes for block in step.blocks[HOST]]
        return self._enqueue(Direction.LOAD, purpose, nodes, sources, targets)

    def _room_for(
        self, nodes: list[Node], purpose: Purpose, allowed: Callable[[Node], bool], reserve: int
    ) -> list[int] | None:
        needed = sum(step.size for step in nodes)
        if self.pools[DEVICE].num_free + self.tree.shares[DEVICE].evictable - needed < reserve:
            return None
        try:
            return self.allocate(DEVICE, needed, Reason(purpose), allowed=allowed)
        except OutOfBlocks:
            return None

    # device to host -------------------------------------------------------------------------------------------

    def back_up(self, node: Node) -> None:
        """Queues a copy to the host of what it lacks on the path to `node`: once, and only if there is room.

        Room is what is free, or held by copies that are worth no more than this one. While ancestors are being backed
        up, the node waits for them: the host tier is closed under prefixes.
        """
        nodes = [step for step in node.path_down() if not step.blocks[HOST]]
        if not nodes or not self.host_blocks or all(step.transfer for step in nodes):
            return
        if any(step.transfer for step in nodes):
            self._late.backups[Handle.of(node)] = None
            return
        self.tree.lock_path(node)
        try:
            needed = sum(step.size for step in nodes)
            self._keep_limit(node, needed)
            targets = self.allocate(HOST, needed, Reason.BACKUP, allowed=self._less_than(node))
        except OutOfBlocks:
            self.counters.skipped_backups += 1
            self.tree.unlock(node)
            return
        sources = [block for step in nodes for block in step.blocks[DEVICE]]
        self._enqueue(Direction.OFFLOAD, Purpose.BACKUP, nodes, sources, targets)

    def _keep_limit(self, node: Node, needed: int) -> None:
        """Evicts, of the host blocks of the tenant of `node`, those that are too many with `needed` more. Raises
        `OutOfBlocks`, having changed nothing, where nothing that is worth no more than this may go.
        """
        limit = self.host_limits.get(node.tenant)
        if limit is None:
            return
        moving = (one.blocks for one in self.pending() if not one.is_load and one.end.tenant == node.tenant)
        excess = self.tree.shares[HOST].by_tenant[node.tenant] + sum(moving) + needed - limit
        if excess > 0:
            removed = self.tree.evict_own(HOST, excess, node.tenant, self._less_than(node))
            self.counters.evicted(removed, Reason.LIMIT)
            self.release(removed)

    def _less_than(self, node: Node) -> Callable[[Node], bool]:
        limit = self.tree.policy(node)
        return lambda victim: self.tree.policy(victim) <= limit

    # both -----------------------------------------------------------------------------------------------------

    def _enqueue(
        self, direction: Direction, purpose: Purpose, nodes: list[Node], sources: list[int], targets: list[int]
    ) -> Transfer:
        transfer = self.transfers.enqueue(direction, purpose, nodes, sources, targets)
        for node in nodes:
            node.transfer = transfer
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """Ends a queued transfer, and the queued loads that depend on it. Raises `PlanError` if it has started."""
        self.transfers.cancel(transfer)
        self.counters.ended(transfer, Outcome.CANCELLED)
        self._settle(transfer, keep=False)
        self._cancel_orphans()

    def clear(self, namespace: tuple[str, str]) -> int:
        """Forgets what nobody holds in `namespace`, having cancelled what has not started; how many blocks."""
        for transfer in self.transfers.pending():
            if transfer.end.namespace == namespace and not transfer.started and transfer.outcome is None:
                self.cancel(transfer)
        removed = self.tree.clear(namespace)
        self.release(removed)
        return sum(len(one.blocks) for one in removed)

    def drain(self) -> list[Transfer]:
        """Lands what has been copied; returns the transfers that ended."""
        ended = []
        for transfer, copied in self.transfers.drain():
            self._observe(transfer, copied)
            if copied.ok and transfer.is_load and self._waits_for_ancestors(transfer):
                self._late.landed.append(transfer)
            else:
                self._land(transfer, copied.ok)
                ended.append(transfer)
        return ended + self._land_late()

    def _observe(self, transfer: Transfer, copied: Copied) -> None:
        if not copied.ok:
            self.counters.failed_copies += 1
        elif transfer.is_load:
            self.counters.blocks_loaded += transfer.blocks
            self.cost.load.observe(transfer.blocks, copied.seconds)
        else:
            self.counters.blocks_offloaded += transfer.blocks

    def _waits_for_ancestors(self, transfer: Transfer) -> bool:
        parent = transfer.nodes[0].parent
        return parent is not None and parent.parent is not None and parent.state is State.LOADING

    def _land_late(self) -> list[Transfer]:
        ended: list[Transfer] = []
        while ready := [one for one in self._late.landed if not self._waits_for_ancestors(one)]:
            for transfer in ready:
                self._late.landed.remove(transfer)
                self._land(transfer, ok=True)
            ended += ready
        return ended

    def _land(self, transfer: Transfer, ok: bool) -> None:
        if not ok:
            self.counters.ended(transfer, Outcome.FAILED)
        self._settle(transfer, keep=ok)
        if not transfer.is_load:
            self.counters.ended(transfer, Outcome.COMPLETED)
            self._retry_backups()
        elif transfer.live:
            self._arrived(transfer)
        else:
            self._nothing_arrived(transfer)

    def _arrived(self, transfer: Transfer) -> None:
        """What has just come counts as just used: a policy by recency would evict it first otherwise."""
        self.tree.touch(transfer.end)
        if transfer.purpose is Purpose.DEMAND:
            self.counters.ended(transfer, Outcome.COMPLETED)
        elif transfer.demanded:
            self.counters.ended(transfer, Outcome.LATE)

    def _nothing_arrived(self, transfer: Transfer) -> None:
        late = transfer.demanded and transfer.purpose is Purpose.PREFETCH
        self.counters.ended(transfer, Outcome.LATE if late else Outcome.WASTED)
        self._cancel_orphans()

    def _settle(self, transfer: Transfer, keep: bool) -> None:
        """Gives the targets to the nodes that still lack them below what is resident, or back to the pool."""
        tier = DEVICE if transfer.is_load else HOST
        spare: list[int] = []
        for node, blocks in transfer.shares():
            node.transfer = None
            assert node.parent is not None
            if keep and not node.blocks[tier] and node.parent.holds(tier):
                self._place(node, tier, blocks, transfer)
            else:
                spare += blocks
        self.pools[tier].free(spare)
        self.tree.unlock(transfer.end)

    def _place(self, node: Node, tier: Tier, blocks: list[int], transfer: Transfer) -> None:
        self.tree.place(node, tier, blocks)
        if tier is DEVICE:
            node.arrival = transfer
            transfer.live += 1

    def _cancel_orphans(self) -> None:
        """Queued loads whose ancestors are neither on the device nor on their way any more."""
        for transfer in self.transfers.queued(Direction.LOAD):
            parent = transfer.nodes[0].parent
            orphan = parent is not None and parent.parent is not None and parent.state is State.HOST
            if orphan and transfer.outcome is None:
                self.cancel(transfer)

    def _retry_backups(self) -> None:
        waiting, self._late.backups = self._late.backups, {}
        for handle in waiting:
            if (node := handle.node) and node.blocks[DEVICE]:
                self.back_up(node)

    def pending(self) -> list[Transfer]:
        """What is queued, under way, or copied and waiting for its ancestors."""
        return [*self.transfers.pending(), *self._late.landed]

    # proof ----------------------------------------------------------------------------------------------------

    def in_flight(self, direction: Direction) -> list[int]:
        """Target blocks of all that is pending."""
        return [block for one in self.pending() if one.copy.direction is direction for block in one.copy.targets]

    def check_integrity(self, leased: list[int], locked: Iterable[Node]) -> None:
        """Raises `PlanError` unless every block of both pools has exactly one owner (`leased`: device blocks of
        requests), locks are those on `locked` nodes and of transfers, and every state is legal.
        """
        pending = self.pending()
        self.tree.check_integrity([*locked, *(transfer.end for transfer in pending)])
        nodes = list(self.tree.nodes())
        integrity.check_owners(self.pools[DEVICE], DEVICE, nodes, [*leased, *self.in_flight(Direction.LOAD)])
        integrity.check_owners(self.pools[HOST], HOST, nodes, self.in_flight(Direction.OFFLOAD))
        integrity.check_transfers(nodes, pending)
