"""A step graph as a picture (extra `plot`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kedge.cli.flow_text import lanes
from kedge.errors import ConfigError

if TYPE_CHECKING:
    from kedge.workflow.step_graph import StepGraph

SUFFIXES = (".png", ".svg")
COLOURS = ("#33567a", "#b5651d", "#4a7c4e", "#7a4a7c")
"""Colours of a node's alternatives; further alternatives start again with the first."""
LOOP = "#a03030"
MIN_WIDTH, ROW, GAP, HEIGHT, BEND = 5.5, 0.95, 1.15, 0.46, 0.3
"""Inches: a picture at least, between rows, between lanes, height of a node, a curve's gain by each lane it passes."""


Point = tuple[float, float]


class Box(NamedTuple):
    """The place of a node in inches: its middle and width; and its lane."""

    x: float
    y: float
    width: float
    lane: int


class Edge(NamedTuple):
    """An arrow between two nodes: which alternative of `to` it belongs to, and with which odds `start` chooses `to`."""

    start: str
    to: str
    alternative: int
    is_loop: bool
    odds: float | None


def flow_picture(graph: StepGraph, file: Path) -> None:
    """Draw `graph` from left to right by steps. Raises `ConfigError` without matplotlib or for another suffix."""
    if file.suffix.lower() not in SUFFIXES:
        raise ConfigError("--picture", str(file), f"a picture ends in {' or '.join(SUFFIXES)}")
    if not file.parent.is_dir():
        raise ConfigError("--picture", str(file), "its folder does not exist")
    plt = _pyplot(file)
    boxes = _boxes(graph)
    left, right = -0.3, max(MIN_WIDTH, max(box.x + box.width / 2 for box in boxes.values()) + 0.3)
    curves = [(edge, _curve(edge, boxes)) for edge in edges(graph)]
    heights = [_middle(curve)[1] for _, curve in curves] + [box.y for box in boxes.values()]
    low, high = min(heights) - 0.7, max(heights) + 1.05
    figure = plt.figure(figsize=(right - left, high - low))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(left, right), ylim=(low, high))
    axes.axis("off")
    for edge, curve in curves:
        _draw_edge(axes, edge, curve)
    for node in graph.nodes:
        _draw_box(axes, node.id, boxes[node.id])
    _draw_words(axes, graph, boxes, high, low)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _pyplot(file: Path) -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--picture", str(file), "needs matplotlib: pip install 'kedge[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def edges(graph: StepGraph) -> Iterator[Edge]:
    """Yield all arrows of a graph."""
    by_id = {node.id: node for node in graph.nodes}
    for node in graph.nodes:
        alternatives = [(names, False) for names in node.after] + [(names, True) for names in node.loops]
        for at, (names, is_loop) in enumerate(alternatives):
            for name in sorted(names):
                yield Edge(name, node.id, at, is_loop, by_id[name].odds.get(node.id))


def _boxes(graph: StepGraph) -> dict[str, Box]:
    """Place the nodes: one lane for each number of steps, its nodes stacked around the middle."""
    boxes: dict[str, Box] = {}
    left = 0.0
    for number, lane in enumerate(lanes(graph)):
        width = max(0.1 * len(node.id) for node in lane) + 0.35
        for at, node in enumerate(lane):
            boxes[node.id] = Box(left + width / 2, ((len(lane) - 1) / 2 - at) * ROW, width, number)
        left += width + GAP
    return boxes


def _curve(edge: Edge, boxes: Mapping[str, Box]) -> list[Point]:
    """Return the four points of a cubic curve: straight to the next lane, above the lanes between, or back
    below them.
    """
    start, to = boxes[edge.start], boxes[edge.to]
    if start.lane >= to.lane:
        return _back(start, to, boxes)
    span = to.lane - start.lane
    # Of the arrows at one side of a node, the longer ones meet it higher up, so that their heads stay apart.
    side = min(0.06 * (span - 1), HEIGHT / 2 - 0.06)
    begin, end = (start.x + start.width / 2, start.y + side), (to.x - to.width / 2, to.y + side)
    if span == 1:
        return [begin, _between(begin, end, 1 / 3), _between(begin, end, 2 / 3), end]
    top = max(box.y for box in boxes.values() if start.lane <= box.lane <= to.lane) + HEIGHT / 2
    level = _control(top + BEND * span, begin[1], end[1])
    return [begin, (begin[0] + GAP / 2, level), (end[0] - GAP / 2, level), end]


def _between(begin: Point, end: Point, share: float) -> Point:
    return begin[0] + share * (end[0] - begin[0]), begin[1] + share * (end[1] - begin[1])


def _back(start: Box, to: Box, boxes: Mapping[str, Box]) -> list[Point]:
    bottom = min(box.y for box in boxes.values() if to.lane <= box.lane <= start.lane) - HEIGHT / 2
    begin, end = (start.x + 0.1, start.y - HEIGHT / 2), (to.x - 0.1, to.y - HEIGHT / 2)
    level = _control(bottom - BEND * (start.lane - to.lane + 1), begin[1], end[1])
    return [begin, (begin[0], level), (end[0], level), end]


def _control(apex: float, begin: float, end: float) -> float:
    """Return the height of the two inner points with which a curve reaches `apex` in its middle."""
    return (apex - (begin + end) / 8) / 0.75


def _middle(curve: list[Point]) -> Point:
    x, y = ((a + 3 * b + 3 * c + d) / 8 for a, b, c, d in zip(*curve, strict=True))
    return x, y


def _draw_edge(axes: Any, edge: Edge, curve: list[Point]) -> None:
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    colour = LOOP if edge.is_loop else COLOURS[edge.alternative % len(COLOURS)]
    path = Curve(curve, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
    style = "--" if edge.is_loop else "-"
    axes.add_patch(FancyArrowPatch(path=path, arrowstyle="-|>", mutation_scale=12, lw=1.2, ls=style, color=colour))
    if edge.odds is not None:
        x, y = _middle(curve)
        blank = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none"}
        axes.text(x, y, f"{edge.odds:.0%}", color=colour, fontsize=9, ha="center", va="center", bbox=blank)


def _draw_box(axes: Any, name: str, box: Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = (box.x - box.width / 2, box.y - HEIGHT / 2)
    shape = FancyBboxPatch(
        corner, box.width, HEIGHT, boxstyle="round,pad=0,rounding_size=0.1", fc="#eef3f8", ec="#33567a"
    )
    axes.add_patch(shape)
    axes.text(box.x, box.y, name, fontsize=10, ha="center", va="center")


def _draw_words(axes: Any, graph: StepGraph, boxes: Mapping[str, Box], high: float, low: float) -> None:
    axes.text(0, high - 0.12, graph.name, fontsize=12, weight="bold", va="top")
    for lane in {box.lane: box for box in boxes.values()}.values():
        axes.text(lane.x, high - 0.55, f"step {lane.lane}", fontsize=9, color="grey", ha="center", va="center")
    axes.text(0, low + 0.12, _legend(graph), fontsize=8, color="grey", va="bottom")


def _legend(graph: StepGraph) -> str:
    parts = ["a node waits for all arrows of one colour"]
    parts += ["or for all of another"] * any(len(tuple(node.after)) > 1 for node in graph.nodes)
    parts += ["dashed: it runs again"] * any(node.loops for node in graph.nodes)
    return "; ".join(parts)
