"""Exported graphs, read back: every node and edge is there, whatever the names are."""

import re
from typing import NamedTuple

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kedge.workflow.export import Edge, columns, export, mermaid, workflow_edges
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.step_graph import Node, StepGraph

TEAM = Workflow(
    "team & co",
    (
        Agent("a", "", "{user_question} {agent_d_current}"),
        Agent("b", "", "{agent_a_current}"),
        Agent("c", "", "{agent_a_current}"),
        Agent("d", "", "{agent_a_current} {agent_b_current} {agent_c_current} {agent_d_history_1}"),
    ),
    turns=2,
    loops=(("d", "a"),),
)
LOOPS = StepGraph(
    "loop",
    (
        Node("planner", loops=["reviewer"]),
        *(Node(f"executor_{at}", after=["planner"]) for at in "123"),
        Node("expresser", after=["executor_1", {"executor_2", "executor_3"}]),
        Node("reviewer", after=["expresser"], loops=["reviewer"]),
        Node("archive", after=[{"planner", "executor_3", "reviewer"}], loops=["archive", "archive"]),
    ),
)
BRANCH = StepGraph(
    "branch",
    (
        Node("planner", loops=["reviewer"]),
        Node("reviewer", after=["planner"], then={"planner": 0.3, "publisher": 0.7}),
        Node("publisher", after=["reviewer"]),
    ),
)


class ReadBack(NamedTuple):
    """What a text says of a graph; of an edge: start, end, whether it is a loop, and its label."""

    name: str
    nodes: list[str]
    edges: list[tuple[str, str, bool, str]]


def read_mermaid(text: str) -> ReadBack:
    """Return what a Mermaid text says, its escapes taken back as Mermaid does."""
    _, front, body = text.split("---\n", 2)
    nodes = {name: unescaped(label) for name, label in re.findall(r'^  (n\d+)\["(.*)"\]$', body, re.MULTILINE)}
    found = re.findall(r'^  (n\d+) (-->|-\.->)(?:\|"(.*)"\|)? (n\d+)$', body, re.MULTILINE)
    edges = [(nodes[start], nodes[to], arrow == "-.->", label) for start, arrow, label, to in found]
    assert len(body.splitlines()) == 1 + len(nodes) + len(edges)
    return ReadBack(yaml.safe_load(front)["title"], list(nodes.values()), edges)


def unescaped(label: str) -> str:
    assert not set(label) & set('"<>&`[]{}|\n')
    return re.sub(r"#(\d+);", lambda found: chr(int(found[1])), label)


def test_a_workflow_has_its_reads_as_edges_and_its_agents_in_columns() -> None:
    reads = {("a", "b"), ("a", "c"), ("a", "d"), ("b", "d"), ("c", "d"), ("d", "a"), ("d", "d")}
    assert set(workflow_edges(TEAM)) == {Edge(start, to, is_loop=start == "d") for start, to in reads}
    assert columns(TEAM) == [["a"], ["b", "c"], ["d"]]


@pytest.mark.parametrize(("graph", "labels"), [
    (LOOPS, {
        ("executor_1", "expresser", False): "alternative 1", ("executor_2", "expresser", False): "alternative 2",
        ("executor_3", "expresser", False): "alternative 2", ("archive", "archive", True): "alternative 2",
    }),
    (BRANCH, {("reviewer", "planner", True): "30%", ("reviewer", "publisher", False): "70%"}),
])  # fmt: skip
def test_a_step_graph_read_back(graph: StepGraph, labels: dict[tuple[str, str, bool], str]) -> None:
    arrows = {(name, node.id, False) for node in graph.nodes for names in node.after for name in names}
    arrows |= {(name, node.id, True) for node in graph.nodes for names in node.loops for name in names}
    found = read_mermaid(export(graph))
    assert set(found.nodes) == set(graph.ids)
    assert {edge[:3] for edge in found.edges} == arrows
    assert {edge[:3]: edge[3] for edge in found.edges if edge[3]} == labels


NAMES = st.text(min_size=1) | st.text('"\\&#;<>[]|-_@`%\n\té中🙂', min_size=1)


@st.composite
def diagrams(draw: st.DrawFn) -> tuple[str, list[str], list[Edge]]:
    names = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    end, number, share = st.sampled_from(names), st.none() | st.integers(1, 6), st.none() | st.floats(0, 1)
    edges = st.builds(Edge, end, end, st.booleans(), number, share)
    return draw(NAMES), names, draw(st.lists(edges, max_size=5))


@given(diagrams())
def test_any_names_come_back(diagram: tuple[str, list[str], list[Edge]]) -> None:
    name, names, edges = diagram
    found = [(edge.start, edge.to, edge.is_loop, edge.label) for edge in edges]
    assert read_mermaid(mermaid(name, names, edges)) == ReadBack(name, names, found)
