"""The block pools of both tiers under one tree: room is made by evicting."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kedge.cache.block_pool import BlockPool
from kedge.cache.copies import Outcome
from kedge.cache.counters import Counters, Reason
from kedge.cache.node import DEVICE, Tier, TreeNode
from kedge.cache.radix_tree import Allowed, RadixTree, Removed


class TierPools:
    """Which blocks of each tier are free, and which the tree holds. `on_lost` gets every node that left the device."""

    def __init__(self, tree: RadixTree, num_blocks: int, host_blocks: int, on_lost: Callable[[TreeNode], None]) -> None:
        self.tree, self.counters = tree, Counters()
        self._pools = (BlockPool(num_blocks), BlockPool(host_blocks))
        self._on_lost = on_lost

    def __getitem__(self, tier: Tier) -> BlockPool:
        return self._pools[tier]

    def allocate(
        self, tier: Tier, n: int, reason: Reason, after: int | None = None, allowed: Allowed | None = None
    ) -> list[int]:
        """Return `n` blocks, evicting what is not free. Raises `OutOfBlocks`, having changed nothing."""
        pool = self[tier]
        if (short := n - pool.num_free) > 0:
            removed = self.tree.evict(tier, short, allowed)
            self.counters.evicted(removed, reason)
            self.release(removed)
        return pool.allocate(n, after)

    def release(self, removed: Iterable[Removed]) -> None:
        """Free the blocks that left the tree."""
        for one in removed:
            self[one.tier].free(one.blocks)
            if one.tier is DEVICE and not one.node.blocks[DEVICE]:
                self._lost(one.node)

    def hit(self, node: TreeNode) -> None:
        """Count a request that uses `node`: the load that brought it was worth it."""
        node.hits += 1
        if node.arrival:
            self.counters.ended(node.arrival, Outcome.COMPLETED)
            self._end_arrival(node, Outcome.COMPLETED)

    def _lost(self, node: TreeNode) -> None:
        if node.arrival:
            self._end_arrival(node, Outcome.WASTED)
        self._on_lost(node)

    def _end_arrival(self, node: TreeNode, outcome: Outcome) -> None:
        transfer, node.arrival = node.arrival, None
        assert transfer is not None
        transfer.live -= 1
        if not transfer.live:
            self.counters.ended(transfer, outcome)
