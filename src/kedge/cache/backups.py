"""Copies from the device to the host: what is backed up, and where there is room for it."""

from __future__ import annotations

from kedge.cache.copies import Direction, Purpose
from kedge.cache.counters import Reason
from kedge.cache.node import DEVICE, HOST, Handle, TreeNode
from kedge.cache.tier_pools import TierPools
from kedge.cache.transfer import TransferQueue
from kedge.cache.victims import Allowed
from kedge.errors import OutOfBlocks
from kedge.types import TenantId


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
        """Return host blocks for `node`. Raises `OutOfBlocks` where nothing that is worth no more may go for it."""
        self._keep_limit(node, needed)
        return self._pools.allocate(HOST, needed, Reason.BACKUP, allowed=self._worth_at_most(node))

    def _keep_limit(self, node: TreeNode, needed: int) -> None:
        """Evict the host blocks of the tenant of `node` that are too many with `needed` more. Raises `OutOfBlocks`,
        having changed nothing, where nothing that is worth no more than this may go.
        """
        limit = self.limits.get(node.tenant)
        if limit is None:
            return
        moving = (one.blocks for one in self._transfers.pending() if not one.is_load and one.end.tenant == node.tenant)
        excess = self._tree.shares[HOST].by_tenant[node.tenant] + sum(moving) + needed - limit
        if excess > 0:
            removed = self._tree.evict_own(HOST, excess, node.tenant, self._worth_at_most(node))
            self._pools.counters.evicted(removed, Reason.LIMIT)
            self._pools.release(removed)

    def _worth_at_most(self, node: TreeNode) -> Allowed:
        limit = self._tree.policy(node)
        return lambda victim: self._tree.policy(victim) <= limit
