"""The workflow part of `kedge inspect`: which agent reads which, and what their prompts would save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from kedge.cli.flow_savings import advice, calls_table, paragraphs, savings_table
from kedge.errors import ConfigError

if TYPE_CHECKING:
    from kedge.types import AgentId
    from kedge.workflow.graph import Workflow
    from kedge.workflow.savings import RunSavings, ValueLengths
    from kedge.workflow.step_graph import StepGraph


@dataclass(frozen=True)
class Counts:
    """The token counts to assume: a model's tokenizer for texts, and the lengths of values."""

    model: Path | None
    input: int
    answer: int
    tool: int
    named: tuple[str, ...]

    def lengths(self, workflow: Workflow) -> ValueLengths:
        """Return the lengths for `workflow`. Raises `ConfigError` for a `--length` of a value that it does not have."""
        from kedge.workflow.savings import ValueLengths

        return ValueLengths(self.input, self.answer, self.tool, dict(self._named(workflow)))

    def _named(self, workflow: Workflow) -> Iterator[tuple[str, int]]:
        from kedge.workflow.savings import value_name

        known = {value_name(read.kind, read.of) for agent in workflow.agents for read in agent.placeholders}
        for pair in self.named:
            name, _, count = pair.partition("=")
            if not (count.isascii() and count.isdigit()):
                raise ConfigError("--length", pair, "must be NAME=N with a whole number N of tokens")
            if name not in known:
                raise ConfigError("--length", name, f"must be one of {', '.join(sorted(known))}")
            yield name, int(count)


def show_flow(console: Console, path: Path, counts: Counts, picture: Path | None, *, show_all: bool) -> None:
    """Print the facts of the workflow in `path`, and draw its step graph if `picture` is given."""
    from kedge.cli.flow_picture import flow_picture
    from kedge.cli.flow_text import flow_text, lanes_text
    from kedge.workflow.spec import load_flow
    from kedge.workflow.step_graph import StepGraph

    flow = load_flow(path)
    graph = flow if isinstance(flow, StepGraph) else StepGraph.of(flow)
    if picture:
        flow_picture(graph, picture)
    if isinstance(flow, StepGraph):
        console.print(lanes_text(graph))
    else:
        _show_workflow(console, flow, graph, counts, show_all=show_all)
    if show_all or isinstance(flow, StepGraph):
        console.print(flow_text(graph, console.width, points=show_all))
    if not show_all:
        console.print("--all shows every call, agent and step.", style="dim")
    if picture:
        console.print(f"picture: {picture}", markup=False, highlight=False, soft_wrap=True)


def _show_workflow(console: Console, flow: Workflow, graph: StepGraph, counts: Counts, *, show_all: bool) -> None:
    from kedge.cli.flow_text import lanes_text

    savings = _savings(flow, counts)
    console.print(f"{flow.name}: {len(flow.agents)} agents, {len(flow.steps)} calls a run", markup=False)
    console.print(lanes_text(graph))
    console.print(savings_table(savings))
    for line in paragraphs(advice(savings), _assumptions(counts), width=console.width):
        console.print(line, markup=False, highlight=False)
    if show_all:
        console.print(calls_table(savings), _agents(flow))


def _savings(flow: Workflow, counts: Counts) -> RunSavings:
    lengths = counts.lengths(flow)  # before the tokenizer, which takes seconds to import
    from kedge.engine.common.model_folder import model_path
    from kedge.engine.common.tokenizer import HFTokenizer
    from kedge.workflow.savings import estimate_savings

    return estimate_savings(flow, HFTokenizer.load(model_path(counts.model)), lengths)


def _assumptions(counts: Counts) -> str:
    named = "".join(f", {pair.replace('=', ' ')}" for pair in counts.named)
    model = f"the tokenizer of {counts.model}" if counts.model else "the bundled model's tokenizer (--model)"
    return (
        f"Counted with {model}, once earlier questions have filled the caches. Assumed tokens: inputs {counts.input}, "
        f"answers {counts.answer} or max_tokens, tool results {counts.tool}{named} (--input-tokens, --answer-tokens, "
        "--tool-tokens, --length)."
    )


def _agents(flow: Workflow) -> Table:
    """Return the table of the agents each agent waits for, and of its placeholders, one per line."""
    caption = f"inputs: {', '.join(flow.inputs)}; turns: {flow.turns}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for column in ("agent", "waits for", "reads", "tool", "reuse"):
        table.add_column(column, overflow="fold")
    for agent_id in flow.order:
        table.add_row(*_agent(flow, agent_id), end_section=agent_id != flow.order[-1])
    return table


def _agent(flow: Workflow, agent_id: AgentId) -> tuple[str, ...]:
    agent = flow.agent(agent_id)
    waits_for = [other for other in flow.order if other in flow.waits_for[agent_id]]
    return (
        agent_id,
        "\n".join(waits_for) or "nobody",
        "\n".join(placeholder.name for placeholder in agent.placeholders),
        "yes" if agent.tool else "",
        agent.reuse or "",
    )
