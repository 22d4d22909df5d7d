"""Which block holds the KV of which exact prefix.

A node is a run of full blocks; its key is their token ids as int32 bytes, so that comparing is `memcmp`. Children are
found by the key of their first block. Locking a node locks its path to the root; a node without locks has no locked
descendant, so everything below it can go, leaves first.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kedge.cache.eviction import EvictionPolicy, EvictionQueue, Namespace, lru
from kedge.errors import InvalidToken, OutOfBlocks, PlanError

_TOKEN_BYTES = array("i").itemsize


class Node:
    """A run of blocks below `parent`; the root of a namespace has no parent and no blocks."""

    __slots__ = ("blocks", "children", "key", "last_access", "locks", "namespace", "parent", "ticket")

    def __init__(self, namespace: Namespace, parent: Node | None, key: bytes, blocks: list[int]) -> None:
        self.namespace, self.parent, self.key, self.blocks = namespace, parent, key, blocks
        self.children: dict[bytes, Node] = {}
        self.locks = self.last_access = self.ticket = 0

    @property
    def size(self) -> int:
        """Blocks in the node."""
        return len(self.blocks)

    @property
    def evictable(self) -> bool:
        """An unlocked leaf that is still in the tree."""
        return self.parent is not None and not self.locks and not self.children

    def path(self) -> Iterator[Node]:
        """The node and its ancestors, root last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Inserted:
    """`adopted` blocks now belong to the tree; `duplicates` do not: the tree holds the same tokens in other blocks."""

    node: Node
    adopted: list[int]
    duplicates: list[int]


@dataclass(frozen=True, slots=True)
class _Walk:
    """The longest known prefix: it ends after `used` blocks of `node` and spans `length` bytes of the key."""

    node: Node
    used: int
    blocks: list[int]
    length: int


class RadixTree:
    """Full blocks by (namespace, token ids). `size` blocks in all, `evictable` of them under no lock."""

    def __init__(self, block_size: int, policy: EvictionPolicy = lru) -> None:
        self.block_size = block_size
        self.size = self.evictable = 0
        self._block_bytes = block_size * _TOKEN_BYTES
        self._roots: dict[Namespace, Node] = {}
        self._queue: EvictionQueue[Node] = EvictionQueue(policy)
        self._clock = 0

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> list[int]:
        """Blocks of the longest known prefix of `tokens`. Changes nothing."""
        root = self._roots.get(namespace)
        return [] if root is None else self._walk(root, self._pack(tokens)).blocks

    def lock(self, namespace: Namespace, tokens: Sequence[int]) -> tuple[Node, list[int]]:
        """Locks the longest known prefix; returns the node that ends it, to be given to `unlock`, and its blocks."""
        walk = self._walk(self._root(namespace), self._pack(tokens))
        node = self._ending(walk)
        self.lock_path(node)
        return node, walk.blocks

    def lock_path(self, node: Node) -> None:
        """One more lock on `node` and its ancestors."""
        for step in node.path():
            if not step.locks:
                self.evictable -= step.size
            step.locks += 1

    def unlock(self, node: Node) -> None:
        """One lock less on `node` and its ancestors. Raises `PlanError` if `node` is not locked."""
        if not node.locks:
            raise PlanError("node", node.blocks, "unlocked more often than locked")
        for step in node.path():
            step.locks -= 1
            if not step.locks:
                self.evictable += step.size
        self._offer(node)
        self._drop_if_empty(node)

    def touch(self, node: Node) -> None:
        """`node` and its ancestors were used now."""
        self._clock += 1
        for step in node.path():
            step.last_access = self._clock
        self._offer(node)

    def insert(self, namespace: Namespace, tokens: Sequence[int], blocks: Sequence[int]) -> Inserted:
        """Enters `blocks`, which hold the exact KV of the full blocks of `tokens`, and touches their path.

        A given block that the tree already holds at that place is neither adopted nor a duplicate.
        Raises `PlanError` if the number of blocks does not fit the tokens.
        """
        key = self._pack(tokens)
        if len(blocks) * self._block_bytes != len(key):
            raise PlanError("blocks", len(blocks), f"{len(tokens)} tokens fill {len(key) // self._block_bytes}")
        walk = self._walk(self._root(namespace), key)
        known = len(walk.blocks)
        node = self._ending(walk)
        adopted = list(blocks[known:])
        if adopted:
            node = self._attach(node, key[walk.length :], adopted)
        self.touch(node)
        self._drop_if_empty(node)
        duplicates = [mine for mine, theirs in zip(blocks, walk.blocks, strict=False) if mine != theirs]
        return Inserted(node, adopted, duplicates)

    def evict(self, n: int) -> list[int]:
        """Removes `n` unlocked blocks by policy, leaves first and from their end; the caller owns them now.

        Raises `OutOfBlocks`, having changed nothing, if fewer are unlocked.
        """
        if n > self.evictable:
            raise OutOfBlocks("blocks", n, f"{self.evictable} of {self.size} cached ones are unlocked")
        freed: list[int] = []
        while len(freed) < n:
            freed += self._shorten(self._queue.pop(), n - len(freed))
        return freed

    def clear(self, namespace: Namespace) -> list[int]:
        """Removes what is unlocked in `namespace`; the caller owns the blocks now."""
        root = self._roots.get(namespace)
        below = [] if root is None else list(_subtree(root))
        unlocked = [node for node in reversed(below) if not node.locks and node.parent is not None]
        return [block for node in unlocked for block in self._shorten(node, node.size)]

    def reorder(self) -> None:
        """To be called when the policy's answers have changed for a reason outside the tree."""
        for node in self.nodes():
            self._offer(node)

    def namespaces(self) -> list[Namespace]:
        """Those that hold blocks or locks."""
        return list(self._roots)

    def nodes(self) -> Iterator[Node]:
        """Every node that holds blocks, parents first."""
        return (node for root in self._roots.values() for node in _subtree(root) if node.parent is not None)

    def check_integrity(self, locked: Iterable[Node]) -> None:
        """Raises `PlanError` unless links, keys, counts and queue agree, and locks are those on `locked` nodes."""
        locks = Counter(id(step) for node in locked for step in node.path())
        nodes = list(self.nodes())
        for node in [*self._roots.values(), *nodes]:
            self._check_node(node, locks[id(node)])
        if self.size != sum(node.size for node in nodes):
            raise PlanError("cached blocks", self.size, "is not the sum over the nodes")
        if self.evictable != sum(node.size for node in nodes if not node.locks):
            raise PlanError("evictable blocks", self.evictable, "is not the sum over unlocked nodes")
        if not self._queue.covers(node for node in nodes if node.evictable):
            raise PlanError("eviction queue", len(nodes), "does not hold exactly the evictable nodes")

    def _check_node(self, node: Node, locks: int) -> None:
        if node.locks != locks:
            raise PlanError("locks", node.locks, f"{locks} holders pass this node")
        if node.parent is None:
            sound = self._roots.get(node.namespace) is node and not node.blocks and bool(node.children or locks)
        else:
            sound = node.parent.children.get(self._first(node)) is node and node.size > 0
        if not sound or len(node.key) != node.size * self._block_bytes:
            raise PlanError("node", node.blocks, "is not where it should be, or its key does not fit")

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
            root = self._roots[namespace] = Node(namespace, None, b"", [])
        return root

    def _first(self, node: Node) -> bytes:
        return node.key[: self._block_bytes]

    def _walk(self, root: Node, key: bytes) -> _Walk:
        node, blocks, at = root, list[int](), 0
        while at < len(key):
            child = node.children.get(key[at : at + self._block_bytes])
            if child is None:
                break
            node = child
            if not key.startswith(node.key, at):
                used = self._common_blocks(node.key, key, at)
                return _Walk(node, used, blocks + node.blocks[:used], at + used * self._block_bytes)
            blocks += node.blocks
            at += len(node.key)
        return _Walk(node, node.size, blocks, at)

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

    def _ending(self, walk: _Walk) -> Node:
        return walk.node if walk.used == walk.node.size else self._split(walk.node, walk.used)

    def _split(self, node: Node, used: int) -> Node:
        """Puts the first `used` blocks of `node` into a new parent. `node` keeps its end, and so its locks stay right:
        whoever locked it, or something below it, passes the new parent too.
        """
        assert node.parent is not None
        cut = used * self._block_bytes
        upper = Node(node.namespace, node.parent, node.key[:cut], node.blocks[:used])
        upper.locks, upper.last_access = node.locks, node.last_access
        node.parent.children[self._first(node)] = upper
        node.parent, node.key, node.blocks = upper, node.key[cut:], node.blocks[used:]
        upper.children[self._first(node)] = node
        self._offer(node)
        return upper

    def _attach(self, parent: Node, key: bytes, blocks: list[int]) -> Node:
        leaf = Node(parent.namespace, parent, key, blocks)
        parent.children[self._first(leaf)] = leaf
        self.size += leaf.size
        self.evictable += leaf.size
        return leaf

    def _shorten(self, leaf: Node, count: int) -> list[int]:
        """Removes the last `count` blocks (or all) of an unlocked leaf, and the leaf with its last block."""
        kept = max(0, leaf.size - count)
        gone = leaf.blocks[kept:]
        self.size -= len(gone)
        self.evictable -= len(gone)
        if kept:
            leaf.key, leaf.blocks = leaf.key[: kept * self._block_bytes], leaf.blocks[:kept]
            self._offer(leaf)
        else:
            self._detach(leaf)
        return gone

    def _detach(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._first(leaf)]
        leaf.parent = None
        self._offer(parent)
        self._drop_if_empty(parent)

    def _offer(self, node: Node) -> None:
        if node.evictable:
            self._queue.push(node)

    def _drop_if_empty(self, node: Node) -> None:
        if node.parent is None and not node.children and not node.locks:
            self._roots.pop(node.namespace, None)


def _subtree(root: Node) -> Iterator[Node]:
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
