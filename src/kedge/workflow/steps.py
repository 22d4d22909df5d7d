"""Steps-to-execution in one pass over AND-sets and their alternatives (KVFlow, section 3.1). Nodes are numbers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

UNKNOWN: Final = math.inf
"""Steps-to-execution of what never runs by the graph: not prefetched, evicted as if farthest."""

Nodes = frozenset[int]


class NextRun(NamedTuple):
    """Fewest steps until an agent can run next (0: now), and the probability that it runs as soon as that."""

    steps: float
    probability: float = 1.0


class Alternative(NamedTuple):
    """An AND-set of nodes that lets `target` run."""

    target: int
    members: Nodes
    is_loop: bool
    odds: tuple[tuple[int, float], ...] = ()
    """Members that choose who comes next -> the probability that they choose `target`."""
    rivals: tuple[tuple[int, Nodes], ...] = ()
    """Such a member -> the nodes that it may have chosen instead; back edges apart, which are always chosen anew."""

    def missing(self, running: Nodes, done: Nodes) -> Nodes:
        """Return the members that must still run: all, where what is done was used already, or for a rival."""
        if self.target in done and not self.is_loop:
            return self.members
        for member, rivals in self.rivals:
            if member in done and not (rivals.isdisjoint(done) and rivals.isdisjoint(running)):
                return self.members
        return self.members - done


class Search:
    """Search for the next run of every node: OR = min + 1 over AND = max + 1.

    Knuth's generalization of Dijkstra's algorithm; every edge is one step, so a queue is its heap. Nodes leave it by
    ascending steps: the member that completes an alternative is its maximum, all alternatives with a node's least
    steps are complete before the node leaves, and none enters twice, loops or not. `opens` has for each node the
    alternatives that it is a member of.
    """

    def __init__(
        self, alternatives: Sequence[Alternative], opens: Sequence[Sequence[int]], running: Nodes, done: Nodes
    ) -> None:
        self._alternatives, self._opens, self._running, self._done = alternatives, opens, running, done - running
        self._found = [NextRun(UNKNOWN, 0.0)] * len(opens)
        self._queue: deque[int] = deque()
        self._missing = [one.missing(running, self._done) for one in alternatives]
        self._left = [len(members) for members in self._missing]

    def run(self, entries: Iterable[int]) -> list[NextRun]:
        """Return one `NextRun` for every node; `entries` can run from the start."""
        for node in self._running:
            self._relax(node, 0, 1.0)
        first = 1 if self._running else 0
        for node in entries:
            if node not in self._done:
                self._relax(node, first, 1.0)
        for at in range(len(self._alternatives)):
            self._complete(at, first)
        while self._queue:
            node = self._queue.popleft()
            for at in self._opens[node]:
                if node in self._missing[at]:
                    self._left[at] -= 1
                    self._complete(at, self._found[node].steps + 1)
        return self._found

    def _complete(self, at: int, steps: float) -> None:
        if not self._left[at]:
            self._relax(self._alternatives[at].target, steps, self._probability(at))

    def _relax(self, node: int, steps: float, probability: float) -> None:
        old = self._found[node]
        if steps < old.steps:
            self._found[node] = NextRun(steps, probability)
            self._queue.append(node)
        elif steps == old.steps:
            self._found[node] = NextRun(steps, min(1.0, old.probability + probability))

    def _probability(self, at: int) -> float:
        """Return the probability of the least likely member; one that chooses counts with the odds of its choice."""
        one, missing = self._alternatives[at], self._missing[at]
        odds = dict(one.odds)
        return min(
            (self._found[node].probability if node in missing else 1.0) * odds.get(node, 1.0) for node in one.members
        )
