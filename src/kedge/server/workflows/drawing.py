"""Drawings of a workflow: text, and a self-contained SVG picture."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from kedge.types import AgentId, ValueKind
from kedge.workflow.graph import Workflow

WIDTH, HEIGHT, GAP, ROW, EDGE, ARCH = 150, 40, 70, 64, 24, 24
"""Pixels: width and height of a box, gap of columns, height of a row, margin, height of an arch per column."""
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1c2a38}rect{fill:#eef3f8;stroke:#33567a}"
    "path{fill:none;stroke:#33567a;stroke-width:1.3}.loop{stroke:#a03030;stroke-dasharray:5 4}"
)


def columns(workflow: Workflow) -> list[list[AgentId]]:
    """Return the agents by depth: the length of the longest chain of agents that they wait for."""
    depth: dict[AgentId, int] = {}
    for agent in workflow.order:
        depth[agent] = 1 + max((depth[other] for other in workflow.waits_for[agent]), default=-1)
    return [[agent for agent in workflow.order if depth[agent] == at] for at in range(1 + max(depth.values()))]


def text(workflow: Workflow) -> str:
    """Return a line per agent, in the order in which they run, with the agents that it waits for."""
    lines = [f"{workflow.name}: {len(workflow.agents)} agents, inputs: {', '.join(workflow.inputs)}"]
    for step, column in enumerate(columns(workflow)):
        for agent in column:
            waits = [other for other in workflow.order if other in workflow.waits_for[agent]]
            again = [speaker for speaker, listener in workflow.loops if listener == agent]
            line = f" after {', '.join(waits)}" if waits else ""
            line += f"; hears {', '.join(again)} of the turn before" if again else ""
            lines.append(f"  step {step}: {agent}{line}")
    return "\n".join(lines) + "\n"


def svg(workflow: Workflow) -> str:
    """Return the picture from left to right: an arrow to each reader of an answer, dashed if it is the last turn's."""
    placed = columns(workflow)
    top = EDGE + len(placed) * ARCH
    at = {
        agent: (EDGE + x * (WIDTH + GAP), top + y * ROW)
        for x, column in enumerate(placed)
        for y, agent in enumerate(column)
    }
    width = 2 * EDGE + len(placed) * (WIDTH + GAP) - GAP
    height = top + (1 + max(len(column) for column in placed)) * ROW
    return "".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" ',
            f'width="{width}" height="{height}">',
            f"<title>{escape(workflow.name)}</title><style>{STYLE}</style>",
            '<defs><marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">',
            '<path d="M0 0L8 4L0 8z" style="fill:#33567a"/></marker></defs>',
            *(_arrow(at[start], at[end], is_loop) for start, end, is_loop in edges(workflow)),
            *(_box(agent, *place) for agent, place in at.items()),
            "</svg>",
        )
    )


def edges(workflow: Workflow) -> Iterator[tuple[AgentId, AgentId, bool]]:
    """Yield speaker, listener, and whether the listener reads the answer of the turn before."""
    for agent in workflow.agents:
        listener = AgentId(agent.id)
        heard = {AgentId(read.of) for read in agent.placeholders if read.kind is not ValueKind.INPUT}
        for speaker in sorted(heard):
            yield speaker, listener, speaker not in workflow.waits_for[listener]


def _arrow(start: tuple[int, int], end: tuple[int, int], is_loop: bool) -> str:
    if is_loop:
        x1, y1, x2, y2 = start[0] + WIDTH // 2, start[1] + HEIGHT, end[0] + WIDTH // 3, end[1] + HEIGHT
        path = f"M{x1} {y1}C{x1} {y1 + ROW} {x2} {y2 + ROW} {x2} {y2}"
        return f'<path class="loop" d="{path}" marker-end="url(#a)"/>'
    span = (end[0] - start[0]) // (WIDTH + GAP)
    if span > 1:  # over the boxes between them
        x1, x2, y = start[0] + WIDTH // 2, end[0] + WIDTH // 2 - 6 * span, min(start[1], end[1]) - span * ARCH
        return f'<path d="M{x1} {start[1]}C{x1} {y} {x2} {y} {x2} {end[1]}" marker-end="url(#a)"/>'
    x1, y1, x2, y2 = start[0] + WIDTH, start[1] + HEIGHT // 2, end[0], end[1] + HEIGHT // 2
    bend = GAP // 2
    return f'<path d="M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}" marker-end="url(#a)"/>'


def _box(agent: AgentId, x: int, y: int) -> str:
    shown = agent if len(agent) <= 20 else f"{agent[:19]}…"
    label = f'<text x="{x + WIDTH // 2}" y="{y + HEIGHT // 2 + 5}" text-anchor="middle">{escape(shown)}</text>'
    return f'<g><rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>{label}</g>'
