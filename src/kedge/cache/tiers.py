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

from kedge.cache import integrity
from kedge.cache.backups import Backups
from kedge.cache.copies import BlockFiles, Copied, Copier, Direction, Outcome, Purpose
from kedge.cache.counters import Reason
from kedge.cache.disk import DiskTier
from kedge.cache.disk_writes import DiskLimits
from kedge.cache.node import DEVICE, HOST, State, Tier, Transfer, TreeNode
from kedge.cache.radix_tree import RadixTree
from kedge.cache.tier_pools import TierPools
from kedge.cache.transfer import TransferQueue
from kedge.errors import ConfigError, OutOfBlocks
from kedge.policies.cost import CostModel
from kedge.policies.eviction import EvictionPolicy
from kedge.settings import TierSettings
from kedge.types import Namespace


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
    """Both tiers and what moves between them: loads are queued here, backups by `Backups`; both land here."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        policy: EvictionPolicy,
        settings: TierSettings,
        copier: Copier | None,
        on_lost: Callable[[TreeNode], None],
        block_bytes: int,
        files: BlockFiles | None = None,
    ) -> None:
        """Begin with empty tiers; `on_lost` is called with every node that has left the device.

        `block_bytes` is the size of one block's KV; `files` are on the disk behind the host tier. Raises `ConfigError`
        for a host tier without a copier, or with memory for not a single block.
        """
        self.host_blocks = settings.host_pool_size(block_bytes)
        if self.host_blocks and copier is None:
            raise ConfigError("host_blocks", self.host_blocks, "a host tier needs a copier")
        self.settings, self.block_bytes = settings, block_bytes
        self.tree = RadixTree(block_size, policy)
        self.pools = TierPools(self.tree, num_blocks, self.host_blocks, on_lost)
        self.counters = self.pools.counters
        self.transfers = TransferQueue(copier, settings, block_bytes)
        self.backups = Backups(self.pools, self.transfers)
        self.cost = CostModel()
        self.disk = _disk_behind(self, files) if files and self.host_blocks else None
        self._landed: list[Transfer] = []
        """Loads whose copy has ended while the load of their ancestors has not."""

    # loads ----------------------------------------------------------------------------------------------------

    def load(
        self, node: TreeNode, purpose: Purpose, allowed: Callable[[TreeNode], bool], reserve: int = 0
    ) -> Transfer | None:
        """Queue the load of what `missing(node)` finds, if there is room on the device. Returns None, having changed
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
        return self.transfers.enqueue(Direction.LOAD, purpose, nodes, sources, targets)

    def _room_for(
        self, nodes: list[TreeNode], purpose: Purpose, allowed: Callable[[TreeNode], bool], reserve: int
    ) -> list[int] | None:
        needed = sum(step.size for step in nodes)
        if self.pools[DEVICE].num_free + self.tree.shares[DEVICE].evictable - needed < reserve:
            return None
        try:
            return self.pools.allocate(DEVICE, needed, Reason(purpose), allowed=allowed)
        except OutOfBlocks:
            return None

    # ends -----------------------------------------------------------------------------------------------------

    def cancel(self, transfer: Transfer) -> None:
        """End a queued transfer, and the queued loads that depend on it. Raises `PlanError` if it has started."""
        self.transfers.cancel(transfer)
        self.counters.ended(transfer, Outcome.CANCELLED)
        self._settle(transfer, keep=False)
        self._cancel_orphans()

    def give_up_backups(self) -> bool:
        """Cancel all backups that have not started. Returns whether there were any."""
        queued = self.transfers.queued(Direction.OFFLOAD)
        for transfer in queued:
            self.cancel(transfer)
        return bool(queued)

    def clear(self, namespace: Namespace) -> int:
        """Forget all unlocked blocks of `namespace`, cancelling what has not started. Returns how many blocks went."""
        for transfer in self.transfers.pending():
            if transfer.end.namespace == namespace and not transfer.started and transfer.outcome is None:
                self.cancel(transfer)
        if self.disk:
            self.disk.clear(namespace)
        removed = self.tree.clear(namespace)
        self.pools.release(removed)
        return sum(len(one.blocks) for one in removed)

    def drain(self) -> list[Transfer]:
        """Land what has been copied. Returns the transfers that ended."""
        ended = []
        for transfer, copied in self.transfers.drain():
            self._observe(transfer, copied)
            if copied.ok and transfer.is_load:
                self._landed.append(transfer)
            else:
                self._land(transfer, copied.ok)
                ended.append(transfer)
        return ended + self._land_loads()

    def land(self) -> bool:
        """Land what has been copied, or read from the disk. Returns whether anything has."""
        came = self.disk is not None and self.disk.drain()
        return bool(self.drain()) or came

    def namespaces(self) -> set[Namespace]:
        """Return the namespaces of which any tier, or the disk, holds something."""
        return {*self.tree.index.namespaces(), *(self.disk.namespaces() if self.disk else ())}

    @property
    def busy(self) -> bool:
        """Whether something is on its way between the tiers, or a request waits for the disk."""
        return bool(self.pending()) or (self.disk is not None and self.disk.is_awaited)

    def _observe(self, transfer: Transfer, copied: Copied) -> None:
        if not copied.ok:
            self.counters.failed_copies += 1
        elif transfer.is_load:
            transfer.corrupt = copied.corrupt
            self.counters.corrupt_blocks += len(copied.corrupt)
            self.counters.blocks_loaded += transfer.blocks - len(copied.corrupt)
            self.cost.load.observe(transfer.blocks, copied.seconds)
        else:
            self.counters.blocks_offloaded += transfer.blocks

    def _waits_for_ancestors(self, transfer: Transfer) -> bool:
        parent = transfer.nodes[0].parent
        return parent is not None and parent.parent is not None and parent.state is State.LOADING

    def _land_loads(self) -> list[Transfer]:
        ended: list[Transfer] = []
        while ready := next((one for one in self._landed if not self._must_wait(one)), None):
            self._landed.remove(ready)
            self._land(ready, ok=True)
            ended.append(ready)
        return ended

    def _must_wait(self, transfer: Transfer) -> bool:
        """Return whether a load that has been copied waits for that of its ancestors, or for one under way that reads
        what has to leave the host with its corrupt blocks.
        """
        reading = self.transfers.started() if transfer.corrupt else ()
        return self._waits_for_ancestors(transfer) or any(one.depends_on(transfer) for one in reading)

    def _land(self, transfer: Transfer, ok: bool) -> None:
        corrupt = self._split_off_corrupt(transfer) if ok else None
        if corrupt or not ok:
            self.counters.ended(transfer, Outcome.FAILED)
        self._settle(transfer, ok, corrupt)
        if not transfer.is_load:
            self.counters.ended(transfer, Outcome.COMPLETED)
            if self.disk and ok:
                self.disk.writes.store(transfer.end)
            self.backups.retry()
        elif transfer.live:
            self._arrived(transfer)
        else:
            self._nothing_arrived(transfer)
        if corrupt:
            self.pools.release(self.tree.purge(corrupt))

    def _split_off_corrupt(self, transfer: Transfer) -> TreeNode | None:
        """Return the node that begins with the first corrupt block of a load, None where all are sound. What else was
        to be loaded below it ends.
        """
        node, used = transfer.first_corrupt()
        if node is None:
            return None
        for one in [one for one in self.pending() if one.depends_on(transfer)]:
            if one in self._landed:
                self._landed.remove(one)
                self._land(one, ok=False)
            elif one.outcome is None:
                self.cancel(one)
        if used:
            self.tree.index.split(node, used)
        return node

    def _arrived(self, transfer: Transfer) -> None:
        """Count what has just come as just used: a policy by recency would evict it first otherwise."""
        self.tree.touch(transfer.end)
        if transfer.purpose is Purpose.DEMAND:
            self.counters.ended(transfer, Outcome.COMPLETED)
        elif transfer.demanded:
            self.counters.ended(transfer, Outcome.LATE)

    def _nothing_arrived(self, transfer: Transfer) -> None:
        late = transfer.demanded and transfer.purpose is Purpose.PREFETCH
        self.counters.ended(transfer, Outcome.LATE if late else Outcome.WASTED)
        self._cancel_orphans()

    def _settle(self, transfer: Transfer, keep: bool, corrupt: TreeNode | None = None) -> None:
        """Give the targets to the nodes that still lack them below what is resident, or back to the pool: those of
        `corrupt` and all after it go back.
        """
        tier = DEVICE if transfer.is_load else HOST
        spare: list[int] = []
        for node, blocks in transfer.shares():
            node.transfer = None
            assert node.parent is not None
            keep = keep and node is not corrupt
            if keep and not node.blocks[tier] and node.parent.holds(tier):
                self._place(node, tier, blocks, transfer)
            else:
                spare += blocks
        self.pools[tier].free(spare)
        self.tree.unlock(transfer.end)

    def _place(self, node: TreeNode, tier: Tier, blocks: list[int], transfer: Transfer) -> None:
        self.tree.place(node, tier, blocks)
        if tier is DEVICE:
            node.arrival = transfer
            transfer.live += 1

    def _cancel_orphans(self) -> None:
        """Cancel queued loads whose ancestors are neither on the device nor on their way any more."""
        for transfer in self.transfers.queued(Direction.LOAD):
            parent = transfer.nodes[0].parent
            orphan = parent is not None and parent.parent is not None and parent.state is State.HOST
            if orphan and transfer.outcome is None:
                self.cancel(transfer)

    def pending(self) -> list[Transfer]:
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
        integrity.check_owners(self.pools[DEVICE], DEVICE, nodes, [*leased, *self.in_flight(Direction.LOAD)])
        reading = self.disk.reading if self.disk else []
        integrity.check_owners(self.pools[HOST], HOST, nodes, [*self.in_flight(Direction.OFFLOAD), *reading])
        if self.disk:
            self.disk.check_integrity()
        integrity.check_transfers(nodes, pending)


def _disk_behind(tiers: Tiers, files: BlockFiles) -> DiskTier:
    limits = DiskLimits.of(tiers.settings, tiers.block_bytes)
    return DiskTier(tiers.pools, tiers.cost, files, limits, tiers.backups.limits)
