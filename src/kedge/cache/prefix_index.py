"""Nodes by the exact prefix that they end: packing token ids, walking, splitting, attaching and detaching.

A node's key is the token ids of its blocks as int32 bytes, so that comparing is `memcmp`. Children are found by the key
of their first block.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kedge.cache.node import DEVICE, Tier, TreeNode
from kedge.errors import InvalidToken, PlanError
from kedge.structures.prefixes import common_length
from kedge.types import Namespace

_TOKEN_BYTES = array("i").itemsize


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


class PrefixIndex:
    """The nodes of all namespaces. `on_split(upper, lower)` and `on_leave(leaf)` are called as they happen."""

    def __init__(
        self, block_size: int, on_split: Callable[[TreeNode, TreeNode], None], on_leave: Callable[[TreeNode], None]
    ) -> None:
        self._block_size, self.block_bytes = block_size, block_size * _TOKEN_BYTES
        self._on_split, self._on_leave = on_split, on_leave
        self._roots: dict[Namespace, TreeNode] = {}

    def pack(self, tokens: Sequence[int]) -> bytes:
        """Return the key of the full blocks of `tokens`. Raises `InvalidToken` for an id beyond 32 bits."""
        return self.packed(tokens[: len(tokens) - len(tokens) % self._block_size])

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

    def root(self, namespace: Namespace) -> TreeNode:
        """Return the root of a namespace, made where there is none yet."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = TreeNode(namespace, None, b"", 0)
        return root

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces that hold blocks or locks."""
        return list(self._roots)

    def roots(self) -> list[TreeNode]:
        """Return the roots of all namespaces."""
        return list(self._roots.values())

    def nodes(self) -> Iterator[TreeNode]:
        """Iterate over every node that holds blocks, parents first."""
        return (node for root in self._roots.values() for node in root.subtree() if node.parent is not None)

    def below(self, namespace: Namespace) -> list[TreeNode]:
        """Return the nodes of a namespace, children first."""
        root = self._roots.get(namespace)
        return [] if root is None else list(root.subtree())[:0:-1]

    def find(self, namespace: Namespace, key: bytes, tier: Tier | None) -> Walk | None:
        """Return the longest prefix of `key` that `tier`, or any tier, holds; None for an unknown namespace."""
        root = self._roots.get(namespace)
        return None if root is None else self.walk(root, key, tier)

    def walk(self, root: TreeNode, key: bytes, tier: Tier | None) -> Walk:
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
        self._on_split(upper, node)
        return upper

    def join_path(self, node: TreeNode) -> list[TreeNode]:
        """Join the nodes on the path to `node` that nothing tells apart any more: a history that grew turn by turn.

        Returns those that took over their parents' blocks.
        """
        joined = []
        while node.parent is not None:
            if node.continues_parent():
                self._join(node)
                joined.append(node)
            else:
                node = node.parent
        return joined

    def _join(self, node: TreeNode) -> None:
        upper = node.parent
        assert upper is not None and upper.parent is not None
        upper.parent.children[self._first(upper)] = node
        node.parent, node.key, node.size = upper.parent, upper.key + node.key, upper.size + node.size
        node.blocks = [above + below for above, below in zip(upper.blocks, node.blocks, strict=True)]
        node.last_access, node.hits = max(upper.last_access, node.last_access), max(upper.hits, node.hits)
        upper.leave()

    def attach(self, parent: TreeNode, key: bytes, size: int) -> TreeNode:
        """Add a leaf of `size` blocks, which no tier holds yet."""
        leaf = TreeNode(parent.namespace, parent, key, size)
        leaf.varying = parent.varying or bool(parent.labels)
        parent.children[self._first(leaf)] = leaf
        return leaf

    def truncate(self, leaf: TreeNode, size: int) -> None:
        """Shorten a leaf's key to its first `size` blocks."""
        leaf.key, leaf.size = leaf.key[: size * self.block_bytes], size

    def detach(self, leaf: TreeNode) -> None:
        """Remove a leaf that no tier holds any more."""
        parent = leaf.parent
        assert parent is not None and not leaf.children
        self._on_leave(leaf)
        del parent.children[self._first(leaf)]
        leaf.parent = None
        self.drop_if_empty(parent)

    def drop_if_empty(self, node: TreeNode) -> None:
        """Forget a namespace of which `node` is the root, where it has neither blocks nor locks left."""
        if node.parent is None and not node.children and not node.locks:
            self._roots.pop(node.namespace, None)

    def check_node(self, node: TreeNode) -> None:
        """Raise `PlanError` unless links and key of `node` are right."""
        if node.parent is None:
            sound = self._roots.get(node.namespace) is node and not node.size and bool(node.children or node.locks)
        else:
            sound = node.parent.children.get(self._first(node)) is node and node.size > 0
        if not sound or len(node.key) != node.size * self.block_bytes:
            raise PlanError("node", node.blocks, "is not where it should be, or its key does not fit")

    def _first(self, node: TreeNode) -> bytes:
        return node.key[: self.block_bytes]
