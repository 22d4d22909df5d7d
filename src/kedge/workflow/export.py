"""Step graphs as the text of a Mermaid flowchart, and what pictures of workflows need."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import yaml

from kedge.types import AgentId, ValueKind
from kedge.workflow.graph import Workflow
from kedge.workflow.step_graph import Node, StepGraph

_MERMAID_SPECIAL = re.compile(r"(?<![^\W_])[-_@]|[-_@](?![^\W_])|[^\w @-]")
"""All but letters, digits, spaces, and the joiners within a name: outside of it they may begin Markdown."""


class Edge(NamedTuple):
    """An arrow to a node from one that it waits for or reads, with what distinguishes it from its other arrows."""

    start: str
    to: str
    is_loop: bool = False
    """The answer of the turn before is read, or `to` runs again."""
    alternative: int | None = None
    """Number from 1 of the set of nodes that suffices for `to`; None where there is only one such set."""
    odds: float | None = None
    """Probability with which `start` chooses `to`; None where it does not choose."""

    @property
    def label(self) -> str:
        odds = [] if self.odds is None else [f"{self.odds:.0%}"]
        return ", ".join([f"alternative {self.alternative}"] * bool(self.alternative) + odds)


def export(graph: StepGraph) -> str:
    """Return a step graph as a Mermaid flowchart."""
    return mermaid(graph.name, [node.id for lane in lanes(graph) for node in lane], step_edges(graph))


def columns(workflow: Workflow) -> list[list[AgentId]]:
    """Return the agents by depth: the length of the longest chain of agents that they wait for."""
    depth: dict[AgentId, int] = {}
    for agent in workflow.order:
        depth[agent] = 1 + max((depth[other] for other in workflow.waits_for[agent]), default=-1)
    return [[agent for agent in workflow.order if depth[agent] == at] for at in range(1 + max(depth.values()))]


def workflow_edges(workflow: Workflow) -> Iterator[Edge]:
    """Yield an edge from every agent to each reader of its answers, dashed if it reads only earlier turns' answers."""
    for agent in workflow.agents:
        speakers = {AgentId(read.of) for read in agent.placeholders if read.kind is not ValueKind.INPUT}
        for speaker in sorted(speakers):
            yield Edge(speaker, agent.id, is_loop=speaker not in workflow.waits_for[AgentId(agent.id)])


def lanes(graph: StepGraph) -> list[list[Node]]:
    """Return the nodes by their steps-to-execution before the run."""
    steps = graph.steps((), ())
    found: dict[float, list[Node]] = {}
    for node in graph.nodes:
        found.setdefault(steps[node.id], []).append(node)
    return [found[step] for step in sorted(found)]


def step_edges(graph: StepGraph) -> Iterator[Edge]:
    """Yield the edges of a step graph, node by node: first from `after`, then from `loops`."""
    odds = {node.id: node.odds for node in graph.nodes}
    for node in graph.nodes:
        for is_loop, alternatives in ((False, tuple(node.after)), (True, tuple(node.loops))):
            for number, names in enumerate(alternatives, start=1):
                for name in sorted(names):
                    alternative = number if len(alternatives) > 1 else None
                    yield Edge(name, node.id, is_loop, alternative, odds[name].get(node.id))


def mermaid(name: str, nodes: Iterable[str], edges: Iterable[Edge]) -> str:
    """Return a flowchart of nodes and the edges between them.

    Nodes are numbered, since words such as `end` are no ids in Mermaid.
    """
    ids = {node: f"n{at}" for at, node in enumerate(nodes)}
    title = yaml.safe_dump(name, default_style='"', allow_unicode=True, width=float("inf")).strip()
    lines = ["---", f"title: {title}", "---", "flowchart LR"]
    for node, number in ids.items():
        text = _MERMAID_SPECIAL.sub(lambda found: f"#{ord(found[0])};", node)
        lines.append(f'  {number}["{text}"]')
    for edge in edges:
        arrow = ("-.->" if edge.is_loop else "-->") + (f'|"{edge.label}"|' if edge.label else "")
        lines.append(f"  {ids[edge.start]} {arrow} {ids[edge.to]}")
    return "\n".join(lines) + "\n"
