"""The points of a run, and tables that stay within the terminal."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console

from kedge.cli.inspect_flow import MOST_POINTS, conflicts, flow_text, points
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.step_graph import Node, StepGraph


def graph(*nodes: Node) -> StepGraph:
    return StepGraph("test", nodes)


def texts(of: StepGraph) -> list[str]:
    return [point.text for point in points(of)]


def printed(of: StepGraph, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(flow_text(of, width, points=True))
    return console.export_text().splitlines()


def test_what_can_run_together_is_started_together() -> None:
    fork = graph(Node("a"), Node("b", after=["a"]), Node("c", after=["a"]), Node("d", after=[{"b", "c"}]))
    assert texts(fork) == [
        "at the start", "while a runs", "after a", "while b + c run", "after b, while c runs", "after c",
        "while d runs", "after d",
    ]  # fmt: skip


def test_what_becomes_ready_starts_while_others_run() -> None:
    two = graph(Node("a"), Node("b"), Node("c", after=["a"]))
    assert texts(two)[2:4] == ["after a, while b runs", "while b + c run"]


def test_branches_are_followed_one_after_the_other_and_loops_once() -> None:
    choice = graph(
        Node("a", loops=["b"]), Node("b", after=["a"], then={"a": 0.5, "c": 0.2, "d": 0.3}), Node("c", after=["b"]),
        Node("d", after=["b"]),
    )  # fmt: skip
    assert texts(choice)[4:] == ["after b", "while c runs", "after c", "while d runs", "after d"]


def test_a_loop_without_odds_is_followed_beside_the_way_on() -> None:
    loop = graph(Node("a", loops=["b"]), Node("b", after=["a"]), Node("c", after=["b"]))
    assert texts(loop)[:5] == ["at the start", "while a runs", "after a", "while b runs", "after b"]
    assert "while c runs" in texts(loop)


READ = "{user_question}"
BOTH = READ + " {agent_buyer_current}"


@pytest.mark.parametrize(
    ("buyer", "seller", "picks", "warned"),
    [
        ("Buy.", ("Sell.", READ), False, True),
        ("Buy.", ("Buy.", READ), True, False),
        ("Buy.", ("Sell.", BOTH), False, False),
        ("Buy.", ("Sell.", BOTH), True, True),
    ],
)
def test_roles_that_may_conflict_are_warned_of(buyer: str, seller: tuple[str, str], picks: bool, warned: bool) -> None:
    pick = "I take <letter>" if picks else ""
    agents = Agent("buyer", buyer, READ, pick=pick), Agent("seller", *seller, pick=pick)
    lines = list(conflicts(Workflow("market", agents)))
    assert [line.partition(" under roles of their own:")[0] for line in lines] == (
        ["buyer and seller read user_question"] if warned else []
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_many_agents_stand_in_several_tables(width: int) -> None:
    row = [
        Node("agent_number_0"),
        *(Node(f"agent_number_{at}", after=[f"agent_number_{at - 1}"]) for at in range(1, 12)),
    ]
    lines = printed(graph(*row), width)
    assert all(len(line.rstrip()) <= width for line in lines)
    assert sum(line.startswith(" at the start") for line in lines) > 1


def test_a_run_with_too_many_points_is_cut_and_says_so() -> None:
    names = [f"n{at}" for at in range(40)]
    random.Random(0).shuffle(names)
    row = graph(Node(names[0]), *(Node(name, after=[before]) for before, name in zip(names, names[1:], strict=False)))
    lines = printed(row, 400)
    assert lines[-1] == f"… the first {MOST_POINTS} points; there are more"
    assert sum(line.startswith((" at", " while", " after")) for line in lines) == MOST_POINTS
