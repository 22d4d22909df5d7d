"""Loads from the host: those that requests wait for, and those before their agents call (KVFlow, section 3.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kedge.cache.copies import Direction, Outcome, Purpose
from kedge.cache.node import DEVICE, State, Transfer, TreeNode
from kedge.cache.tiers import Tiers, missing
from kedge.errors import PlanError
from kedge.policies.prefetch import PREFETCH_JOBS, PREFETCH_WINDOW, Candidate, is_awaited, is_within
from kedge.structures.heaps import LazyHeap
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
    transfers: list[Transfer] = field(default_factory=list)
    denied: bool = False
    given_up: bool = False


class Demands:
    """What requests wait for (KVFlow: status-aware scheduling). It is evicted last, never for another's load."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._waiting: dict[RequestId, _Demand] = {}

    def demand(self, request_id: RequestId, namespace: Namespace, tokens: Sequence[int]) -> Readiness:
        """Load what of the prefix is on the host, or joins the loads under way; see `CacheManager.demand`."""
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
        demand = self._waiting.pop(request_id, None)
        if demand and demand.node.parent:
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
                tiers.transfers.promote(step.transfer)
                demand.transfers.append(step.transfer)
        if blocks := sum(step.size for step in node.path_down() if step.state is State.HOST):
            ahead = tiers.transfers.demanded_blocks(Direction.LOAD)
            if not tiers.cost.load_pays(blocks, blocks * tiers.tree.block_size, ahead):
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


class Prefetcher:
    """Starts prefetches: it keeps the labels that have come near or have lost their device blocks, best first."""

    def __init__(self, tiers: Tiers, probability: Callable[[TreeNode], float]) -> None:
        """Take `probability(node)`: how likely a node is needed as soon as its step says."""
        self._tiers, self._probability = tiers, probability
        self.window = PREFETCH_WINDOW
        """Steps within which is prefetched; benchmarks set it below 0"""
        self._targets: LazyHeap[TreeNode] = LazyHeap(lambda node: self._candidate(node).order, self._is_target)
        self.due = False
        """Whether something has changed since the last look: the forecast, what is loaded, or who holds blocks."""

    def consider(self, node: TreeNode) -> None:
        """Consider `node`, which has a label or another step now, or has left the device."""
        if self._is_target(node):
            self._targets.push(node)
            self.due = True

    def cancel_outside(self) -> None:
        """Cancel loads that have not started, that no request waits for, and whose step is outside the window."""
        for transfer in self._tiers.transfers.queued(Direction.LOAD):
            if not (is_within(transfer.end.step, self.window) or transfer.demanded or transfer.outcome):
                self._tiers.cancel(transfer)

    def start(self) -> None:
        """Queue the loads that have room, best first. Those without are tried again when it is due."""
        if not self.due:
            return
        self.due = False
        unlabelled = self._tiers.settings.unlabelled_step
        under_way = sum(transfer.purpose is Purpose.PREFETCH for transfer in self._tiers.pending())
        slots = PREFETCH_JOBS - under_way
        refused: list[TreeNode] = []
        while slots > len(refused) and (node := self._targets.pop()):
            candidate = self._candidate(node)

            def may_go(victim: TreeNode, candidate: Candidate[TreeNode] = candidate) -> bool:
                return not victim.wanted and candidate.may_replace(victim, unlabelled)

            slots -= self._tiers.load(node, Purpose.PREFETCH, may_go) is not None
            if self._is_target(node):
                refused.append(node)
        for node in refused:
            self._targets.push(node)

    def _is_target(self, node: TreeNode) -> bool:
        """Return whether it ends a prompt within the window, is on the host only, and not on its way."""
        if not (node.labels and node.state is State.HOST and is_within(node.step, self.window)):
            return False
        if not is_awaited(node.step):
            return True
        # A request waits that had better compute its prompt where that takes less time: nothing hides the load.
        blocks = sum(step.size for step in missing(node))
        ahead = self._tiers.transfers.demanded_blocks(Direction.LOAD)
        return self._tiers.cost.load_pays(blocks, blocks * self._tiers.tree.block_size, ahead)

    def _candidate(self, node: TreeNode) -> Candidate[TreeNode]:
        assert node.step is not None
        return Candidate(node, node.step, self._probability(node), sum(step.size for step in missing(node)))
