"""Step graphs from the edges of another framework's graph, which may have loops."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kedge.workflow.step_graph import Node, StepGraph

START: Final = "__start__"
"""The node at which a run begins: it calls no model, and is done from the start."""
END: Final = "__end__"


class StepEdge(NamedTuple):
    """An edge of a step graph: `target` may run once `source` is done."""

    source: str
    target: str
    chosen: bool = False
    """Whether `source` chooses one of its edges each time that it has run"""


Requirement = tuple[frozenset[str], str]
"""Nodes that must all be done before the other may run; any one requirement of a node suffices"""


def step_graph(name: str, edges: Sequence[StepEdge], joins: Iterable[tuple[Collection[str], str]] = ()) -> StepGraph:
    """Return the step graph of `edges`, with the nodes that can be reached from `START`.

    `joins` are pairs of several nodes that must all be done and the node that waits for them; other edges into a node
    are alternatives. Back edges are recognised.
    """
    joined = [(frozenset(members), target) for members, target in joins]
    pairs = {(member, target) for members, target in joined for member in members}
    single = [(frozenset({edge.source}), edge.target) for edge in edges if edge[:2] not in pairs]
    requirements = [one for one in (*dict.fromkeys(single), *joined) if one[1] not in (START, END)]
    after = _first_requirements(requirements)
    loops: dict[str, list[frozenset[str]]] = {node: [] for node in after}
    for members, target in requirements:
        if target in after and members <= after.keys() and members not in after[target]:
            kind = after if members.isdisjoint(_descendants(after, target)) else loops
            kind[target].append(members)
    taken = {(one, node) for node in after for members in (*after[node], *loops[node]) for one in members}
    odds = _odds(edges, after, taken)
    return StepGraph(name, tuple(Node(node, after[node], loops[node], odds.get(node, {})) for node in after))


def _first_requirements(requirements: Sequence[Requirement]) -> dict[str, list[frozenset[str]]]:
    """Return every node that can be reached with the first requirement that reaches it, in order of discovery."""
    found: dict[str, list[frozenset[str]]] = {START: []}
    size = 0
    while size < len(found):
        size = len(found)
        for members, target in requirements:
            if target not in found and members <= found.keys():
                found[target] = [members]
    return found


def _descendants(after: Mapping[str, Iterable[frozenset[str]]], node: str) -> set[str]:
    """Return `node` and all nodes after it. An edge from one of them to `node` is a back edge."""
    found, todo = {node}, [node]
    while todo:
        last = todo.pop()
        new = {other for other, alternatives in after.items() if any(last in one for one in alternatives)} - found
        found |= new
        todo += new
    return found


def _odds(
    edges: Sequence[StepEdge], nodes: Collection[str], taken: Collection[tuple[str, str]]
) -> dict[str, dict[str, float | None]]:
    """Return the probability of every choice of every node that chooses: all its choices, the end too, are equal.

    A choice that is no edge of the graph, since its target waits for nodes that are never reached, has none.
    """
    choices: dict[str, list[str]] = {}
    for edge in dict.fromkeys(edges):
        if edge.chosen and edge.source in nodes and edge.target != START:
            choices.setdefault(edge.source, []).append(edge.target)
    return {
        chooser: {target: 1 / len(targets) for target in targets if (chooser, target) in taken}
        for chooser, targets in choices.items()
    }
