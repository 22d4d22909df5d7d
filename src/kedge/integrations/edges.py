"""A step graph from the edges that a framework knows, loops and all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kedge.workflow.step_graph import Node, StepGraph

START: Final = "__start__"
"""Where a run begins: it calls no model, and is done as soon as there is a run."""
END: Final = "__end__"


class Edge(NamedTuple):
    """`target` may run once `source` is done."""

    source: str
    target: str
    chosen: bool = False
    """Whether `source` decides each time which of its chosen edges is taken."""


class _Way(NamedTuple):
    """Nodes that must all be done for `target` to run."""

    members: frozenset[str]
    target: str


def step_graph(name: str, edges: Sequence[Edge], joins: Iterable[tuple[Collection[str], str]] = ()) -> StepGraph:
    """The step graph of `edges`, from `START` on; what cannot be reached from there is left out.

    `joins` are pairs of nodes that must all be done and the node that waits for them; other edges into a node are
    alternatives. Any edges will do: which of them are back edges is found here.
    """
    ways = _ways(edges, joins)
    after = _first_ways(ways)
    loops: dict[str, list[frozenset[str]]] = {node: [] for node in after}
    for way in ways:
        if way.target in after and way.members <= after.keys() and way.members not in after[way.target]:
            kind = after if way.members.isdisjoint(_descendants(after, way.target)) else loops
            kind[way.target].append(way.members)
    taken = {(one, node) for node in after for members in (*after[node], *loops[node]) for one in members}
    odds = _odds(edges, after, taken)
    return StepGraph(name, tuple(Node(node, after[node], loops[node], odds.get(node, {})) for node in after))


def _ways(edges: Sequence[Edge], joins: Iterable[tuple[Collection[str], str]]) -> list[_Way]:
    joined = [_Way(frozenset(members), target) for members, target in joins]
    pairs = {(member, way.target) for way in joined for member in way.members}
    single = [_Way(frozenset({edge.source}), edge.target) for edge in edges if edge[:2] not in pairs]
    return [way for way in (*dict.fromkeys(single), *joined) if way.target not in (START, END)]


def _first_ways(ways: Sequence[_Way]) -> dict[str, list[frozenset[str]]]:
    """Every node that can be reached -> the first way to it, whose members stand before it."""
    found: dict[str, list[frozenset[str]]] = {START: []}
    size = 0
    while size < len(found):
        size = len(found)
        for members, target in ways:
            if target not in found and members <= found.keys():
                found[target] = [members]
    return found


def _descendants(after: Mapping[str, Iterable[frozenset[str]]], node: str) -> set[str]:
    """`node` and what comes after it. A way from one of them back to it is a back edge; any other closes no circle."""
    found, todo = {node}, [node]
    while todo:
        last = todo.pop()
        new = {other for other, ways in after.items() if any(last in members for members in ways)} - found
        found |= new
        todo += new
    return found


def _odds(
    edges: Sequence[Edge], nodes: Collection[str], taken: Collection[tuple[str, str]]
) -> dict[str, dict[str, float | None]]:
    """Who chooses -> what it may choose, each as likely as the others and as the end, where it may choose that.

    A choice that is no way of the graph, since its target waits for others who never come, has no odds.
    """
    choices: dict[str, list[str]] = {}
    for edge in dict.fromkeys(edges):
        if edge.chosen and edge.source in nodes and edge.target != START:
            choices.setdefault(edge.source, []).append(edge.target)
    return {
        chooser: {target: 1 / len(targets) for target in targets if (chooser, target) in taken}
        for chooser, targets in choices.items()
    }
