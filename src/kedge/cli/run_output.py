"""The output of `kedge run`: events, receipts, and the reasons why no more was reused."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kedge.cli.tables import FittingTable

if TYPE_CHECKING:
    from kedge.runner.run import AgentResult, RunEvent, RunResult


def show_event(console: Console, event: RunEvent) -> None:
    """Print an event of a run as it happens."""
    name = f"{event.agent}" + (f", turn {event.turn}" if event.turn else "")
    if event.kind == "submitted":
        console.print(f"› {name}", style="dim", markup=False, highlight=False)
    elif event.kind == "answered" and event.completion:
        took = f"  first token {event.completion.ttft_ms:.0f} ms, all {event.completion.total_ms:.0f} ms"
        console.print(f"✓ {name}{took}", style="bold", markup=False, highlight=False)
        console.print(event.text, markup=False, highlight=False)
    elif event.kind == "tool":
        console.print(f"⚙ {name}: {event.text}", style="cyan", markup=False, highlight=False)


def receipts(result: RunResult) -> FittingTable:
    """Return the table of the prompt tokens of every call by source."""
    headings = ("agent", "turn", "prompt", "exact", "translated", "computed", "TTFT ms")
    rows = []
    for one in result.results:
        receipt = one.completion.receipt
        counts = (one.turn, receipt.prompt_tokens, receipt.exact, receipt.translated, receipt.computed)
        rows.append([one.agent, *map(str, counts), f"{one.completion.ttft_ms:.1f}"])
    return FittingTable("where the prompt tokens came from", headings, rows, left=frozenset({"agent"}))


def misses_by_reason(result: RunResult) -> dict[str, list[str]]:
    """Group the segments that were not reused by reason, each with the agent that read it."""
    by_reason: dict[str, list[str]] = {}
    for one in result.results:
        for miss in one.completion.receipt.misses:
            name = "whole prompt" if miss.segment == "*" else miss.segment
            by_reason.setdefault(miss.reason, []).append(f"{name} of {one.agent}")
    return {reason: list(dict.fromkeys(segments)) for reason, segments in by_reason.items()}


def run_json(result: RunResult) -> dict[str, Any]:
    """Return a run as plain data."""
    return {
        "run": result.run_id,
        "answer": result.text,
        "total_ms": result.total_ms,
        "agents": [_agent_json(one) for one in result.results],
    }


def _agent_json(one: AgentResult) -> dict[str, Any]:
    done, receipt = one.completion, one.completion.receipt
    return {
        "agent": one.agent,
        "turn": one.turn,
        "text": one.text,
        "tool_result": one.tool_result,
        "finish_reason": done.finish_reason,
        "ttft_ms": done.ttft_ms,
        "total_ms": done.total_ms,
        "tokens": {"exact": receipt.exact, "translated": receipt.translated, "computed": receipt.computed},
        "spans": [asdict(span) for span in receipt.spans],
        "misses": [asdict(miss) for miss in receipt.misses],
        "parts_ms": dict(receipt.parts_ms),
    }
