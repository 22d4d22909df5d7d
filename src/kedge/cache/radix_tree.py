"""Which block of which tier holds the KV of which exact prefix.

A node is a run of full blocks. Locking a node locks its path to the root; a node without locks has no locked
descendant, so everything below it can go, leaves first. What a tier holds is closed under prefixes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from kedge.cache import integrity
from kedge.cache.node import DEVICE, HOST, Handle, LabelKey, Share, Tier, TreeNode, split_transfers
from kedge.cache.prefix_index import PrefixIndex, Walk
from kedge.errors import OutOfBlocks, PlanError
from kedge.policies.eviction import EvictionKey, EvictionPolicy, lru
from kedge.structures.step_counts import StepCounts
from kedge.types import Namespace, TenantId

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


class Labels:
    """Who ends a fixed prompt where, and the least step of everything below (KVFlow, section 3.1): one label per key.

    The step stands on the node that ends the fixed prompt and bubbles up as a minimum; what follows it is varying.
    `offer` is called with every node whose priority changed.
    """

    def __init__(self, offer: Callable[[TreeNode], None]) -> None:
        self._offer = offer
        self._handles: dict[LabelKey, Handle] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def node(self, key: LabelKey) -> TreeNode | None:
        """Return the node that ends the fixed prompt of `key`, while it is in the tree."""
        handle = self._handles.get(key)
        return None if handle is None else handle.node

    def put(self, key: LabelKey, node: TreeNode, step: float) -> None:
        """Label `node`; the label that `key` had elsewhere goes."""
        if self.node(key) is not node:
            self.drop(key)
            self._handles[key] = Handle.of(node)
            for above in node.path():
                above.varying = False
            if not node.labels:
                self._mark_varying_below(node)
        self._set(key, node, step)

    def move(self, key: LabelKey, step: float) -> TreeNode | None:
        """Change the step of a label. Returns its node. O(depth)."""
        node = self.node(key)
        if node is not None:
            self._set(key, node, step)
        return node

    def drop(self, key: LabelKey) -> None:
        """Forget the label of `key`, if it has one."""
        if node := self.node(key):
            _change(node, node.labels.pop(key), None, self._offer)
        self._handles.pop(key, None)

    def leave(self, node: TreeNode) -> None:
        """Let the labels of `node`, which has no children and is leaving the tree, end at its parent instead.

        So what is left of a history keeps its worth. The root has no labels: with the last node they go.
        """
        labels, parent = dict(node.labels), node.parent
        node.labels.clear()
        node.generation += 1
        assert parent is not None
        if node.step is not None:
            _change(parent, node.step, None, self._offer)
        for key, step in labels.items():
            if parent.parent is None:
                del self._handles[key]
            else:
                self._handles[key] = Handle.of(parent)
                self._set(key, parent, step)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Let `upper`, which was put above `lower`, take its step. Labels mark an end, so they stay on `lower`."""
        if lower.step is not None:
            upper.steps, upper.step = StepCounts(), lower.step
            upper.steps.add(lower.step)
        upper.varying = lower.varying

    def check_integrity(self, nodes: list[TreeNode]) -> None:
        """Raise `PlanError` unless handles and labels agree and priorities are what a naive look gives."""
        found = {key: node for node in nodes for key in node.labels}
        if found != {key: handle.node for key, handle in self._handles.items()}:
            raise PlanError("labels", found, "do not agree with the handles")
        for node in nodes:
            _check_priority(node)

    def _set(self, key: LabelKey, node: TreeNode, step: float) -> None:
        old = node.labels.get(key)
        node.labels[key] = step
        _change(node, old, step, self._offer)

    def _mark_varying_below(self, node: TreeNode) -> None:
        stack = list(node.children.values())
        while stack:
            below = stack.pop()
            if below.varying:
                continue
            if below.step is None:
                below.varying = True
                self._offer(below)
            stack.extend(below.children.values())


def _change(node: TreeNode | None, old: float | None, new: float | None, offer: Callable[[TreeNode], None]) -> None:
    """Change one of a node's steps from `old` to `new` (None: there is none), upwards while a minimum changes."""
    while node is not None and node.parent is not None and old != new:
        before = node.step
        _recount(node, old, new)
        if node.step != before:
            offer(node)
        node, old, new = node.parent, before, node.step


def _recount(node: TreeNode, old: float | None, new: float | None) -> None:
    if node.steps is None:
        node.steps = StepCounts()
    if old is not None:
        node.steps.remove(old)
    if new is not None:
        node.steps.add(new)
    node.step = node.steps.least
    if node.step is None:
        node.steps = None


def _check_priority(node: TreeNode) -> None:
    steps = [*node.labels.values(), *(child.step for child in node.children.values() if child.step is not None)]
    counts = node.steps.counts if node.steps else Counter[float]()
    if node.step != min(steps, default=None) or counts != Counter(steps):
        raise PlanError("priority", node.step, f"the least of {steps} is another one")


@dataclass(frozen=True, slots=True)
class Inserted:
    """`adopted` blocks now belong to the tree; `duplicates` do not: the tree holds the same tokens in other blocks."""

    node: TreeNode
    adopted: list[int]
    duplicates: list[int]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that a tier gave up, and the node that held them (the part that went, where it was a part)."""

    node: TreeNode
    tier: Tier
    blocks: list[int]


class RadixTree:
    """Full blocks by (namespace, token ids), in two tiers."""

    def __init__(self, block_size: int, policy: EvictionPolicy = lru) -> None:
        self.block_size = block_size
        self.policy = policy
        self.shares = tuple(Share(tier, self._key) for tier in Tier)
        self.labels = Labels(self.offer)
        self.index = PrefixIndex(block_size, self._on_split, self.labels.leave)
        self._clock = 0
        self.version = 0
        """Number of times that a tier began or ceased to hold blocks."""

    # looking up -----------------------------------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> list[int]:
        """Return the device blocks of the longest prefix of `tokens` on the device. Changes nothing."""
        walk = self.walk(namespace, tokens, DEVICE)
        return [] if walk is None else walk.device_blocks()

    def walk(self, namespace: Namespace, tokens: Sequence[int], tier: Tier | None = None) -> Walk | None:
        """Return the longest prefix that `tier`, or any tier, holds; None for an unknown namespace. Changes nothing."""
        return self.index.find(namespace, self.index.pack(tokens), tier)

    def end(self, namespace: Namespace, tokens: Sequence[int]) -> TreeNode | None:
        """Return the node that ends the longest prefix that any tier holds, split off where needed; None if none."""
        walk = self.walk(namespace, tokens)
        return self.index.ending(walk) if walk and walk.length else None

    # locking --------------------------------------------------------------------------------------------------

    def lock(self, namespace: Namespace, tokens: Sequence[int]) -> tuple[TreeNode, list[int]]:
        """Lock the longest prefix on the device. Returns the node that ends it, to be given to `unlock`, and its
        device blocks.
        """
        walk = self.index.walk(self.index.root(namespace), self.index.pack(tokens), DEVICE)
        blocks = walk.device_blocks()
        node = self.index.ending(walk)
        self.lock_path(node)
        return node, blocks

    def lock_path(self, node: TreeNode) -> None:
        """Add a lock to `node` and its ancestors."""
        for step in node.path():
            if not step.locks:
                for share in self.shares:
                    share.evictable -= len(step.blocks[share.tier])
            step.locks += 1

    def unlock(self, node: TreeNode) -> None:
        """Remove a lock from `node` and its ancestors. Raises `PlanError` if `node` is not locked."""
        if not node.locks:
            raise PlanError("node", node.blocks, "unlocked more often than locked")
        for step in node.path():
            step.locks -= 1
            if not step.locks:
                for share in self.shares:
                    share.evictable += len(step.blocks[share.tier])
                self.offer(step)
        self.index.drop_if_empty(node)

    def touch(self, node: TreeNode) -> None:
        """Mark `node` and its ancestors as used now."""
        self._clock += 1
        for step in node.path():
            step.last_access = self._clock
            self.offer(step)

    def want(self, node: TreeNode, change: int) -> None:
        """Let `change` more requests wait for `node`; what a request waits for is evicted last of all."""
        node.wanted += change
        self.offer(node)

    # entering and leaving -------------------------------------------------------------------------------------

    def insert(self, namespace: Namespace, tokens: Sequence[int], blocks: Sequence[int]) -> Inserted:
        """Enter device `blocks`, which hold the exact KV of the full blocks of `tokens`, and touch their path.

        What only the host holds adopts the given blocks. A given block that the tree already holds at that place is
        neither adopted nor a duplicate. Raises `PlanError` if the number of blocks does not fit the tokens.
        """
        key, size = self.index.pack(tokens), self.index.block_bytes
        if len(blocks) * size != len(key):
            raise PlanError("blocks", len(blocks), f"{len(tokens)} tokens fill {len(key) // size}")
        walk = self.index.walk(self.index.root(namespace), key, None)
        node = self.index.ending(walk)
        adopted, duplicates = _adopt(self, node, blocks)
        if walk.length < len(key):
            rest = list(blocks[walk.length // size :])
            node = self.index.attach(node, key[walk.length :], len(rest))
            self.place(node, DEVICE, rest)
            adopted += rest
        self.touch(node)
        self.index.drop_if_empty(node)
        return Inserted(node, adopted, duplicates)

    def place(self, node: TreeNode, tier: Tier, blocks: list[int]) -> None:
        """Let `tier` hold `node` from now on. It must hold its ancestors already."""
        self.version += 1
        share, parent = self.shares[tier], node.parent
        assert parent is not None and not node.blocks[tier] and parent.holds(tier)
        node.blocks[tier] = blocks
        parent.resident_children[tier] += 1
        share.size += len(blocks)
        share.by_tenant[node.tenant] += len(blocks)
        share.evictable += 0 if node.locks else len(blocks)
        self.offer(node)

    def evict(self, tier: Tier, n: int, allowed: Allowed | None = None) -> list[Removed]:
        """Remove `n` unlocked blocks of `tier` by policy, leaves first and from their end; the caller owns them now.

        Raises `OutOfBlocks`, having changed nothing, if fewer are unlocked, or if the next to go is not `allowed`.
        """
        share = self.shares[tier]
        if n > share.evictable:
            raise OutOfBlocks("blocks", n, f"{share.evictable} of {share.size} cached ones are unlocked")
        return self._take(choose(share, n, allowed, self.offer), tier, n)

    def evict_own(self, tier: Tier, n: int, tenant: TenantId, allowed: Allowed) -> list[Removed]:
        """Do as `evict` does, with one tenant's blocks only. O(m log m) with m nodes of the tenant."""
        return self._take(choose_of_tenant(self.index.nodes(), tier, n, tenant, allowed, self._key), tier, n)

    def clear(self, namespace: Namespace) -> list[Removed]:
        """Remove what is unlocked in `namespace` from both tiers; the caller owns the blocks now."""
        below = self.index.below(namespace)
        held = [(node, tier) for node in below if not node.locks for tier in Tier if node.blocks[tier]]
        return [self._shorten(node, tier, node.size) for node, tier in held]

    def purge(self, node: TreeNode) -> list[Removed]:
        """Remove `node` and all below it from the host, locked or not; no load may be reading them. What the device
        lacks leaves the tree. The caller owns the blocks now.
        """
        removed = []
        for step in [one for one in node.subtree() if one.blocks[HOST]][::-1]:
            removed.append(Removed(step, HOST, self._remove(step, HOST)))
            if not step.blocks[DEVICE]:
                self.index.detach(step)
        return removed

    # order ----------------------------------------------------------------------------------------------------

    def offer(self, *nodes: TreeNode) -> None:
        """Queue nodes for eviction that have become candidates, or have another key now."""
        for node in nodes:
            if node.locks:
                continue
            for share in self.shares:
                if node.is_candidate(share.tier):
                    share.queue.push(node)

    def check_integrity(self, locked: Iterable[TreeNode]) -> None:
        """Raise `PlanError` unless links, keys, counts, priorities and queues agree, each tier is closed under
        prefixes, and locks are those on `locked` nodes.
        """
        locks = Counter(id(step) for node in locked for step in node.path())
        nodes = list(self.index.nodes())
        for node in [*self.index.roots(), *nodes]:
            if node.locks != locks[id(node)]:
                raise PlanError("locks", node.locks, f"{locks[id(node)]} holders pass this node")
            self.index.check_node(node)
        for share in self.shares:
            integrity.check_share(share, nodes)
        self.labels.check_integrity(nodes)

    def _key(self, node: TreeNode) -> EvictionKey:
        return (node.wanted, *self.policy(node))

    def _on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        self.labels.split(upper, lower)
        split_transfers(upper, lower)
        self.offer(lower)

    def _take(self, nodes: list[TreeNode], tier: Tier, n: int) -> list[Removed]:
        """Remove `n` blocks of `nodes`, which are in the order in which they go."""
        removed: list[Removed] = []
        for node in nodes:
            removed.append(self._shorten(node, tier, n))
            n -= len(removed[-1].blocks)
        return removed

    def _shorten(self, node: TreeNode, tier: Tier, count: int) -> Removed:
        """Take the last `count` blocks (or all) of an unlocked leaf from `tier`; what no tier holds leaves the tree."""
        kept = node.size - count
        if kept > 0 and not node.blocks[1 - tier]:
            return self._cut(node, tier, kept)
        if kept > 0:
            self.index.split(node, kept)
        gone = self._remove(node, tier)
        if not node.blocks[1 - tier]:
            self.index.detach(node)
        return Removed(node, tier, gone)

    def _cut(self, node: TreeNode, tier: Tier, kept: int) -> Removed:
        """Drop the end of a leaf that `tier` alone holds; its labels stay, as what is left is still fixed."""
        gone = node.blocks[tier][kept:]
        self.index.truncate(node, kept)
        node.blocks[tier] = node.blocks[tier][:kept]
        self._shrink(node, tier, len(gone))
        self.offer(node)
        return Removed(node, tier, gone)

    def _remove(self, node: TreeNode, tier: Tier) -> list[int]:
        assert node.parent is not None
        gone, node.blocks[tier] = node.blocks[tier], []
        self._shrink(node, tier, len(gone))
        node.parent.resident_children[tier] -= 1
        self.offer(node.parent)
        return gone

    def _shrink(self, node: TreeNode, tier: Tier, count: int) -> None:
        self.version += 1
        self.shares[tier].by_tenant[node.tenant] -= count
        self.shares[tier].size -= count
        self.shares[tier].evictable -= 0 if node.locks else count


def _adopt(tree: RadixTree, node: TreeNode, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Give what the device lacks up to `node` the `blocks` of a recompute. Returns (adopted, duplicates)."""
    adopted: list[int] = []
    duplicates: list[int] = []
    at = 0
    for step in node.path_down():
        mine = list(blocks[at : at + step.size])
        at += step.size
        if theirs := step.blocks[DEVICE]:
            duplicates += [a for a, b in zip(mine, theirs, strict=True) if a != b]
        else:
            tree.place(step, DEVICE, mine)
            adopted += mine
    return adopted, duplicates
