"""The workflow part of `kedge inspect`: who reads whom, what prompts would save, and the step graph as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kedge.errors import ConfigError
from kedge.types import AgentId
from kedge.workflow.export import lanes

if TYPE_CHECKING:
    from collections.abc import Collection

    from kedge.types import AgentId
    from kedge.workflow.graph import Agent, Workflow
    from kedge.workflow.savings import RunSavings, ValueLengths
    from kedge.workflow.step_graph import Node, StepGraph


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
        from kedge.workflow.savings import ValueLengths, value_name

        named = {}
        known = {value_name(read.kind, read.of) for agent in workflow.agents for read in agent.placeholders}
        for pair in self.named:
            name, _, count = pair.partition("=")
            if not (count.isascii() and count.isdigit()):
                raise ConfigError("--length", pair, "must be NAME=N with a whole number N of tokens")
            if name not in known:
                raise ConfigError("--length", name, f"must be one of {', '.join(sorted(known))}")
            named[name] = int(count)
        return ValueLengths(self.input, self.answer, self.tool, named)


def show_flow(console: Console, path: Path, counts: Counts, *, graph_only: bool, show_all: bool) -> None:
    """Print what is known of the workflow in `path`, or its step graph alone."""
    from kedge.workflow.export import export
    from kedge.workflow.spec import load_flow
    from kedge.workflow.step_graph import StepGraph

    flow = load_flow(path)
    graph = flow if isinstance(flow, StepGraph) else StepGraph.of(flow)
    if graph_only:
        return typer.echo(export(graph), nl=False)
    if isinstance(flow, StepGraph):
        console.print(lanes_text(graph), nodes_table(graph))
    else:
        savings = _savings(flow, counts)
        console.print(f"{flow.name}: {len(flow.agents)} agents, {len(flow.steps)} calls a run", markup=False)
        console.print(lanes_text(graph))
        console.print(savings_table(savings))
        for line in paragraphs(advice(savings), *conflicts(flow), _assumptions(counts), width=console.width):
            console.print(line, markup=False, highlight=False)
        if show_all:
            console.print(calls_table(savings), _agents(flow), nodes_table(graph))
        else:
            console.print("--all shows every call, agent and step.", style="dim")
    return None


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
        agent = flow.agent(agent_id)
        waits_for = "\n".join(other for other in flow.order if other in flow.waits_for[agent_id])
        reads = "\n".join(placeholder.name for placeholder in agent.placeholders)
        cells = (agent_id, waits_for or "none", reads, "yes" if agent.tool else "", agent.reuse or "")
        table.add_row(*cells, end_section=agent_id != flow.order[-1])
    return table


WAYS = {
    "prefix": ("prefix caching, prompts as they are", "exact"),
    "role_last": ("prefix caching, shared text first and role last", "exact"),
    "translation": ("translation, prompts as they are", "at most; approximate"),
}
CLOSE = 0.1
"""Shares that differ by at most this count as equal: lengths are assumed, and translation's share is a bound."""


def savings_table(savings: RunSavings) -> Table:
    """Return the table of the shares of a run's prompt tokens that each way of serving saves."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("prompt tokens that need not be computed")
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("answers")
    for way, (name, answers) in WAYS.items():
        table.add_row(name, f"{savings.share(way):.0%}", answers)
    return table


def calls_table(savings: RunSavings) -> Table:
    """Return the table of every call's prompt tokens, and how many of them each way of serving saves."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("call", overflow="fold")
    for column in ("prompt tokens", "prefix caching", "role last", "translation"):
        table.add_column(column, justify="right")
    several = any(call.step.turn for call in savings.calls)
    for call in savings.calls:
        name = call.step.agent + (f", turn {call.step.turn + 1}" if several else "")
        counts = (call.prompt, call.prefix, call.role_last, call.translation)
        table.add_row(name, *(f"{count:,}" for count in counts))
    return table


def advice(savings: RunSavings) -> str:
    """Return the advice on what to try first: the exact way wherever it saves as much."""
    as_is, role_last, translation = (savings.share(way) for way in WAYS)
    if max(role_last, translation) <= as_is + CLOSE:
        return "These prompts begin with what they share: plain prefix caching is exact, and as good as it gets here."
    if translation <= role_last + CLOSE:
        return (
            "Put the shared text first and the role last if your agents answer as well that way: plain prefix caching "
            "then saves as much, its answers are exact, and translation is not needed."
        )
    return (
        "Where the shared text can stand first and the role last, plain prefix caching is exact and better: try that "
        "first. Translation is for prompts that have to begin with the role. It computes again the tokens that it "
        "would get wrong, on the bundled model more than half of them; `kedge run` shows how many."
    )


def conflicts(flow: Workflow) -> Iterator[str]:
    """Yield a warning for each text that agents read under roles of their own which may want opposite things of it:
    agents that each pick something, or that do not read each other's answers.
    """

    def may_conflict(one: Agent, other: Agent) -> bool:
        is_read = one.id in flow.waits_for[AgentId(other.id)] or other.id in flow.waits_for[AgentId(one.id)]
        return one.system != other.system and (not is_read or bool(one.pick and other.pick))

    for name in dict.fromkeys(read.name for agent in flow.agents for read in agent.placeholders):
        readers = [one for one in flow.agents if name in (read.name for read in one.placeholders)]
        if found := [one.id for one in readers if any(may_conflict(one, other) for other in readers)]:
            yield (
                f"{', '.join(found[:-1])} and {found[-1]} read {name} under roles of their own: whether its KV can be "
                "shared is proved before it is; if they want opposite things of it, it never is."
            )


def paragraphs(*texts: str, width: int) -> Iterator[str]:
    """Yield the lines of some paragraphs, at most `width` columns wide."""
    for text in texts:
        yield from textwrap.wrap(text, min(width, 100), break_on_hyphens=False)


def nodes_table(graph: StepGraph) -> Table:
    """Return the table of the nodes of a graph, by their steps before the run."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("step", "node", "runs after", "and then one of"):
        table.add_column(column, overflow="fold", justify="right" if column == "step" else "left")
    for step, lane in enumerate(lanes(graph)):
        for at, node in enumerate(lane):
            then = ", ".join(f"{name} {odds:.0%}" for name, odds in node.odds.items())
            table.add_row("" if at else str(step), node.id, waits(node), then, end_section=at == len(lane) - 1)
    return table


def lanes_text(graph: StepGraph) -> Text:
    """Return the nodes in the order of their steps, those of one step together."""
    return Text(" → ".join(f"[{' | '.join(node.id for node in lane)}]" for lane in lanes(graph)), style="bold")


def waits(node: Node) -> str:
    """Return the conditions after which a node runs, in words."""
    first = " or ".join(_all(names) for names in node.after) or "none"
    again = "".join(f"; again after {_all(names)}" for names in node.loops)
    return first + again


def _all(names: Collection[str]) -> str:
    return " + ".join(sorted(names))
