"""Who goes first. A policy is a pure key function over a node; the queue that asks it knows nothing of its reasons."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from kedge.errors import PlanError

Namespace = tuple[str, str]
"""(tenant, model): KV never crosses it."""

EvictionKey = tuple[float, ...]


class NodeView(Protocol):
    """What a policy may look at."""

    @property
    def namespace(self) -> Namespace: ...

    @property
    def last_access(self) -> int:
        """The tree's clock when the node was last used; grows with every use."""

    @property
    def size(self) -> int:
        """Blocks in the node."""


class EvictionPolicy(Protocol):
    """Pure: the same node and outside state give the same key. Of all unlocked leaves the least key goes first."""

    def __call__(self, node: NodeView) -> EvictionKey: ...


def lru(node: NodeView) -> EvictionKey:
    """Least recently used first."""
    return (node.last_access,)


class Candidate(NodeView, Protocol):
    """A node that can stand in an `EvictionQueue`; `ticket` belongs to the queue."""

    ticket: int

    @property
    def evictable(self) -> bool:
        """An unlocked leaf that is still in the tree."""


Node = TypeVar("Node", bound=Candidate)


class EvictionQueue(Generic[Node]):
    """A heap of candidates whose outdated entries are dropped when they surface.

    Whoever makes a node evictable, or changes its key, pushes it again: only a node's newest entry counts.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._tickets = itertools.count(1)
        self._heap: list[tuple[EvictionKey, int, Node]] = []
        self._limit = 64

    def push(self, node: Node) -> None:
        """Enters `node` under its present key."""
        node.ticket = next(self._tickets)
        heappush(self._heap, (self._policy(node), node.ticket, node))
        if len(self._heap) > self._limit:
            self._drop_outdated()

    def pop(self) -> Node:
        """The evictable node with the least key, removed. Raises `PlanError` if there is none."""
        while self._heap:
            entry = heappop(self._heap)
            if _is_current(entry):
                return entry[2]
        raise PlanError("eviction queue", 0, "has no evictable node")

    def covers(self, nodes: Iterable[Node]) -> bool:
        """Whether exactly `nodes` would be popped."""
        return {id(entry[2]) for entry in self._heap if _is_current(entry)} == {id(node) for node in nodes}

    def _drop_outdated(self) -> None:
        self._heap = [entry for entry in self._heap if _is_current(entry)]
        heapify(self._heap)
        self._limit = max(64, 2 * len(self._heap))


def _is_current(entry: tuple[EvictionKey, int, Candidate]) -> bool:
    _, ticket, node = entry
    return node.ticket == ticket and node.evictable
