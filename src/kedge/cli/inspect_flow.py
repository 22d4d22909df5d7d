"""The workflow part of `kedge inspect`: which agent reads which, and what their prompts would save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
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

FORMAT_OF = {".mmd": "mermaid", ".dot": "dot"}
"""Ending of a file -> the format of the graph in it"""


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


@dataclass(frozen=True)
class GraphOutput:
    """Where a step graph goes besides the tables: a file, whose ending is the format, and standard output.

    Raises `ConfigError` for an ending, a folder or a format that there is none of.
    """

    file: Path | None
    printed: str | None

    def __post_init__(self) -> None:
        if self.file is not None and self.file.suffix.lower() not in FORMAT_OF:
            why = "must end in .mmd (Mermaid) or .dot (Graphviz: dot -Tsvg makes a picture of it)"
            raise ConfigError("--picture", str(self.file), why)
        if self.file is not None and not self.file.parent.is_dir():
            raise ConfigError("--picture", str(self.file), "its folder does not exist")
        if self.printed is not None and self.printed not in FORMAT_OF.values():
            raise ConfigError("--graph", self.printed, "must be mermaid or dot")

    def write(self, graph: StepGraph) -> None:
        """Write and print the graph in the formats that are asked for."""
        from kedge.workflow.export import export

        if self.file is not None:
            self.file.write_text(export(graph, FORMAT_OF[self.file.suffix.lower()]), encoding="utf-8")
        if self.printed is not None:
            typer.echo(export(graph, self.printed), nl=False)


def show_flow(console: Console, path: Path, counts: Counts, output: GraphOutput, *, show_all: bool) -> None:
    """Print what is known of the workflow in `path`, or its step graph only where that is asked for."""
    from kedge.workflow.spec import load_flow
    from kedge.workflow.step_graph import StepGraph

    flow = load_flow(path)
    graph = flow if isinstance(flow, StepGraph) else StepGraph.of(flow)
    output.write(graph)
    if output.printed is None:
        _show_tables(console, flow, graph, counts, show_all=show_all)
        if output.file:
            console.print(f"picture: {output.file}", markup=False, highlight=False, soft_wrap=True)


def _show_tables(
    console: Console, flow: Workflow | StepGraph, graph: StepGraph, counts: Counts, *, show_all: bool
) -> None:
    from kedge.cli.flow_text import flow_text, lanes_text
    from kedge.workflow.step_graph import StepGraph

    if isinstance(flow, StepGraph):
        console.print(lanes_text(graph))
    else:
        _show_workflow(console, flow, graph, counts, show_all=show_all)
    if show_all or isinstance(flow, StepGraph):
        console.print(flow_text(graph, console.width, points=show_all))
    if not show_all:
        console.print("--all shows every call, agent and step.", style="dim")


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
        "\n".join(waits_for) or "none",
        "\n".join(placeholder.name for placeholder in agent.placeholders),
        "yes" if agent.tool else "",
        agent.reuse or "",
    )
