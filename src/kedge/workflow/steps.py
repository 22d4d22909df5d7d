"""Steps-to-execution in one pass over AND-sets and their alternatives (KVFlow, section 3.1)."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

UNKNOWN: Final = math.inf
"""Steps-to-execution of what never runs by the graph: not prefetched, evicted as if farthest."""

Nodes = frozenset[str]


class NextRun(NamedTuple):
    """Fewest steps until an agent can run next (0: now), and the probability that it runs as soon as that."""

    steps: float
    probability: float = 1.0


class Alternative(NamedTuple):
    """An AND-set of nodes that lets `target` run."""

    target: str
    members: Nodes
    is_loop: bool
    odds: Mapping[str, float]
    """Members that choose who comes next -> the probability that they choose `target`."""
    rivals: Mapping[str, Nodes]
    """Such a member -> the nodes that it may have chosen instead; back edges apart, which are always chosen anew."""

    def missing(self, running: Nodes, done: Nodes) -> Nodes:
        """Return the members that must still run: all, where what is done was used already, or for a rival."""
        if self.target in done and not self.is_loop:
            return self.members
        for member, rivals in self.rivals.items():
            if member in done and not (rivals.isdisjoint(done) and rivals.isdisjoint(running)):
                return self.members
        return self.members - done


def search(
    alternatives: Sequence[Alternative],
    opens: Mapping[str, Sequence[int]],
    entries: Iterable[str],
    running: Nodes,
    done: Nodes,
) -> dict[str, NextRun]:
    """Return the next run of every node: OR = min + 1 over AND = max + 1.

    `opens` has for each node the alternatives that it is a member of; `entries` can run from the start. This is Knuth's
    generalization of Dijkstra's algorithm; every edge is one step, so a queue is its heap. Nodes leave it by ascending
    steps: the member that completes an alternative is its maximum, all alternatives with a node's least steps are
    complete before the node leaves, and none enters twice, loops or not.
    """
    done = done - running
    found, queue = dict.fromkeys(opens, NextRun(UNKNOWN, 0.0)), deque[str]()
    missing = [one.missing(running, done) for one in alternatives]
    left = [len(members) for members in missing]

    def relax(node: str, steps: float, probability: float) -> None:
        old = found[node]
        if steps < old.steps:
            found[node] = NextRun(steps, probability)
            queue.append(node)
        elif steps == old.steps:
            found[node] = NextRun(steps, min(1.0, old.probability + probability))

    def complete(at: int, steps: float) -> None:
        """Let the target run where nothing is missing, as likely as the least likely member."""
        if not left[at]:
            target, members, _, odds, _ = alternatives[at]
            sure = {node: found[node].probability if node in missing[at] else 1.0 for node in members}
            relax(target, steps, min(sure[node] * odds.get(node, 1.0) for node in members))

    for node in running:
        relax(node, 0, 1.0)
    first = 1 if running else 0
    for node in entries:
        if node not in done:
            relax(node, first, 1.0)
    for at in range(len(alternatives)):
        complete(at, first)
    while queue:
        node = queue.popleft()
        for at in opens[node]:
            if node in missing[at]:
                left[at] -= 1
                complete(at, found[node].steps + 1)
    return found
