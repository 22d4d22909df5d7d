"""What to load before anybody asks (KVFlow, section 3.2): pure rules, and who remembers what is worth a look."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kedge.cache.copies import Direction, Purpose
from kedge.cache.node import Node, State
from kedge.cache.tiers import Tiers, missing
from kedge.policies.eviction import StepView, distance
from kedge.structures.lazy_heap import LazyHeap

Target = TypeVar("Target")

LIKELY = 0.5
"""An agent's next run is worth a loss where it is more probable than this."""


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Target]):
    """A fixed prompt whose end is not on the device; `node` is that end, or whatever else leads there."""

    node: Target
    step: float
    probability: float
    size: int
    """Blocks to load."""

    @property
    def order(self) -> tuple[float, ...]:
        """Soonest first, then likeliest, then smallest."""
        return self.step, -self.probability, self.size

    def may_replace(self, victim: StepView, virtual_step: float) -> bool:
        """Whether it may be loaded in the place of `victim`."""
        return may_replace(victim, self.step, virtual_step, self.probability)


def is_within(step: float | None, window: float) -> bool:
    """Whether somebody needs it within `window` steps. What nobody can tell is never within."""
    return step is not None and step <= window and step < math.inf


def may_replace(victim: StepView, step: float, virtual_step: float, probability: float = 1.0) -> bool:
    """Whether a prefetch for an agent `step` steps away may evict `victim`: one that nobody is known to need again, or
    one that is needed strictly later. The latter only for an agent that is likelier to run then than not: what loses
    its place is needed too, and copies that come for nothing delay those that do not.
    """
    later = distance(victim, virtual_step)
    return later > step and (probability > LIKELY or later == math.inf)


class Prefetcher:
    """Starts prefetches. It knows the labels that have come near or have lost their device blocks, the best first."""

    def __init__(self, tiers: Tiers, probability: Callable[[Node], float]) -> None:
        """`probability`: how likely it is that a node is needed as soon as its step says."""
        self._tiers, self._probability = tiers, probability
        self._window = tiers.settings.prefetch_window
        self._targets: LazyHeap[Node] = LazyHeap(lambda node: self._candidate(node).order, self._is_target)
        self.due = False
        """Whether something has changed since the last look: the forecast, what is loaded, or who holds blocks."""

    def consider(self, node: Node) -> None:
        """`node` got a label or another step, or has left the device."""
        if self._is_target(node):
            self._targets.push(node)
            self.due = True

    def cancel_outside(self) -> None:
        """Cancels what has not started, nobody waits for, and is not within the window any more."""
        for transfer in self._tiers.transfers.queued(Direction.LOAD):
            if not (is_within(transfer.end.step, self._window) or transfer.demanded or transfer.outcome):
                self._tiers.cancel(transfer)

    def start(self) -> None:
        """Queues the loads that have room, best first. Those without are tried again when it is due."""
        if not self.due:
            return
        self.due = False
        slots = self._tiers.settings.prefetch_jobs - self._pending()
        refused: list[Node] = []
        while slots > len(refused) and (node := self._targets.pop()):
            slots -= self._load(self._candidate(node))
            if self._is_target(node):
                refused.append(node)
        for node in refused:
            self._targets.push(node)

    def _pending(self) -> int:
        return sum(transfer.purpose is Purpose.PREFETCH for transfer in self._tiers.pending())

    def _is_target(self, node: Node) -> bool:
        """A fixed prompt within the window, whose end is on the host only and not on its way."""
        return bool(node.labels) and node.state is State.HOST and is_within(node.step, self._window)

    def _candidate(self, node: Node) -> Candidate[Node]:
        assert node.step is not None
        return Candidate(node, node.step, self._probability(node), sum(step.size for step in missing(node)))

    def _load(self, candidate: Candidate[Node]) -> bool:
        settings = self._tiers.settings
        transfer = self._tiers.load(
            candidate.node,
            Purpose.PREFETCH,
            lambda victim: (
                not victim.wanted and may_replace(victim, candidate.step, settings.virtual_step, candidate.probability)
            ),
            settings.decode_reserve,
        )
        return transfer is not None
