"""Workflows and step graphs as Mermaid and as DOT (Graphviz) text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import yaml

from kedge.types import AgentId, ValueKind
from kedge.workflow.graph import Workflow
from kedge.workflow.step_graph import Node, StepGraph

COLOURS = ("#33567a", "#b5651d", "#4a7c4e", "#7a4a7c")
"""One for each alternative of a node; those after the last begin anew."""
LOOP = "#a03030"

_MERMAID_SPECIAL = re.compile(r"(?<![^\W_])[-_@]|[-_@](?![^\W_])|[^\w @-]")
"""All but letters, digits, spaces, and the joiners within a name: outside of it they may begin Markdown."""
_DOT_SPECIAL = re.compile(r"^%|[&\x00-\x1f\x7f]")
"""Graphviz keeps names that begin with a percent sign for itself."""


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

    @property
    def colour(self) -> str:
        return LOOP if self.is_loop else COLOURS[((self.alternative or 1) - 1) % len(COLOURS)]


class Diagram(NamedTuple):
    """What is exported of a graph: its nodes by column, from left to right, and its edges."""

    name: str
    columns: Sequence[Sequence[str]]
    edges: Sequence[Edge]


def export(flow: Workflow | StepGraph, form: str) -> str:
    """Return the agents of a workflow, or the nodes of a step graph, as text in one of `FORMATS`."""
    if isinstance(flow, Workflow):
        return FORMATS[form](Diagram(flow.name, columns(flow), tuple(workflow_edges(flow))))
    by_step = [[node.id for node in lane] for lane in lanes(flow)]
    return FORMATS[form](Diagram(flow.name, by_step, tuple(step_edges(flow))))


def columns(workflow: Workflow) -> list[list[AgentId]]:
    """Return the agents by depth: the length of the longest chain of agents that they wait for."""
    depth: dict[AgentId, int] = {}
    for agent in workflow.order:
        depth[agent] = 1 + max((depth[other] for other in workflow.waits_for[agent]), default=-1)
    return [[agent for agent in workflow.order if depth[agent] == at] for at in range(1 + max(depth.values()))]


def workflow_edges(workflow: Workflow) -> Iterator[Edge]:
    """Yield an edge from every agent to each that reads its answers, dashed if only those of turns before."""
    for agent in workflow.agents:
        speakers = {AgentId(read.of) for read in agent.placeholders if read.kind is not ValueKind.INPUT}
        for speaker in sorted(speakers):
            yield Edge(speaker, agent.id, is_loop=speaker not in workflow.waits_for[AgentId(agent.id)])


def lanes(graph: StepGraph) -> list[list[Node]]:
    """Return the nodes by their steps-to-execution before the run."""
    steps = graph.steps((), ())
    found: dict[float, list[Node]] = {}
    for node in graph.nodes:
        found.setdefault(steps[node.id], []).append(node)  # type: ignore[index]
    return [found[step] for step in sorted(found)]


def step_edges(graph: StepGraph) -> Iterator[Edge]:
    """Yield the edges of a step graph: for each node those of `after`, then those of `loops`."""
    odds = {node.id: node.odds for node in graph.nodes}
    for node in graph.nodes:
        for is_loop, alternatives in ((False, tuple(node.after)), (True, tuple(node.loops))):
            for number, names in enumerate(alternatives, start=1):
                for name in sorted(names):
                    alternative = number if len(alternatives) > 1 else None
                    yield Edge(name, node.id, is_loop, alternative, odds[name].get(node.id))


# formats --------------------------------------------------------------------------------------------------------------


def mermaid(diagram: Diagram) -> str:
    """Return a diagram as a Mermaid flowchart. Nodes are numbered, since words such as `end` are no ids there."""
    ids = {name: f"n{at}" for at, name in enumerate(name for column in diagram.columns for name in column)}
    title = yaml.safe_dump(diagram.name, default_style='"', allow_unicode=True, width=float("inf")).strip()
    lines = ["---", f"title: {title}", "---", "flowchart LR"]
    for name, node in ids.items():
        text = _MERMAID_SPECIAL.sub(lambda found: f"#{ord(found[0])};", name)
        lines.append(f'  {node}["{text}"]')
    by_colour: dict[str, list[str]] = {}
    for at, edge in enumerate(diagram.edges):
        by_colour.setdefault(edge.colour, []).append(str(at))
        arrow = ("-.->" if edge.is_loop else "-->") + (f'|"{edge.label}"|' if edge.label else "")
        lines.append(f"  {ids[edge.start]} {arrow} {ids[edge.to]}")
    lines += [f"  linkStyle {','.join(places)} stroke:{colour}" for colour, places in by_colour.items()]
    return "\n".join(lines) + "\n"


def dot(diagram: Diagram) -> str:
    """Return a diagram in Graphviz's language, columns as ranks."""
    name = _dot_string(diagram.name)
    lines = [
        f"digraph {name} {{",
        f"  graph [rankdir=LR, label={name}, labelloc=t]",
        "  node [shape=box, style=rounded]",
        *(f"  {{rank=same; {'; '.join(map(_dot_string, column))}}}" for column in diagram.columns),
    ]
    for edge in diagram.edges:
        label = [f"label={_dot_string(edge.label)}"] if edge.label else []
        loop = ["style=dashed", "constraint=false"] if edge.is_loop else []
        style = ", ".join([*label, *loop, f'color="{edge.colour}"'])
        lines.append(f"  {_dot_string(edge.start)} -> {_dot_string(edge.to)} [{style}]")
    return "\n".join([*lines, "}"]) + "\n"


def _dot_string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + _DOT_SPECIAL.sub(lambda found: f"&#{ord(found[0])};", escaped) + '"'


FORMATS: Mapping[str, Callable[[Diagram], str]] = {"mermaid": mermaid, "dot": dot}
