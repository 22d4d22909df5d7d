"""Requests that wait for KV to come from the host (KVFlow, section 3.2: status-aware scheduling)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kedge.cache.copies import Direction, Outcome, Purpose
from kedge.cache.node import DEVICE, Handle, State, Transfer, TreeNode
from kedge.cache.prefix_index import Walk
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

    handle: Handle
    transfers: list[Transfer] = field(default_factory=list)
    denied: bool = False
    given_up: bool = False


class Demands:
    """What requests wait for. It is evicted last of all, and never for another request's load."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._waiting: dict[RequestId, _Demand] = {}

    def status(self, namespace: Namespace, tokens: Sequence[int]) -> Status:
        """Return where the longest exact prefix of `tokens` is. Changes nothing."""
        walk = self._tiers.tree.walk(namespace, tokens)
        nodes = walk.node.path_down() if walk else []
        device = sum(len(node.blocks[DEVICE]) for node in nodes)
        if walk and walk.node.blocks[DEVICE]:
            device -= walk.node.size - walk.used
        size = self._tiers.tree.block_size
        return Status(_readiness(nodes), device * size, self._known_tokens(walk) - device * size)

    def demand(self, request_id: RequestId, namespace: Namespace, tokens: Sequence[int]) -> Readiness:
        """Load what of the prefix is on the host, or joins the loads under way; see `CacheManager.demand`."""
        demand = self._waiting.get(request_id)
        if demand is None:
            if self._tiers.disk and self._tiers.disk.must_wait(request_id, namespace, tokens):
                return Readiness.LOADING
            node = self._tiers.tree.end(namespace, tokens)
            if node is None or node.blocks[DEVICE]:
                return Readiness.READY
            demand = self._waiting[request_id] = _Demand(Handle.of(node))
            self._tiers.tree.want(node, 1)
        return self._advance(demand)

    def withdraw(self, request_id: RequestId) -> None:
        """Forget a request that is being admitted, or was cancelled. What is on its way still comes."""
        if self._tiers.disk:
            self._tiers.disk.forget(request_id)
        demand = self._waiting.pop(request_id, None)
        if demand and (node := demand.handle.node):
            self._tiers.tree.want(node, -1)

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
        waiting = Counter(demand.handle.node for demand in self._waiting.values())
        for node in self._tiers.tree.nodes():
            if node.wanted != waiting[node]:
                raise PlanError("wanted", node.wanted, f"{waiting[node]} requests wait for this node")

    def _known_tokens(self, walk: Walk | None) -> int:
        return 0 if walk is None else self._tiers.tree.index.tokens_in(walk.length)

    def _advance(self, demand: _Demand) -> Readiness:
        demand.denied = False
        node = demand.handle.node
        if node is None or any(transfer.outcome is Outcome.FAILED for transfer in demand.transfers):
            demand.given_up = True
        if node is None or demand.given_up:
            return Readiness.READY
        self._join(demand, node)
        self._start(demand, node)
        if demand.given_up:
            return Readiness.READY
        return Readiness.LOADABLE if demand.denied else _readiness(node.path_down())

    def _join(self, demand: _Demand, node: TreeNode) -> None:
        """Load on the path are waited for from now on, ancestors first."""
        for step in node.path_down():
            if step.state is State.LOADING and step.transfer not in demand.transfers:
                assert step.transfer is not None
                self._tiers.transfers.promote(step.transfer)
                demand.transfers.append(step.transfer)

    def _start(self, demand: _Demand, node: TreeNode) -> None:
        """Queue what is not being loaded yet, where that is cheaper than computing it."""
        blocks = sum(step.size for step in node.path_down() if step.state is State.HOST)
        if not blocks:
            return
        ahead = self._tiers.transfers.demanded_blocks(Direction.LOAD)
        tokens = blocks * self._tiers.tree.block_size
        if not self._tiers.cost.load_pays(blocks, tokens, ahead):
            demand.given_up = True
            return
        while missing(node) and not demand.denied:
            transfer = self._tiers.load(node, Purpose.DEMAND, lambda victim: not victim.wanted)
            demand.denied = transfer is None
            demand.transfers += [transfer] if transfer else []


def _readiness(nodes: Iterable[TreeNode]) -> Readiness:
    states = {node.state for node in nodes}
    if State.LOADING in states:
        return Readiness.LOADING
    return Readiness.LOADABLE if State.HOST in states else Readiness.READY
