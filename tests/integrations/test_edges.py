"""Step graphs from any edges, against a naive reading of the same edges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.integrations.edges import END, START, StepEdge, step_graph

NAMES = [*"abcdef", START, END]
edges = st.lists(st.builds(StepEdge, st.sampled_from(NAMES[:-1]), st.sampled_from(NAMES), st.booleans()), max_size=16)
joins = st.lists(
    st.tuples(st.lists(st.sampled_from("abcdef"), min_size=2, max_size=3, unique=True), st.sampled_from("abcdef")),
    max_size=3,
)


def ways(found: list[StepEdge], joined: list[tuple[list[str], str]]) -> set[tuple[frozenset[str], str]]:
    pairs = {(member, target) for members, target in joined for member in members}
    single = {(frozenset({edge.source}), edge.target) for edge in found if (edge.source, edge.target) not in pairs}
    return {
        way for way in single | {(frozenset(members), target) for members, target in joined} if way[1] not in NAMES[-2:]
    }


def reachable(all_ways: set[tuple[frozenset[str], str]]) -> set[str]:
    found = {START}
    while more := {target for members, target in all_ways if members <= found} - found:
        found |= more
    return found


@given(edges, joins)
def test_step_graphs_keep_all_reachable_edges(found: list[StepEdge], joined: list[tuple[list[str], str]]) -> None:
    graph = step_graph("any", found, joined)
    expected = ways(found, joined)
    reached = reachable(expected)
    assert {*graph.ids} == reached
    made = {(members, node.id) for node in graph.nodes for members in (*node.after, *node.loops)}
    assert made == {(members, target) for members, target in expected if target in reached and members <= reached}
    assert all(node.after for node in graph.nodes if node.id != START)


@given(edges)
def test_nodes_right_after_the_start_are_due_at_once(found: list[StepEdge]) -> None:
    steps = step_graph("any", found).steps(running=(), done={START})
    assert {node for node, one in steps.items() if one == 0} == {
        edge.target for edge in found if edge.source == START
    } - {START, END}


@given(edges)
def test_choices_and_the_end_are_equally_likely(found: list[StepEdge]) -> None:
    for node in step_graph("any", found).nodes:
        chosen = {edge.target for edge in found if edge.chosen and edge.source == node.id} - {START}
        assert node.then == {target: pytest.approx(1 / len(chosen)) for target in chosen - {END}}


def test_an_edge_against_the_order_of_discovery_is_no_loop() -> None:
    nodes = {
        node.id: node
        for node in step_graph("n", [StepEdge(START, "a"), StepEdge(START, "b"), StepEdge("b", "a")]).nodes
    }
    assert nodes["a"].after == ({START}, {"b"}) and not nodes["a"].loops
