"""A step graph as text: which nodes wait for which, and the steps-to-execution at every point of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kedge.types import AgentId
from kedge.workflow.export import lanes

if TYPE_CHECKING:
    from collections.abc import Collection

    from kedge.workflow.step_graph import Node, NodeId, RunState, StepGraph

MOST_POINTS = 60
_LONGEST_TEXT, _GAP = 32, 3


class Point(NamedTuple):
    """A point of a run: the last event, and the state after it."""

    text: str
    state: RunState


def points(graph: StepGraph) -> Iterator[Point]:
    """Yield all points of a run in which every node starts as soon as it can, and finishes as declared.

    Where one of several nodes comes next, all of them are followed, one after the other; no state comes twice.
    """
    from kedge.workflow.step_graph import RunState

    todo, seen = [Point("at the start", RunState())], set[RunState]()
    while todo:
        point = todo.pop()
        if point.state not in seen:
            seen.add(point.state)
            yield point
            todo += reversed(list(_next_points(graph, point.state)))


def _next_points(graph: StepGraph, state: RunState) -> Iterator[Point]:
    options = list(_options(graph, state))
    for nodes in options:
        after = state
        for node in nodes:
            after = graph.started(after, node)
        yield Point(_while(graph, after), after)
    if state.running and not options:
        first = next(node for node in graph.ids if node in state.running)
        after = graph.finished(state, first)
        yield Point(f"after {first}" + (f", {_while(graph, after)}" if after.running else ""), after)


def _options(graph: StepGraph, state: RunState) -> Iterator[tuple[NodeId, ...]]:
    """Yield the sets of nodes that can start together: all that can run, with one of those that exclude each other; or
    a loop again.
    """
    ready = graph.ready(state)
    new = [node for node in ready if node not in state.done]
    chosen = [node for node in new if _is_chosen(graph, node, state)]
    together = tuple(node for node in new if node not in chosen)
    if new:
        yield from ((*together, node) for node in chosen) if chosen else (together,)
    if not state.running:
        yield from ((node,) for node in ready if node in state.done)


def _is_chosen(graph: StepGraph, node: NodeId, state: RunState) -> bool:
    return any(node in other.then and other.id in state.done for other in graph.nodes)


def _while(graph: StepGraph, state: RunState) -> str:
    running = [node for node in graph.ids if node in state.running]
    return f"while {' + '.join(running)} run{'s' if len(running) == 1 else ''}"


def flow_text(graph: StepGraph, width: int, *, points: bool) -> Group:
    """Render the nodes of a graph, on request with all `points` of its run, for a terminal of `width` columns."""
    return Group(_nodes(graph), *(_points_tables(graph, width) if points else ()))


def lanes_text(graph: StepGraph) -> Text:
    """Return the nodes in the order of their steps, those of one step together."""
    return Text(" → ".join(f"[{' | '.join(node.id for node in lane)}]" for lane in lanes(graph)), style="bold")


def _nodes(graph: StepGraph) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("step", "node", "runs after", "and then one of"):
        table.add_column(column, overflow="fold", justify="right" if column == "step" else "left")
    for step, lane in enumerate(lanes(graph)):
        for at, node in enumerate(lane):
            then = ", ".join(f"{name} {odds:.0%}" for name, odds in node.odds.items())
            table.add_row("" if at else str(step), node.id, waits(node), then, end_section=at == len(lane) - 1)
    return table


def waits(node: Node) -> str:
    """Return the conditions after which a node runs, in words."""
    first = " or ".join(_all(names) for names in node.after) or "none"
    again = "".join(f"; again after {_all(names)}" for names in node.loops)
    return first + again


def _all(names: Collection[str]) -> str:
    return " + ".join(sorted(names))


def _points_tables(graph: StepGraph, width: int) -> Iterator[Table | Text]:
    shown = list(islice(points(graph), MOST_POINTS + 1))
    text = min(_LONGEST_TEXT, max(len(point.text) for point in shown))
    for agents in _that_fit(list(graph.nodes_of), width - text - _GAP):
        yield _points_table(graph, shown[:MOST_POINTS], agents)
    if len(shown) > MOST_POINTS:
        yield Text(f"… the first {MOST_POINTS} points; there are more")


def _that_fit(agents: Sequence[AgentId], width: int) -> Iterator[list[AgentId]]:
    """Split the agents into groups with names that fit side by side in `width` columns."""
    group: list[AgentId] = []
    for agent in agents:
        if group and sum(len(one) + _GAP for one in [*group, agent]) > width:
            yield group
            group = []
        group.append(agent)
    yield group


def _points_table(graph: StepGraph, shown: Iterable[Point], agents: Sequence[AgentId]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="steps-to-execution", title_justify="left")
    table.add_column("point of the run", overflow="fold", max_width=_LONGEST_TEXT)
    for agent in agents:
        table.add_column(agent, justify="right", overflow="fold")
    for point in shown:
        next_runs = graph.next_runs(point.state)
        table.add_row(point.text, *(_steps(next_runs[agent].steps) for agent in agents))
    return table


def _steps(steps: float) -> str:
    from kedge.workflow.steps import UNKNOWN

    return "–" if steps == UNKNOWN else str(int(steps))
