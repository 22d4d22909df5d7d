"""Loads from the host that requests wait for (KVFlow, section 3.2)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kedge.cache.copies import Outcome, Purpose
from kedge.cache.node import DEVICE, NodeTransfer, State, TreeNode
from kedge.cache.tiers import Tiers, missing
from kedge.errors import PlanError
from kedge.types import Namespace, RequestId


class Readiness(StrEnum):
    """Whether a request's prefix is where attention reads it."""

    READY = "ready"
    """There is nothing to wait for: admit it."""
    LOADING = "loading"
    """Some of it is on its way from the host: others first."""
    LOADABLE = "loadable"
    """Some of it is on the host. As the answer to a demand: and finds no room on the device now."""


@dataclass(frozen=True, slots=True)
class Status:
    """Where the longest exact prefix is: `device_tokens` there already, then `host_tokens` on the host only."""

    readiness: Readiness
    device_tokens: int
    host_tokens: int


@dataclass(slots=True)
class _Demand:
    """One request's wish for the prefix that ends at a node."""

    node: TreeNode
    transfers: list[NodeTransfer] = field(default_factory=list)
    denied: bool = False
    given_up: bool = False


class Demands:
    """What requests wait for (KVFlow: status-aware scheduling). It is evicted last, never for another's load."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._waiting: dict[RequestId, _Demand] = {}

    def demand(self, request_id: RequestId, namespace: Namespace, tokens: Sequence[int]) -> Readiness:
        """Load the part of the prefix on the host, or join the loads under way; see `CacheManager.demand`."""
        demand = self._waiting.get(request_id)
        if demand is None:
            node = self._tiers.tree.end(namespace, tokens)
            if node is None or node.blocks[DEVICE]:
                return Readiness.READY
            demand = self._waiting[request_id] = _Demand(node)
            self._tiers.tree.want(node, 1)
        return self._advance(demand)

    def withdraw(self, request_id: RequestId) -> None:
        """Forget a request that is being admitted, or was cancelled. What is on its way still comes."""
        if (demand := self._waiting.pop(request_id, None)) and demand.node.parent:
            self._tiers.tree.want(demand.node, -1)

    def retry(self) -> bool:
        """Try denied demands again, oldest first. Returns whether any is still denied."""
        denied = [demand for demand in self._waiting.values() if demand.denied]
        for demand in denied:
            self._advance(demand)
        return any(demand.denied for demand in denied)

    @property
    def denied(self) -> bool:
        """Whether a demanded load found no room."""
        return any(demand.denied for demand in self._waiting.values())

    def check_integrity(self) -> None:
        """Raise `PlanError` unless every node counts the requests that wait for it."""
        waiting = Counter(demand.node for demand in self._waiting.values())
        for node in self._tiers.tree.nodes():
            if node.wanted != waiting[node]:
                raise PlanError("wanted", node.wanted, f"{waiting[node]} requests wait for this node")

    def _advance(self, demand: _Demand) -> Readiness:
        """Join the loads on the path, ancestors first, and queue what else is cheaper to load than to compute."""
        node, tiers, demand.denied = demand.node, self._tiers, False
        has_failed = any(transfer.outcome is Outcome.FAILED for transfer in demand.transfers)
        if demand.given_up or has_failed or not node.parent:  # without one it has left the tree meanwhile
            demand.given_up = True
            return Readiness.READY
        for step in node.path_down():
            if step.state is State.LOADING and step.transfer not in demand.transfers:
                assert step.transfer is not None
                tiers.promote(step.transfer)
                demand.transfers.append(step.transfer)
        blocks = sum(step.size for step in node.path_down() if step.state is State.HOST)
        if blocks and not tiers.load_pays(blocks):
            demand.given_up = True
            return Readiness.READY
        while missing(node) and not demand.denied:
            transfer = tiers.load(node, Purpose.DEMAND, lambda victim: not victim.wanted)
            demand.denied = transfer is None
            demand.transfers += [transfer] if transfer else []
        return Readiness.LOADABLE if demand.denied else readiness_of(node.path_down())


def readiness_of(nodes: Iterable[TreeNode]) -> Readiness:
    """Return whether all of these nodes are on the device, or else on their way there."""
    states = {node.state for node in nodes}
    if State.LOADING in states:
        return Readiness.LOADING
    return Readiness.LOADABLE if State.HOST in states else Readiness.READY
