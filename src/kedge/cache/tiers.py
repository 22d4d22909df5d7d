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

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from kedge.cache.block_pool import BlockPool, TierPools
from kedge.cache.copies import Copied, Copier, Copy, Direction, Outcome, Purpose
from kedge.cache.node import DEVICE, HOST, Handle, State, Tier, Transfer, TreeNode
from kedge.cache.radix_tree import Allowed, RadixTree
from kedge.errors import ConfigError, OutOfBlocks, PlanError
from kedge.policies.eviction import EvictionPolicy
from kedge.policies.prefetch import COPY_JOBS, CostModel
from kedge.settings import TierSettings
from kedge.types import Namespace, TenantId


class TransferQueue:
    """A queue that hands transfers to the copier within the limits: demands first, then in the order of arrival.

    Speculative transfers never delay demanded ones: for a demand the limits count other demands only.
    """

    def __init__(self, copier: Copier | None, jobs: int = COPY_JOBS) -> None:
        """Start with none under way, of so many copies at once in each direction."""
        self._copier, self.jobs = copier, jobs
        self._queued: dict[Direction, deque[Transfer]] = {direction: deque() for direction in Direction}
        self._started: dict[int, Transfer] = {}
        self._ids = itertools.count()

    def enqueue(
        self, direction: Direction, purpose: Purpose, nodes: list[TreeNode], sources: list[int], targets: list[int]
    ) -> Transfer:
        """Add a transfer of `nodes`. It starts with one of the next calls of `start`."""
        copy = Copy(next(self._ids), direction, tuple(sources), tuple(targets))
        transfer = Transfer(copy, purpose, nodes, demanded=purpose is Purpose.DEMAND)
        for node in nodes:
            node.transfer = transfer
        self._put(transfer)
        return transfer

    def promote(self, transfer: Transfer) -> None:
        """Move `transfer`, which a request waits for now, before all that no request waits for."""
        if transfer.demanded:
            return
        transfer.demanded = True
        if transfer.started:
            self._hurry(transfer)
        else:
            self._lane(transfer).remove(transfer)
            self._put(transfer)

    def cancel(self, transfer: Transfer) -> None:
        """Take a queued transfer out. Raises `PlanError` if it has started: its blocks are being written."""
        if transfer.started:
            raise PlanError("transfer", transfer.copy, "has started and cannot be cancelled")
        self._lane(transfer).remove(transfer)

    def start(self) -> None:
        """Hand over what the limits allow."""
        for queued in self._queued.values():
            while queued and self._fits(queued[0]):
                assert self._copier is not None
                transfer = queued.popleft()
                transfer.started = True
                self._started[transfer.copy.copy_id] = transfer
                self._copier.submit(transfer.copy)
                if transfer.demanded:
                    self._hurry(transfer)

    def drain(self) -> list[tuple[Transfer, Copied]]:
        """Return what has ended. Raises `PlanError` for a copy that was not under way."""
        ended = []
        for copied in self._copier.drain() if self._copier else ():
            transfer = self._started.pop(copied.copy_id, None)
            if transfer is None:
                raise PlanError("copy_id", copied.copy_id, "is not under way")
            ended.append((transfer, copied))
        return ended

    def queued(self, direction: Direction) -> list[Transfer]:
        """Return what has not started, next first."""
        return list(self._queued[direction])

    def started(self) -> list[Transfer]:
        """Return what is under way."""
        return list(self._started.values())

    def demanded_blocks(self, direction: Direction) -> int:
        """Return how many blocks requests wait for: a new demand comes after these, and before all others."""
        pending = (transfer for transfer in self.pending() if transfer.copy.direction is direction)
        return sum(transfer.blocks for transfer in pending if transfer.demanded)

    def pending(self) -> list[Transfer]:
        """Return all that has not ended."""
        return [*self._started.values(), *itertools.chain.from_iterable(self._queued.values())]

    def _put(self, transfer: Transfer) -> None:
        queued = self._lane(transfer)
        at = sum(other.demanded for other in queued) if transfer.demanded else len(queued)
        queued.insert(at, transfer)

    def _lane(self, transfer: Transfer) -> deque[Transfer]:
        return self._queued[transfer.copy.direction]

    def _fits(self, transfer: Transfer) -> bool:
        lane = (one for one in self._started.values() if one.copy.direction is transfer.copy.direction)
        return sum(one.demanded or not transfer.demanded for one in lane) < self.jobs

    def _hurry(self, transfer: Transfer) -> None:
        assert self._copier is not None
        self._copier.hurry(transfer.copy.copy_id)


class Backups:
    """Queues copies to the host tier, within each tenant's limit."""

    def __init__(self, pools: TierPools, transfers: TransferQueue) -> None:
        self._pools, self._tree, self._transfers = pools, pools.tree, transfers
        self.limits: dict[TenantId, int] = {}
        """Host blocks that a tenant may have; no limit for one that is not in it."""
        self._waiting: dict[Handle, None] = {}
        """Nodes to be backed up whose ancestors are being backed up."""

    def back_up(self, node: TreeNode) -> None:
        """Queue a copy to the host of what it lacks on the path to `node`: once, and only if there is room.

        Room is what is free, or held by copies that are worth no more than this one. While ancestors are being backed
        up, the node waits for them: the host tier is closed under prefixes.
        """
        nodes = [step for step in node.path_down() if not step.blocks[HOST]]
        if not nodes or not self._pools[HOST].num_blocks or all(step.transfer for step in nodes):
            return
        if any(step.transfer for step in nodes):
            self._waiting[Handle.of(node)] = None
            return
        self._tree.lock_path(node)
        try:
            targets = self._room_for(node, sum(step.size for step in nodes))
        except OutOfBlocks:
            self._pools.counters.skipped_backups += 1
            self._tree.unlock(node)
            return
        sources = [block for step in nodes for block in step.blocks[DEVICE]]
        self._transfers.enqueue(Direction.OFFLOAD, Purpose.BACKUP, nodes, sources, targets)

    def retry(self) -> None:
        """Try again what waited for its ancestors, after a backup has ended."""
        waiting, self._waiting = self._waiting, {}
        for handle in waiting:
            if (node := handle.node) and node.blocks[DEVICE]:
                self.back_up(node)

    def _room_for(self, node: TreeNode, needed: int) -> list[int]:
        """Return host blocks for `node`, of its tenant's own where that is at its limit. Raises `OutOfBlocks` where
        nothing that is worth no more may go for it.
        """
        limit = self.limits.get(node.tenant)
        if limit is not None:
            queue = self._transfers.pending()
            moving = (one.blocks for one in queue if not one.is_load and one.end.tenant == node.tenant)
            excess = self._tree.shares[HOST].by_tenant[node.tenant] + sum(moving) + needed - limit
            if excess > 0:
                removed = self._tree.evict_own(HOST, excess, node.tenant, self._worth_at_most(node))
                self._pools.counters.evicted(removed)
                self._pools.release(removed)
        return self._pools.allocate(HOST, needed, allowed=self._worth_at_most(node))

    def _worth_at_most(self, node: TreeNode) -> Allowed:
        limit = self._tree.policy(node)
        return lambda victim: self._tree.policy(victim) <= limit


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
    ) -> None:
        """Begin with empty tiers; `on_lost` is called with every node that has left the device.

        `block_bytes` is the size of one block's KV. Raises `ConfigError` for a host tier without a copier, or with
        memory for not a single block.
        """
        self.host_blocks = settings.host_pool_size(block_bytes)
        if self.host_blocks and copier is None:
            raise ConfigError("host_blocks", self.host_blocks, "a host tier needs a copier")
        self.settings, self.block_bytes = settings, block_bytes
        self.tree = RadixTree(block_size, policy)
        self.pools = TierPools(self.tree, num_blocks, self.host_blocks, on_lost)
        self.counters = self.pools.counters
        self.transfers = TransferQueue(copier)
        self.backups = Backups(self.pools, self.transfers)
        self.cost = CostModel()
        self._landed: list[Transfer] = []
        """Loads whose copy has ended while the load of their ancestors has not."""

    # loads ----------------------------------------------------------------------------------------------------

    def load(self, node: TreeNode, purpose: Purpose, allowed: Callable[[TreeNode], bool]) -> Transfer | None:
        """Queue the load of what `missing(node)` finds, if there is room on the device. Returns None, having changed
        nothing, where there is none, or where nothing is missing.
        """
        nodes = missing(node)
        if not nodes:
            return None
        self.tree.lock_path(nodes[-1])
        needed, targets = sum(step.size for step in nodes), None
        with suppress(OutOfBlocks):
            targets = self.pools.allocate(DEVICE, needed, allowed=allowed)
        if targets is None:
            self.counters.denied_loads += 1
            self.tree.unlock(nodes[-1])
            return None
        sources = [block for step in nodes for block in step.blocks[HOST]]
        return self.transfers.enqueue(Direction.LOAD, purpose, nodes, sources, targets)

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
        while ready := next((one for one in self._landed if not self._must_wait(one)), None):
            self._landed.remove(ready)
            self._land(ready, ok=True)
            ended.append(ready)
        return ended

    def _observe(self, transfer: Transfer, copied: Copied) -> None:
        if not copied.ok:
            self.counters.failed_copies += 1
        elif transfer.is_load:
            self.counters.blocks_loaded += transfer.blocks
            self.cost.load.observe(transfer.blocks, copied.seconds)
        else:
            self.counters.blocks_offloaded += transfer.blocks

    def _must_wait(self, transfer: Transfer) -> bool:
        """Return whether a load that has been copied waits for that of its ancestors."""
        parent = transfer.nodes[0].parent
        return parent is not None and parent.parent is not None and parent.state is State.LOADING

    def _land(self, transfer: Transfer, ok: bool) -> None:
        if not ok:
            self.counters.ended(transfer, Outcome.FAILED)
        self._settle(transfer, ok)
        if not transfer.is_load:
            self.counters.ended(transfer, Outcome.COMPLETED)
            self.backups.retry()
        elif transfer.live:
            self.tree.touch(transfer.end)  # as just used: a policy by recency would evict it first otherwise
            if transfer.purpose is Purpose.DEMAND:
                self.counters.ended(transfer, Outcome.COMPLETED)
            elif transfer.demanded:
                self.counters.ended(transfer, Outcome.LATE)
        else:
            late = transfer.demanded and transfer.purpose is Purpose.PREFETCH
            self.counters.ended(transfer, Outcome.LATE if late else Outcome.WASTED)
            self._cancel_orphans()

    def _settle(self, transfer: Transfer, keep: bool) -> None:
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


def _check_transfers(nodes: Sequence[TreeNode], pending: Sequence[Transfer]) -> None:
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
        parent = node.parent
        orphan = parent is not None and parent.parent is not None and parent.state is State.HOST
        if orphan and node.state is State.LOADING and not node.transfer.started:
            raise PlanError("state", node.state, "is queued to load, but its ancestors are not on their way")
    if moving:
        raise PlanError("transfers", list(moving.values()), "have nodes that are not in the tree")
    arrived = Counter(node.arrival for node in nodes if node.arrival)
    if any(transfer.live != count for transfer, count in arrived.items()):
        raise PlanError("arrivals", arrived, "are not what the transfers count")
