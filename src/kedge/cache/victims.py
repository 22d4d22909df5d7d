"""Choosing which nodes a tier gives up for a number of blocks: leaves first, in the order of the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from kedge.cache.node import Share, Tier, TreeNode
from kedge.errors import OutOfBlocks, PlanError
from kedge.policies.eviction import EvictionKey
from kedge.types import TenantId

Allowed = Callable[[TreeNode], bool]
"""Whether a node may be evicted for the caller."""


def choose(share: Share, n: int, allowed: Allowed | None, offer: Callable[[TreeNode], None]) -> list[TreeNode]:
    """Return the next nodes to go for `n` blocks; of the last one perhaps only a part is needed.

    Parents become candidates as their children are chosen: counts are decremented for that and restored before this
    returns. `offer` queues a node that has become a candidate. Raises `OutOfBlocks`, having changed nothing, if the
    next to go is not `allowed`.
    """
    chosen: list[TreeNode] = []
    emptied: list[TreeNode] = []
    refused = False
    while n > 0 and not refused:
        node = share.queue.pop()
        if node is None:
            raise PlanError("eviction queue", n, "blocks are still to go, but there is no candidate")
        chosen.append(node)
        refused = allowed is not None and not allowed(node)
        n -= node.size
        if n > 0 and not refused and node.parent is not None:
            emptied.append(node.parent)
            node.parent.resident_children[share.tier] -= 1
            offer(node.parent)
    for parent in emptied:
        parent.resident_children[share.tier] += 1
    if refused:
        for node in chosen:
            offer(node)
        raise OutOfBlocks("blocks", n, "left to free, and the next to go may not be evicted for this")
    return chosen


def choose_of_tenant(
    nodes: Iterable[TreeNode],
    tier: Tier,
    n: int,
    tenant: TenantId,
    allowed: Allowed,
    key: Callable[[TreeNode], EvictionKey],
) -> list[TreeNode]:
    """Return the next nodes of one tenant to go for `n` blocks, as `choose` does for all.

    O(m log m) with m nodes of the tenant. Raises `OutOfBlocks` where they are not enough, or the next is not `allowed`.
    """
    own = [node for node in nodes if node.tenant == tenant and node.blocks[tier] and not node.locks]
    children = {node: node.resident_children[tier] for node in own}
    waiting = [(key(node), number, node) for number, node in enumerate(own) if not children[node]]
    heapify(waiting)
    chosen: list[TreeNode] = []
    while n > 0:
        node = heappop(waiting)[2] if waiting else None
        if node is None or not allowed(node):
            raise OutOfBlocks("blocks", n, f"left to free of {tenant}, and no more of its own may be evicted")
        chosen.append(node)
        n -= node.size
        if (parent := node.parent) in children:
            children[parent] -= 1
            if not children[parent]:
                heappush(waiting, (key(parent), -len(chosen), parent))
    return chosen
