"""The picture of a step graph: every arrow is there, none runs through a box, no two boxes overlap."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kedge.cli.flow_picture import HEIGHT, Box, _boxes, _curve, edges, flow_picture
from kedge.workflow.step_graph import Node, StepGraph

NAMES = ["solver", "analyst", "programmer", "inspector", "final"]
FULL = StepGraph("full", tuple(Node(name, after=[set(NAMES[:at])] if at else ()) for at, name in enumerate(NAMES)))
LOOP = StepGraph(
    "loop",
    (
        Node("planner", loops=["reviewer"]),
        *(Node(f"executor_{at}", after=["planner"]) for at in "123"),
        Node("expresser", after=["executor_1", {"executor_2", "executor_3"}]),
        Node("reviewer", after=["expresser"], loops=["reviewer"]),
        Node("archive", after=[{"planner", "executor_3", "reviewer"}]),
    ),
)
BRANCH = StepGraph(
    "branch",
    (
        Node("planner", loops=["reviewer"]),
        Node("writer", after=["planner"]),
        Node("reviewer", after=["writer"], then={"planner": 0.3, "publisher": 0.7}),
        Node("publisher", after=["reviewer"]),
    ),
)
GRAPHS = pytest.mark.parametrize("graph", [FULL, LOOP, BRANCH], ids=lambda graph: graph.name)


def inside(x: float, y: float, box: Box) -> bool:
    margin = 0.01
    return abs(x - box.x) < box.width / 2 - margin and abs(y - box.y) < HEIGHT / 2 - margin


def test_every_arrow_is_there() -> None:
    assert [(edge.start, edge.to, edge.alternative, edge.is_loop) for edge in edges(LOOP)] == [
        ("reviewer", "planner", 0, True),
        ("planner", "executor_1", 0, False),
        ("planner", "executor_2", 0, False),
        ("planner", "executor_3", 0, False),
        ("executor_1", "expresser", 0, False),
        ("executor_2", "expresser", 1, False),
        ("executor_3", "expresser", 1, False),
        ("expresser", "reviewer", 0, False),
        ("reviewer", "reviewer", 1, True),
        ("executor_3", "archive", 0, False),
        ("planner", "archive", 0, False),
        ("reviewer", "archive", 0, False),
    ]
    assert {edge.to: edge.odds for edge in edges(BRANCH) if edge.odds} == {"planner": 0.3, "publisher": 0.7}


@GRAPHS
def test_boxes_do_not_overlap(graph: StepGraph) -> None:
    for one, other in itertools.combinations(_boxes(graph).values(), 2):
        assert abs(one.x - other.x) >= (one.width + other.width) / 2 or abs(one.y - other.y) >= HEIGHT


@GRAPHS
def test_arrows_run_around_the_boxes(graph: StepGraph) -> None:
    boxes = _boxes(graph)
    for edge in edges(graph):
        a, b, c, d = _curve(edge, boxes)
        for t in (at / 50 for at in range(51)):
            weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
            x, y = (
                sum(weight * point[axis] for weight, point in zip(weights, (a, b, c, d), strict=True))
                for axis in (0, 1)
            )
            assert not any(inside(x, y, box) for box in boxes.values()), edge


@GRAPHS
@pytest.mark.parametrize("suffix", [".png", ".SVG"])
def test_it_is_drawn(graph: StepGraph, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"graph{suffix}"
    flow_picture(graph, file)
    assert file.stat().st_size > 2000
