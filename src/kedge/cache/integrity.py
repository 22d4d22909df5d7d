"""Proofs that the books are right: who owns which block, what a tier holds, and what moves. Each raises `PlanError`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kedge.cache.block_pool import BlockPool
from kedge.cache.node import DEVICE, HOST, Share, State, Tier, Transfer, TreeNode
from kedge.errors import PlanError
from kedge.types import TenantId


def check_owners(pool: BlockPool, tier: Tier, nodes: Sequence[TreeNode], others: Sequence[int]) -> None:
    """Check that each block of the pool is either free, cached by one of `nodes`, or one of `others`."""
    pool.check_integrity()
    owned = [*others, *(block for node in nodes for block in node.blocks[tier])]
    if len(owned) + pool.num_free != pool.num_blocks or len(set(owned)) != len(owned):
        raise PlanError(f"owned {tier.name} blocks", sorted(owned), "free + cached + in flight + leased is not all")
    if any(pool.is_free(block) for block in owned):
        raise PlanError(f"owned {tier.name} blocks", sorted(owned), "one is free as well")


def check_share(share: Share, nodes: Sequence[TreeNode]) -> None:
    """Check that a tier holds whole nodes, closed under prefixes, and that counts and queue are right."""
    tier = share.tier
    held = [node for node in nodes if node.blocks[tier]]
    if share.size != sum(node.size for node in held):
        raise PlanError(f"{tier.name} blocks", share.size, "is not the sum over the nodes")
    by_tenant: Counter[TenantId] = Counter()
    for node in held:
        by_tenant[node.tenant] += node.size
    if +share.by_tenant != by_tenant:
        raise PlanError(f"{tier.name} blocks by tenant", share.by_tenant, "are not the sums over the nodes")
    if share.evictable != sum(node.size for node in held if not node.locks):
        raise PlanError(f"{tier.name} evictable blocks", share.evictable, "is not the sum over unlocked nodes")
    for node in nodes:
        _check_held(node, tier)
    if not share.queue.covers(node for node in held if node.is_candidate(tier)):
        raise PlanError(f"{tier.name} eviction queue", len(held), "does not hold exactly the candidates' keys")


def _check_held(node: TreeNode, tier: Tier) -> None:
    assert node.parent is not None
    if node.blocks[tier] and not node.parent.holds(tier):
        raise PlanError("node", node.blocks, f"is held by {tier.name}, but its parent is not")
    if len(node.blocks[tier]) not in (0, node.size) or not (node.blocks[DEVICE] or node.blocks[HOST]):
        raise PlanError("node", node.blocks, f"has {node.size} blocks, held whole or not at all, and somewhere")
    if node.resident_children[tier] != sum(bool(child.blocks[tier]) for child in node.children.values()):
        raise PlanError("resident children", node.resident_children, "is not the count over its children")


def check_transfers(nodes: Sequence[TreeNode], pending: Sequence[Transfer]) -> None:
    """Check that nodes and transfers agree, states are legal (see `node.py`), and arrivals are counted."""
    moving = {node: transfer for transfer in pending for node in transfer.nodes}
    for node in nodes:
        if node.transfer is not moving.pop(node, None):
            raise PlanError("transfer", node.transfer, "is not the one that has this node")
        if node.transfer is not None:
            _check_moving(node, node.transfer)
    if moving:
        raise PlanError("transfers", list(moving.values()), "have nodes that are not in the tree")
    arrived = Counter(node.arrival for node in nodes if node.arrival)
    if any(transfer.live != count for transfer, count in arrived.items()):
        raise PlanError("arrivals", arrived, "are not what the transfers count")


def _check_moving(node: TreeNode, transfer: Transfer) -> None:
    legal = (State.LOADING, State.BOTH) if transfer.is_load else (State.OFFLOADING,)
    if node.state not in legal or not node.locks:
        raise PlanError("state", node.state, f"with a {transfer.copy.direction}, under {node.locks} locks")
    parent = node.parent
    orphan = parent is not None and parent.parent is not None and parent.state is State.HOST
    if orphan and node.state is State.LOADING and not transfer.started:
        raise PlanError("state", node.state, "is queued to load, but its ancestors are not on their way")
