"""The radix tree: which blocks of each tier hold the KV of an exact prefix.

A node is a run of full blocks. Locking a node locks its path to the root; a node without locks has no locked
descendant, so everything below it can go, leaves first. What a tier holds is closed under prefixes.

A node's key is the token ids of its blocks as int32 bytes, so that comparing is `memcmp`. Children are found by the key
of their first block.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kedge.cache.node import DEVICE, HOST, Labels, Share, Tier, TreeNode
from kedge.errors import InvalidToken, OutOfBlocks, PlanError
from kedge.policies.eviction import EvictionKey, EvictionPolicy, lru
from kedge.structures.heaps import LazyHeap
from kedge.structures.prefixes import common_length
from kedge.types import Namespace, TenantId

_TOKEN_BYTES = array("i").itemsize
Allowed = Callable[[TreeNode], bool]
"""Whether a node may be evicted for the caller."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The longest known prefix: it ends after `used` blocks of `node` and spans `length` bytes of the key."""

    node: TreeNode
    used: int
    length: int

    def device_blocks(self) -> list[int]:
        """Return the device blocks of the prefix, in the order of its tokens."""
        blocks = [block for step in self.node.path_down() for block in step.blocks[DEVICE]]
        return blocks[: len(blocks) - (self.node.size - self.used)]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that a tier gave up, and the node that held them (the part that went, where it was a part)."""

    node: TreeNode
    tier: Tier
    blocks: list[int]


class RadixTree:
    """Full blocks by (namespace, token ids), in two tiers."""

    def __init__(self, block_size: int, policy: EvictionPolicy = lru) -> None:
        self.block_size, self.block_bytes = block_size, block_size * _TOKEN_BYTES
        self.policy = policy
        self.shares = tuple(Share(tier, self._key) for tier in Tier)
        self.labels = Labels(self.offer)
        self._roots: dict[Namespace, TreeNode] = {}
        self._clock = 0
        self.version = 0
        """Number of times that a tier began or ceased to hold blocks."""

    # keys -----------------------------------------------------------------------------------------------------

    def pack(self, tokens: Sequence[int]) -> bytes:
        """Return the key of the full blocks of `tokens`. Raises `InvalidToken` for an id beyond 32 bits."""
        return self.packed(tokens[: len(tokens) - len(tokens) % self.block_size])

    def packed(self, tokens: Sequence[int]) -> bytes:
        """Return what a key that begins with `tokens` begins with. Raises `InvalidToken` for an id beyond 32 bits."""
        packed = array("i")
        try:
            packed.extend(tokens)  # not array("i", tokens): that would read `bytes` as raw memory
        except OverflowError:
            raise InvalidToken("tokens", max(tokens, key=abs), "does not fit 32 bits") from None
        return packed.tobytes()

    def tokens_in(self, length: int) -> int:
        """Return how many tokens `length` bytes of a key are."""
        return length // _TOKEN_BYTES

    # nodes ----------------------------------------------------------------------------------------------------

    def root(self, namespace: Namespace) -> TreeNode:
        """Return the root of a namespace, made where there is none yet."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = TreeNode(namespace, None, b"", 0)
        return root

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces that hold blocks or locks."""
        return list(self._roots)

    def nodes(self) -> Iterator[TreeNode]:
        """Iterate over every node that holds blocks, parents first."""
        return (node for root in self._roots.values() for node in root.subtree() if node.parent is not None)

    def descend(self, root: TreeNode, key: bytes, tier: Tier | None) -> Walk:
        """Return the longest prefix of `key` below `root` that `tier`, or any tier, holds."""
        node, at = root, 0
        while at < len(key):
            child = node.children.get(key[at : at + self.block_bytes])
            if child is None or (tier is not None and not child.blocks[tier]):
                break
            node = child
            if not key.startswith(node.key, at):
                used = common_length(node.key, key[at : at + len(node.key)]) // self.block_bytes
                return Walk(node, used, at + used * self.block_bytes)
            at += len(node.key)
        return Walk(node, node.size, at)

    def ending(self, walk: Walk) -> TreeNode:
        """Return the node that ends a prefix, split off where it ends within one."""
        return walk.node if walk.used == walk.node.size else self.split(walk.node, walk.used)

    # looking up -----------------------------------------------------------------------------------------------

    def walk(self, namespace: Namespace, tokens: Sequence[int], tier: Tier | None = None) -> Walk:
        """Return the longest prefix of `tokens` that `tier`, or any tier, holds. Changes nothing."""
        root = self._roots.get(namespace) or TreeNode(namespace, None, b"", 0)
        return self.descend(root, self.pack(tokens), tier)

    def end(self, namespace: Namespace, tokens: Sequence[int]) -> TreeNode | None:
        """Return the node that ends the longest prefix that any tier holds, split off where needed; None if none."""
        walk = self.walk(namespace, tokens)
        return self.ending(walk) if walk.length else None

    # structure ------------------------------------------------------------------------------------------------

    def split(self, node: TreeNode, used: int) -> TreeNode:
        """Put the first `used` blocks of `node` into a new parent, and return that.

        `node` keeps its end, so its locks, labels and handles stay right: what locks it, or
        a node below it, locks the new parent too.
        """
        assert node.parent is not None
        cut = used * self.block_bytes
        upper = TreeNode(node.namespace, node.parent, node.key[:cut], used)
        upper.locks, upper.last_access, upper.hits = node.locks, node.last_access, node.hits
        node.parent.children[self._first(node)] = upper
        node.parent, node.key, node.size = upper, node.key[cut:], node.size - used
        upper.children[self._first(node)] = node
        for tier in Tier:
            held = node.blocks[tier]
            upper.blocks[tier], node.blocks[tier] = held[:used], held[used:]
            upper.resident_children[tier] = 1 if held else 0
        self.labels.split(upper, node)
        # What moves, or brought, the node does so for its new parent too.
        upper.transfer, upper.arrival = node.transfer, node.arrival
        if upper.transfer:
            upper.transfer.nodes.insert(upper.transfer.nodes.index(node), upper)
        if upper.arrival:
            upper.arrival.live += 1
        self.offer(node)
        return upper

    def join_path(self, node: TreeNode) -> list[TreeNode]:
        """Join the nodes on the path to `node` that nothing tells apart any more: a history that grew turn by turn.

        Returns the nodes that took over their parents' blocks.
        """
        joined = []
        while node.parent is not None:
            if node.continues_parent():
                upper = node.parent
                assert upper.parent is not None
                upper.parent.children[self._first(upper)] = node
                node.parent, node.key, node.size = upper.parent, upper.key + node.key, upper.size + node.size
                node.blocks = [above + below for above, below in zip(upper.blocks, node.blocks, strict=True)]
                node.last_access, node.hits = max(upper.last_access, node.last_access), max(upper.hits, node.hits)
                upper.leave()
                joined.append(node)
            else:
                node = node.parent
        return joined

    def attach(self, parent: TreeNode, key: bytes, size: int) -> TreeNode:
        """Add a leaf of `size` blocks, which no tier holds yet."""
        leaf = TreeNode(parent.namespace, parent, key, size)
        leaf.varying = parent.varying or bool(parent.labels)
        parent.children[self._first(leaf)] = leaf
        return leaf

    def detach(self, leaf: TreeNode) -> None:
        """Remove a leaf that no tier holds any more."""
        parent = leaf.parent
        assert parent is not None and not leaf.children
        self.labels.leave(leaf)
        del parent.children[self._first(leaf)]
        leaf.parent = None
        self.drop_if_empty(parent)

    def drop_if_empty(self, node: TreeNode) -> None:
        """Forget the namespace of a root that has neither blocks nor locks left; leave any other node."""
        if node.parent is None and not node.children and not node.locks:
            self._roots.pop(node.namespace, None)

    # locking --------------------------------------------------------------------------------------------------

    def lock(self, namespace: Namespace, tokens: Sequence[int]) -> tuple[TreeNode, list[int]]:
        """Lock the longest prefix on the device. Returns the node that ends it, to be given to `unlock`, and its
        device blocks.
        """
        walk = self.descend(self.root(namespace), self.pack(tokens), DEVICE)
        blocks = walk.device_blocks()
        node = self.ending(walk)
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
        self.drop_if_empty(node)

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

    def insert(self, namespace: Namespace, tokens: Sequence[int], blocks: Sequence[int]) -> tuple[TreeNode, list[int]]:
        """Enter device `blocks`, which hold the exact KV of the full blocks of `tokens`, and touch their path. Returns
        its end, and the blocks that now belong to the tree: the others hold what it holds already.

        What only the host holds adopts the given blocks. Raises `PlanError` if the number of blocks does not fit the
        tokens.
        """
        key, size = self.pack(tokens), self.block_bytes
        if len(blocks) * size != len(key):
            raise PlanError("blocks", len(blocks), f"{len(tokens)} tokens fill {len(key) // size}")
        walk = self.descend(self.root(namespace), key, None)
        node = self.ending(walk)
        adopted, at = list[int](), 0
        for step in node.path_down():
            mine = list(blocks[at : at + step.size])
            at += step.size
            if not step.blocks[DEVICE]:
                self.place(step, DEVICE, mine)
                adopted += mine
        if walk.length < len(key):
            rest = list(blocks[walk.length // size :])
            node = self.attach(node, key[walk.length :], len(rest))
            self.place(node, DEVICE, rest)
            adopted += rest
        self.touch(node)
        self.drop_if_empty(node)
        return node, adopted

    def place(self, node: TreeNode, tier: Tier, blocks: list[int]) -> None:
        """Let `tier` hold `node` from now on. It must hold its ancestors already."""
        self.version += 1
        share, parent = self.shares[tier], node.parent
        assert parent is not None and not node.blocks[tier] and parent.holds(tier)
        node.blocks[tier] = blocks
        parent.resident_children[tier] += 1
        share.size += len(blocks)
        share.by_tenant[node.namespace.tenant] += len(blocks)
        share.evictable += 0 if node.locks else len(blocks)
        self.offer(node)

    def evict(
        self, tier: Tier, n: int, allowed: Allowed | None = None, tenant: TenantId | None = None
    ) -> list[Removed]:
        """Remove `n` unlocked blocks of `tier` by policy, leaves first and from their end; the caller owns them now.
        With a `tenant`, of its blocks only: O(m log m) with m nodes in the tree.

        Parents become candidates as their children are chosen: counts are decremented for that and restored afterwards.
        Raises `OutOfBlocks`, having changed nothing, if fewer are unlocked, or if the next to go is not `allowed`.
        """
        share = self.shares[tier]
        if n > share.evictable:
            raise OutOfBlocks("blocks", n, f"{share.evictable} of {share.size} cached ones are unlocked")
        queue = share.queue if tenant is None else self._queue_of(tier, tenant)
        chosen: list[TreeNode] = []
        emptied: list[TreeNode] = []
        refused, left = False, n
        while left > 0 and not refused:
            node = queue.pop()
            if node is None:
                refused = True
                break
            chosen.append(node)
            refused = allowed is not None and not allowed(node)
            left -= node.size
            if left > 0 and not refused and node.parent is not None:
                emptied.append(node.parent)
                node.parent.resident_children[tier] -= 1
                if node.parent.is_candidate(tier):
                    queue.push(node.parent)
        for parent in emptied:
            parent.resident_children[tier] += 1
        if refused:
            self.offer(*chosen)
            raise OutOfBlocks("blocks", left, "left to free, and the next to go may not be evicted for this")
        removed: list[Removed] = []
        for node in chosen:
            removed.append(self._shorten(node, tier, n))
            n -= len(removed[-1].blocks)
        return removed

    def _queue_of(self, tier: Tier, tenant: TenantId) -> LazyHeap[TreeNode]:
        queue = Share(tier, self._key).queue
        for node in self.nodes():
            if node.namespace.tenant == tenant and node.is_candidate(tier):
                queue.push(node)
        return queue

    def clear(self, namespace: Namespace) -> list[Removed]:
        """Remove what is unlocked in `namespace` from both tiers; the caller owns the blocks now."""
        root = self._roots.get(namespace)
        below = [] if root is None else list(root.subtree())[:0:-1]  # children first
        held = [(node, tier) for node in below if not node.locks for tier in Tier if node.blocks[tier]]
        return [self._shorten(node, tier, node.size) for node, tier in held]

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
        nodes = list(self.nodes())
        for node in [*self._roots.values(), *nodes]:
            if node.locks != locks[id(node)]:
                raise PlanError("locks", node.locks, f"{locks[id(node)]} holders pass this node")
            if node.parent is None:
                sound = self._roots.get(node.namespace) is node and not node.size and bool(node.children or node.locks)
            else:
                sound = node.parent.children.get(self._first(node)) is node and node.size > 0
            if not sound or len(node.key) != node.size * self.block_bytes:
                raise PlanError("node", node.blocks, "is not where it should be, or its key does not fit")
        for share in self.shares:
            _check_share(share, nodes)
        self.labels.check_integrity(nodes)

    def _first(self, node: TreeNode) -> bytes:
        return node.key[: self.block_bytes]

    def _key(self, node: TreeNode) -> EvictionKey:
        return (node.wanted, *self.policy(node))

    def _shorten(self, node: TreeNode, tier: Tier, count: int) -> Removed:
        """Take the last `count` blocks (or all) of an unlocked leaf from `tier`; what no tier holds leaves the tree."""
        kept = node.size - count
        if kept > 0 and not node.blocks[1 - tier]:
            # It alone holds the leaf, whose labels stay, as what is left is still fixed.
            node.blocks[tier], gone = node.blocks[tier][:kept], node.blocks[tier][kept:]
            node.key, node.size = node.key[: kept * self.block_bytes], kept
            self._shrink(node, tier, len(gone))
            self.offer(node)
            return Removed(node, tier, gone)
        if kept > 0:
            self.split(node, kept)
        assert node.parent is not None
        gone, node.blocks[tier] = node.blocks[tier], []
        self._shrink(node, tier, len(gone))
        node.parent.resident_children[tier] -= 1
        self.offer(node.parent)
        if not node.blocks[1 - tier]:
            self.detach(node)
        return Removed(node, tier, gone)

    def _shrink(self, node: TreeNode, tier: Tier, count: int) -> None:
        self.version += 1
        self.shares[tier].by_tenant[node.namespace.tenant] -= count
        self.shares[tier].size -= count
        self.shares[tier].evictable -= 0 if node.locks else count


def _check_share(share: Share, nodes: Sequence[TreeNode]) -> None:
    """Check that a tier holds whole nodes, closed under prefixes, and that counts and queue are right."""
    tier = share.tier
    held = [node for node in nodes if node.blocks[tier]]
    if share.size != sum(node.size for node in held):
        raise PlanError(f"{tier.name} blocks", share.size, "is not the sum over the nodes")
    by_tenant: Counter[TenantId] = Counter()
    for node in held:
        by_tenant[node.namespace.tenant] += node.size
    if +share.by_tenant != by_tenant:
        raise PlanError(f"{tier.name} blocks by tenant", share.by_tenant, "are not the sums over the nodes")
    if share.evictable != sum(node.size for node in held if not node.locks):
        raise PlanError(f"{tier.name} evictable blocks", share.evictable, "is not the sum over unlocked nodes")
    for node in nodes:
        parent, blocks = node.parent, node.blocks
        if blocks[tier] and not (parent and parent.holds(tier)):
            raise PlanError("node", blocks, f"is held by {tier.name}, but its parent is not")
        if len(blocks[tier]) not in (0, node.size) or not (blocks[DEVICE] or blocks[HOST]):
            raise PlanError("node", blocks, f"has {node.size} blocks, held whole or not at all, and somewhere")
        if node.resident_children[tier] != sum(bool(child.blocks[tier]) for child in node.children.values()):
            raise PlanError("resident children", node.resident_children, "is not the count over its children")
    if not share.queue.covers(node for node in held if node.is_candidate(tier)):
        raise PlanError(f"{tier.name} eviction queue", len(held), "does not hold exactly the candidates' keys")
