"""Which block of which tier holds the KV of which exact prefix.

A node is a run of full blocks; its key is their token ids as int32 bytes, so that comparing is `memcmp`. Children are
found by the key of their first block. Locking a node locks its path to the root; a node without locks has no locked
descendant, so everything below it can go, leaves first. What a tier holds is closed under prefixes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from kedge.cache import integrity
from kedge.cache.labels import Labels
from kedge.cache.node import DEVICE, Node, Share, Tier
from kedge.errors import InvalidToken, OutOfBlocks, PlanError
from kedge.policies.eviction import EvictionKey, EvictionPolicy, Namespace, lru
from kedge.types import TenantId

_TOKEN_BYTES = array("i").itemsize


@dataclass(frozen=True, slots=True)
class Inserted:
    """`adopted` blocks now belong to the tree; `duplicates` do not: the tree holds the same tokens in other blocks."""

    node: Node
    adopted: list[int]
    duplicates: list[int]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that a tier gave up, and the node whose they were (the part that went, where it was a part)."""

    node: Node
    tier: Tier
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Walk:
    """The longest known prefix: it ends after `used` blocks of `node` and spans `length` bytes of the key."""

    node: Node
    used: int
    length: int


class RadixTree:
    """Full blocks by (namespace, token ids), in two tiers."""

    def __init__(self, block_size: int, policy: EvictionPolicy = lru) -> None:
        self.block_size = block_size
        self.policy = policy
        self.shares = tuple(Share(tier, self._key) for tier in Tier)
        self.labels = Labels(self.offer)
        self._block_bytes = block_size * _TOKEN_BYTES
        self._roots: dict[Namespace, Node] = {}
        self._clock = 0

    # looking up -----------------------------------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> list[int]:
        """Device blocks of the longest prefix of `tokens` on the device. Changes nothing."""
        walk = self.walk(namespace, tokens, DEVICE)
        return [] if walk is None else _blocks_of(walk)

    def walk(self, namespace: Namespace, tokens: Sequence[int], tier: Tier | None = None) -> Walk | None:
        """The longest prefix that `tier`, or any tier, knows. Changes nothing; None: the namespace is unknown."""
        root = self._roots.get(namespace)
        return None if root is None else self._walk(root, self._pack(tokens), tier)

    def end(self, namespace: Namespace, tokens: Sequence[int]) -> Node | None:
        """The node that ends the longest prefix known to any tier, split off where needed; None: nothing is known."""
        walk = self.walk(namespace, tokens)
        return self._ending(walk) if walk and walk.length else None

    def tokens_in(self, length: int) -> int:
        """How many tokens `length` bytes of a key are."""
        return length // _TOKEN_BYTES

    # locking --------------------------------------------------------------------------------------------------

    def lock(self, namespace: Namespace, tokens: Sequence[int]) -> tuple[Node, list[int]]:
        """Locks the longest prefix on the device; returns the node that ends it, to be given to `unlock`, and its
        device blocks.
        """
        walk = self._walk(self._root(namespace), self._pack(tokens), DEVICE)
        blocks = _blocks_of(walk)
        node = self._ending(walk)
        self.lock_path(node)
        return node, blocks

    def lock_path(self, node: Node) -> None:
        """One more lock on `node` and its ancestors."""
        for step in node.path():
            if not step.locks:
                for share in self.shares:
                    share.evictable -= len(step.blocks[share.tier])
            step.locks += 1

    def unlock(self, node: Node) -> None:
        """One lock less on `node` and its ancestors. Raises `PlanError` if `node` is not locked."""
        if not node.locks:
            raise PlanError("node", node.blocks, "unlocked more often than locked")
        for step in node.path():
            step.locks -= 1
            if not step.locks:
                for share in self.shares:
                    share.evictable += len(step.blocks[share.tier])
                self.offer(step)
        self._drop_if_empty(node)

    def touch(self, node: Node) -> None:
        """`node` and its ancestors were used now."""
        self._clock += 1
        for step in node.path():
            step.last_access = self._clock
            self.offer(step)

    def want(self, node: Node, change: int) -> None:
        """`change` more requests wait for `node`; what somebody waits for goes last of all."""
        node.wanted += change
        self.offer(node)

    # entering and leaving -------------------------------------------------------------------------------------

    def insert(self, namespace: Namespace, tokens: Sequence[int], blocks: Sequence[int]) -> Inserted:
        """Enters device `blocks`, which hold the exact KV of the full blocks of `tokens`, and touches their path.

        What only the host holds adopts the given blocks. A given block that the tree already holds at that place is
        neither adopted nor a duplicate. Raises `PlanError` if the number of blocks does not fit the tokens.
        """
        key = self._pack(tokens)
        if len(blocks) * self._block_bytes != len(key):
            raise PlanError("blocks", len(blocks), f"{len(tokens)} tokens fill {len(key) // self._block_bytes}")
        walk = self._walk(self._root(namespace), key, None)
        node = self._ending(walk)
        adopted, duplicates = self._adopt(node, blocks)
        if walk.length < len(key):
            rest = list(blocks[walk.length // self._block_bytes :])
            node = self._attach(node, key[walk.length :], rest)
            adopted += rest
        self.touch(node)
        self._drop_if_empty(node)
        return Inserted(node, adopted, duplicates)

    def place(self, node: Node, tier: Tier, blocks: list[int]) -> None:
        """`tier` holds `node` from now on. Its ancestors must be held already."""
        share, parent = self.shares[tier], node.parent
        assert parent is not None and not node.blocks[tier] and parent.holds(tier)
        node.blocks[tier] = blocks
        parent.resident_children[tier] += 1
        share.size += len(blocks)
        share.by_tenant[node.tenant] += len(blocks)
        share.evictable += 0 if node.locks else len(blocks)
        self.offer(node)

    def evict(self, tier: Tier, n: int, allowed: Callable[[Node], bool] | None = None) -> list[Removed]:
        """Removes `n` unlocked blocks of `tier` by policy, leaves first and from their end; the caller owns them now.

        Raises `OutOfBlocks`, having changed nothing, if fewer are unlocked, or if the next to go is not `allowed`.
        """
        share = self.shares[tier]
        if n > share.evictable:
            raise OutOfBlocks("blocks", n, f"{share.evictable} of {share.size} cached ones are unlocked")
        removed: list[Removed] = []
        left = n
        for node in self._choose(share, n, allowed):
            removed.append(self._shorten(node, tier, left))
            left -= len(removed[-1].blocks)
        return removed

    def evict_own(self, tier: Tier, n: int, tenant: TenantId, allowed: Callable[[Node], bool]) -> list[Removed]:
        """`evict`, but of one tenant's blocks only. Costs by the number of the tenant's nodes."""
        removed: list[Removed] = []
        left = n
        for node in self._choose_own(tier, n, tenant, allowed):
            removed.append(self._shorten(node, tier, left))
            left -= len(removed[-1].blocks)
        return removed

    def clear(self, namespace: Namespace) -> list[Removed]:
        """Removes what is unlocked in `namespace` from both tiers; the caller owns the blocks now."""
        root = self._roots.get(namespace)
        below = [] if root is None else list(root.subtree())[:0:-1]
        held = [(node, tier) for node in below if not node.locks for tier in Tier if node.blocks[tier]]
        return [self._shorten(node, tier, node.size) for node, tier in held]

    # order ----------------------------------------------------------------------------------------------------

    def offer(self, node: Node) -> None:
        """The node has become a candidate for eviction, or its key has changed."""
        for share in self.shares:
            if node.is_candidate(share.tier):
                share.queue.push(node)

    def reorder(self) -> None:
        """To be called when the policy's answers have changed for a reason outside the tree."""
        for node in self.nodes():
            self.offer(node)

    def namespaces(self) -> list[Namespace]:
        """Those that hold blocks or locks."""
        return list(self._roots)

    def nodes(self) -> Iterator[Node]:
        """Every node that holds blocks, parents first."""
        return (node for root in self._roots.values() for node in root.subtree() if node.parent is not None)

    def check_integrity(self, locked: Iterable[Node]) -> None:
        """Raises `PlanError` unless links, keys, counts, priorities and queues agree, each tier is closed under
        prefixes, and locks are those on `locked` nodes.
        """
        locks = Counter(id(step) for node in locked for step in node.path())
        nodes = list(self.nodes())
        for node in [*self._roots.values(), *nodes]:
            self._check_node(node, locks[id(node)])
        for share in self.shares:
            integrity.check_share(share, nodes)
        self.labels.check_integrity(nodes)

    def _check_node(self, node: Node, locks: int) -> None:
        if node.locks != locks:
            raise PlanError("locks", node.locks, f"{locks} holders pass this node")
        if node.parent is None:
            sound = self._roots.get(node.namespace) is node and not node.size and bool(node.children or locks)
        else:
            sound = node.parent.children.get(self._first(node)) is node and node.size > 0
        if not sound or len(node.key) != node.size * self._block_bytes:
            raise PlanError("node", node.blocks, "is not where it should be, or its key does not fit")

    def _key(self, node: Node) -> EvictionKey:
        return (node.wanted, *self.policy(node))

    def _pack(self, tokens: Sequence[int]) -> bytes:
        packed = array("i")
        try:
            # not array("i", tokens): that would read `bytes` as raw memory
            packed.extend(tokens[: len(tokens) - len(tokens) % self.block_size])
        except OverflowError:
            raise InvalidToken("tokens", max(tokens, key=abs), "does not fit 32 bits") from None
        return packed.tobytes()

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(namespace, None, b"", 0)
        return root

    def _first(self, node: Node) -> bytes:
        return node.key[: self._block_bytes]

    def _walk(self, root: Node, key: bytes, tier: Tier | None) -> Walk:
        node, at = root, 0
        while at < len(key):
            child = node.children.get(key[at : at + self._block_bytes])
            if child is None or (tier is not None and not child.blocks[tier]):
                break
            node = child
            if not key.startswith(node.key, at):
                used = self._common_blocks(node.key, key, at)
                return Walk(node, used, at + used * self._block_bytes)
            at += len(node.key)
        return Walk(node, node.size, at)

    def _common_blocks(self, prefix: bytes, key: bytes, at: int) -> int:
        """How many leading blocks of `prefix` stand in `key` from `at` on; at least one does, not all."""
        low, high = 1, len(prefix) // self._block_bytes
        while high - low > 1:
            middle = (low + high) // 2
            if key.startswith(prefix[: middle * self._block_bytes], at):
                low = middle
            else:
                high = middle
        return low

    def _ending(self, walk: Walk) -> Node:
        return walk.node if walk.used == walk.node.size else self._split(walk.node, walk.used)

    def _split(self, node: Node, used: int) -> Node:
        """Puts the first `used` blocks of `node` into a new parent. `node` keeps its end, and so its locks, labels and
        handles stay right: whoever locked it, or something below it, passes the new parent too.
        """
        assert node.parent is not None
        cut = used * self._block_bytes
        upper = Node(node.namespace, node.parent, node.key[:cut], used)
        upper.locks, upper.last_access, upper.hits = node.locks, node.last_access, node.hits
        node.parent.children[self._first(node)] = upper
        node.parent, node.key, node.size = upper, node.key[cut:], node.size - used
        upper.children[self._first(node)] = node
        for tier in Tier:
            held = node.blocks[tier]
            upper.blocks[tier], node.blocks[tier] = held[:used], held[used:]
            upper.resident_children[tier] = 1 if held else 0
        self.labels.split(upper, node)
        _split_transfers(upper, node)
        self.offer(node)
        return upper

    def _adopt(self, node: Node, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Gives what the device lacks on the path to `node` the `blocks` of a recompute; (adopted, duplicates)."""
        adopted: list[int] = []
        duplicates: list[int] = []
        at = 0
        for step in node.path_down():
            mine = list(blocks[at : at + step.size])
            at += step.size
            if theirs := step.blocks[DEVICE]:
                duplicates += [a for a, b in zip(mine, theirs, strict=True) if a != b]
            else:
                self.place(step, DEVICE, mine)
                adopted += mine
        return adopted, duplicates

    def _attach(self, parent: Node, key: bytes, blocks: list[int]) -> Node:
        leaf = Node(parent.namespace, parent, key, len(blocks))
        leaf.varying = parent.varying or bool(parent.labels)
        parent.children[self._first(leaf)] = leaf
        self.place(leaf, DEVICE, blocks)
        return leaf

    def _choose(self, share: Share, n: int, allowed: Callable[[Node], bool] | None) -> list[Node]:
        """The next nodes to go for `n` blocks, of the last one perhaps a part. Whoever is hidden by those before is
        found by hiding these for real; all is put back before this returns.
        """
        chosen: list[Node] = []
        hidden: list[Node] = []
        refused = False
        while n > 0 and not refused:
            node = share.queue.pop()
            if node is None:
                raise PlanError("eviction queue", n, "blocks are still to go, but nobody is a candidate")
            chosen.append(node)
            refused = allowed is not None and not allowed(node)
            n -= node.size
            if n > 0 and not refused and node.parent is not None:
                hidden.append(node.parent)
                node.parent.resident_children[share.tier] -= 1
                self.offer(node.parent)
        for parent in hidden:
            parent.resident_children[share.tier] += 1
        if refused:
            for node in chosen:
                self.offer(node)
            raise OutOfBlocks("blocks", n, "left to free, and the next to go may not be evicted for this")
        return chosen

    def _choose_own(self, tier: Tier, n: int, tenant: TenantId, allowed: Callable[[Node], bool]) -> list[Node]:
        """The tenant's next nodes to go for `n` blocks, as `_choose` does it for all."""
        own = [node for node in self.nodes() if node.tenant == tenant and node.blocks[tier] and not node.locks]
        children = {node: node.resident_children[tier] for node in own}
        waiting = [(self._key(node), number, node) for number, node in enumerate(own) if not children[node]]
        heapify(waiting)
        chosen: list[Node] = []
        while n > 0:
            node = heappop(waiting)[2] if waiting else None
            if node is None or not allowed(node):
                raise OutOfBlocks("blocks", n, f"left to free of {tenant}, and no more of its own may be evicted")
            chosen.append(node)
            n -= node.size
            if (parent := node.parent) in children:
                children[parent] -= 1
                if not children[parent]:
                    heappush(waiting, (self._key(parent), -len(chosen), parent))
        return chosen

    def _shorten(self, node: Node, tier: Tier, count: int) -> Removed:
        """Takes the last `count` blocks (or all) of an unlocked leaf from `tier`; what no tier holds is gone."""
        kept = node.size - count
        if kept > 0 and not node.blocks[1 - tier]:
            return self._cut(node, tier, kept)
        if kept > 0:
            self._split(node, kept)
        gone = self._remove(node, tier)
        if not node.blocks[1 - tier]:
            self._detach(node)
        return Removed(node, tier, gone)

    def _cut(self, node: Node, tier: Tier, kept: int) -> Removed:
        """Drops the end of a leaf that `tier` alone holds; its labels stay, as what is left is still fixed."""
        gone = node.blocks[tier][kept:]
        node.key, node.blocks[tier], node.size = node.key[: kept * self._block_bytes], node.blocks[tier][:kept], kept
        self._shrink(node, tier, len(gone))
        self.offer(node)
        return Removed(node, tier, gone)

    def _remove(self, node: Node, tier: Tier) -> list[int]:
        assert node.parent is not None
        gone, node.blocks[tier] = node.blocks[tier], []
        self._shrink(node, tier, len(gone))
        node.parent.resident_children[tier] -= 1
        self.offer(node.parent)
        return gone

    def _shrink(self, node: Node, tier: Tier, count: int) -> None:
        self.shares[tier].by_tenant[node.tenant] -= count
        self.shares[tier].size -= count
        self.shares[tier].evictable -= count

    def _detach(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None and not leaf.children
        self.labels.leave(leaf)
        del parent.children[self._first(leaf)]
        leaf.parent = None
        self._drop_if_empty(parent)

    def _drop_if_empty(self, node: Node) -> None:
        if node.parent is None and not node.children and not node.locks:
            self._roots.pop(node.namespace, None)


def _blocks_of(walk: Walk) -> list[int]:
    blocks: list[int] = []
    for step in walk.node.path_down():
        blocks += step.blocks[DEVICE]
    return blocks[: len(blocks) - (walk.node.size - walk.used)]


def _split_transfers(upper: Node, lower: Node) -> None:
    """What moves, or brought, `lower` does so for `upper` too."""
    upper.transfer, upper.arrival = lower.transfer, lower.arrival
    if upper.transfer:
        upper.transfer.nodes.insert(upper.transfer.nodes.index(lower), upper)
    if upper.arrival:
        upper.arrival.live += 1
