"""One node of the radix tree: a run of full blocks, where its KV is, and what is expected of it.

| state      | device | host | transfer   | may go to                                             |
|------------|--------|------|------------|-------------------------------------------------------|
| DEVICE     | yes    | -    | -          | OFFLOADING, gone                                      |
| OFFLOADING | yes    | -    | offload    | BOTH, DEVICE (the copy failed)                        |
| BOTH       | yes    | yes  | - or load  | HOST, DEVICE; a load is under way where a recompute   |
|            |        |      |            | overtook it                                           |
| HOST       | -      | yes  | -          | LOADING, BOTH (recomputed), gone                      |
| LOADING    | -      | yes  | load       | BOTH, HOST (failed, or cancelled before it started)   |

The blocks that a transfer writes belong to the transfer until it lands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from kedge.cache.copies import Transfer
from kedge.cache.owners import Owner, Owners, Ranked
from kedge.errors import PlanError
from kedge.policies.eviction import EvictionKey
from kedge.structures.heaps import LazyHeap
from kedge.structures.prefixes import SortedKeys
from kedge.types import Namespace, TenantId


class Tier(IntEnum):
    """Where blocks are; the index of everything that a node has once per tier."""

    DEVICE = 0
    HOST = 1


DEVICE, HOST = Tier.DEVICE, Tier.HOST


class State(StrEnum):
    """Where a node's KV is, and where it is going (see the table above)."""

    DEVICE = "device"
    OFFLOADING = "offloading"
    BOTH = "both"
    HOST = "host"
    LOADING = "loading"


class TreeNode(Ranked):
    """A run of `size` blocks below `parent`; the root of a namespace has no parent and no blocks.

    It is needed by its own labels and by its children.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "children",
        "hits",
        "key",
        "labels",
        "locks",
        "namespace",
        "parent",
        "resident_children",
        "size",
        "transfer",
        "wanted",
    )

    def __init__(self, namespace: Namespace, parent: TreeNode | None, key: bytes, size: int) -> None:
        super().__init__()
        self.namespace, self.parent, self.key, self.size = namespace, parent, key, size
        self.children: SortedKeys[TreeNode] = SortedKeys()
        self.blocks: list[list[int]] = [[], []]
        """Block numbers by tier; empty where the tier does not hold the node."""
        self.resident_children = [0, 0]
        """How many children each tier holds."""
        self.locks = self.hits = 0
        self.wanted = 0
        """Requests that wait for this node and have not been admitted yet."""
        self.labels: dict[Owner, None] = {}
        """Owners whose fixed prompt or history ends here"""
        self.transfer: NodeTransfer | None = None
        self.arrival: NodeTransfer | None = None
        """The load that brought it to the device, until it is hit for the first time."""

    @property
    def state(self) -> State:
        """Derived, so it cannot disagree with the blocks. Not for roots."""
        if not self.blocks[DEVICE]:
            return State.LOADING if self.transfer else State.HOST
        if self.blocks[HOST]:
            return State.BOTH
        return State.OFFLOADING if self.transfer else State.DEVICE

    @property
    def above(self) -> State | None:
        """The state of its parent; None below a root."""
        return self.parent.state if self.parent and self.parent.parent else None

    def holds(self, tier: Tier) -> bool:
        """Return whether `tier` holds its KV; a root's empty prefix is everywhere."""
        return bool(self.blocks[tier]) or self.parent is None

    def is_candidate(self, tier: Tier) -> bool:
        """Return whether `tier` may evict it: an unlocked leaf of that tier that is still in the tree."""
        return bool(self.blocks[tier]) and not self.locks and not self.resident_children[tier]

    def continues_parent(self) -> bool:
        """Return whether nothing tells it apart from its parent: no other child, label, lock, wish, copy or tier."""
        upper = self.parent
        if upper is None or upper.parent is None or len(upper.children) > 1 or upper.labels:
            return False
        if upper.locks != self.locks or upper.wanted != self.wanted or upper.varying != self.varying:
            return False
        moves = upper.transfer or upper.arrival or self.transfer or self.arrival
        return not moves and all(upper.holds(tier) == self.holds(tier) for tier in Tier)

    def leave(self) -> None:
        """Let go of everything, so that what still refers to it finds nothing."""
        self.parent, self.children, self.blocks = None, SortedKeys(), [[], []]

    def path(self) -> Iterator[TreeNode]:
        """Iterate over the node and its ancestors, root last."""
        node: TreeNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def path_down(self) -> list[TreeNode]:
        """Return the ancestors and the node, without the root."""
        return list(self.path())[-2::-1]

    def subtree(self) -> Iterator[TreeNode]:
        """Iterate over the node and all below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def prefix(self) -> bytes:
        """Return the token ids from the root to the node's end, as int32 bytes."""
        return b"".join(step.key for step in self.path_down())


@dataclass(eq=False, slots=True, kw_only=True)
class NodeTransfer(Transfer):
    """A copy of nodes, which go down one path; a split of one of them adds another."""

    nodes: list[TreeNode]
    live: int = 0
    """Nodes that it brought to the device and that are there unhit."""

    @property
    def end(self) -> TreeNode:
        """The lowest of its nodes: the one that it locks."""
        return self.nodes[-1]

    def shares(self) -> Iterator[tuple[TreeNode, list[int]]]:
        """Iterate over its nodes with the target blocks of each."""
        at = 0
        for node in self.nodes:
            yield node, list(self.copy.targets[at : at + node.size])
            at += node.size


class Share:
    """One tier's share of the tree: `size` blocks in all, `evictable` of them under no lock, and who goes first."""

    def __init__(self, tier: Tier, policy: Callable[[TreeNode], EvictionKey]) -> None:
        self.tier = tier
        self.size = self.evictable = 0
        self.by_tenant: Counter[TenantId] = Counter()
        """`size` by the tenant whose blocks they are."""
        self.queue: LazyHeap[TreeNode] = LazyHeap(policy, lambda node: node.is_candidate(tier))


class Labels:
    """Who ends a fixed prompt where, and the least step of everything below (KVFlow, section 3.1): one label per key.

    The step stands on the node that ends the fixed prompt and bubbles up as a minimum; what follows it is varying.
    `offer` is called with every node whose priority changed.
    """

    def __init__(self, offer: Callable[[TreeNode], None]) -> None:
        self._offer = offer
        self.owners = Owners()
        self.owners.followers.append(self._follow)
        self.nodes: dict[Owner, TreeNode] = {}
        """The node that ends what each owner needs"""

    def put(self, key: Owner, node: TreeNode) -> None:
        """Label `node` for an owner that has a step; the label that it had elsewhere goes."""
        if self.nodes.get(key) is node:
            return
        self._follow(key, self.owners.step(key), None)
        for above in node.path():
            above.varying = False
        below = [] if node.labels else list(node.children.values())
        while below:
            one = below.pop()
            if one.varying:
                continue
            if one.step is None:
                one.varying = True
                self._offer(one)
            below.extend(one.children.values())
        self._set(key, node)

    def _set(self, key: Owner, node: TreeNode) -> None:
        self.nodes[key], node.labels[key] = node, None
        _change(node, None, self.owners.step(key), self._offer)

    def _follow(self, key: Owner, old: float | None, new: float | None) -> None:
        """Change the step of a label; None: it goes. O(depth)."""
        if node := self.nodes.get(key):
            if new is None:
                del self.nodes[key], node.labels[key]
            _change(node, old, new, self._offer)

    def leave(self, node: TreeNode) -> None:
        """Let the labels of `node`, which has no children and is leaving the tree, end at its parent instead.

        So what is left of a history keeps its worth. The root has no labels: with the last node they go.
        """
        labels, parent, node.labels = node.labels, node.parent, {}
        assert parent is not None
        if node.step is not None:
            _change(parent, node.step, None, self._offer)
        for key in labels:
            if parent.parent is None:
                del self.nodes[key]
            else:
                self._set(key, parent)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Let `upper`, which was put above `lower`, take its step. Labels mark an end, so they stay on `lower`."""
        upper.change_step(None, lower.step)
        upper.varying = lower.varying

    def check_integrity(self, nodes: list[TreeNode]) -> None:
        """Raise `PlanError` unless labels and priorities are what a naive look finds."""
        found = {key: node for node in nodes for key in node.labels}
        if found != self.nodes:
            raise PlanError("labels", found, "are not where they are said to be")
        for node in nodes:
            children = node.children.values()
            steps = [self.owners.next_runs[key][0] for key in node.labels]
            steps += [child.step for child in children if child.step is not None]
            if not node.has_steps(steps):
                raise PlanError("priority", node.step, f"the least of {steps} is another one")


def _change(node: TreeNode | None, old: float | None, new: float | None, offer: Callable[[TreeNode], None]) -> None:
    """Change one of a node's steps from `old` to `new` (None: there is none), upwards while a minimum changes."""
    while node is not None and node.parent is not None and old != new:
        before = node.step
        if node.change_step(old, new):
            offer(node)
        node, old, new = node.parent, before, node.step
