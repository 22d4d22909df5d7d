"""`kedge run`: a person's own workflow on a model of theirs, with a receipt for every agent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kedge.errors import ConfigError, RequestError
from kedge.types import ReuseMode

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from kedge.engine.base import Engine
    from kedge.runner.results import AgentResult, RunEvent, RunResult
    from kedge.settings import Settings


def run(
    flow: Annotated[Path, typer.Argument(metavar="FLOW", help="The workflow: a .yaml or .json file.")],
    inputs: Annotated[
        list[str] | None, typer.Option("--input", "-i", metavar="NAME=VALUE", help="An input; once for each.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Folder of a model; default: the bundled one.")] = None,
    reuse: Annotated[ReuseMode | None, typer.Option(help="How far agents lean on shared KV.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings; default: kedge.toml, if there is one here.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write answers and receipts to this file.")] = None,
) -> None:
    """Run a workflow: every agent's answer, and where the tokens of its prompt came from."""
    from kedge.runner import run as running
    from kedge.settings import Settings
    from kedge.workflow.spec import load_workflow

    console = Console()
    values = parse_inputs(inputs or [])
    _require_folder(json_file)
    settings = Settings.load(config, reuse=reuse, engine={"model": model, "device": device})
    workflow = load_workflow(flow)
    with open_engine(settings) as engine:
        result = running.run(
            engine, workflow, values, reuse=settings.reuse, on_event=lambda event: _show(console, event)
        )
    console.print(_receipts(result))
    for reason, segments in misses_by_reason(result).items():
        console.print(f"· {reason}: {', '.join(segments)}", markup=False, highlight=False)
    if json_file:
        data = {"workflow": workflow.name, "reuse": settings.reuse, **as_json(result)}
        json_file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        console.print(f"results: {json_file}", markup=False)


def open_engine(settings: Settings) -> AbstractContextManager[Engine]:
    """The engine that the settings name; a test puts another one here. Raises `ConfigError` where it cannot be had."""
    if settings.engine.backend == "vllm":
        from kedge.integrations.vllm.engine.engine import VLLMEngine

        return VLLMEngine(config=settings.engine)
    if settings.engine.vllm.model_fields_set:
        raise ConfigError("engine.vllm", settings.engine.vllm.model_dump(), "the engine is not vLLM (--engine vllm)")
    from kedge.engine.local.engine import LocalEngine

    return LocalEngine(config=settings.engine)


def parse_inputs(pairs: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` texts as a mapping. Raises `RequestError` where one has no name or stands there twice."""
    inputs: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise RequestError("--input", pair, "is not NAME=VALUE")
        if name in inputs:
            raise RequestError("--input", name, "stands there twice")
        inputs[name] = value
    return inputs


def _require_folder(file: Path | None) -> None:
    """Before the work rather than after it."""
    if file and not file.parent.is_dir():
        raise ConfigError("--json", str(file), "its folder does not exist")


def _show(console: Console, event: RunEvent) -> None:
    name = f"{event.agent}" + (f", turn {event.turn}" if event.turn else "")
    if event.kind == "submitted":
        console.print(f"› {name}", style="dim", markup=False, highlight=False)
    elif event.kind == "answered" and event.completion:
        took = f"  first token {event.completion.ttft_ms:.0f} ms, all {event.completion.total_ms:.0f} ms"
        console.print(f"✓ {name}{took}", style="bold", markup=False, highlight=False)
        console.print(event.text, markup=False, highlight=False)
    elif event.kind == "tool":
        console.print(f"⚙ {name}: {event.text}", style="cyan", markup=False, highlight=False)


def _receipts(result: RunResult) -> Table:
    table = Table(title="where the prompt tokens came from")
    for column in ("agent", "turn", "prompt", "exact", "translated", "computed", "TTFT ms"):
        table.add_column(column, justify="left" if column == "agent" else "right")
    for one in result.results:
        receipt = one.completion.receipt
        numbers = (one.turn, receipt.prompt_tokens, receipt.exact, receipt.translated, receipt.computed)
        table.add_row(one.agent, *map(str, numbers), f"{one.completion.ttft_ms:.1f}")
    return table


def misses_by_reason(result: RunResult) -> dict[str, list[str]]:
    """Why segments did not come from somewhere better -> those segments, each with the agent that read it."""
    by_reason: dict[str, list[str]] = {}
    for one in result.results:
        for miss in one.completion.receipt.misses:
            name = "whole prompt" if miss.segment == "*" else miss.segment
            by_reason.setdefault(miss.reason, []).append(f"{name} of {one.agent}")
    return {reason: list(dict.fromkeys(segments)) for reason, segments in by_reason.items()}


def as_json(result: RunResult) -> dict[str, Any]:
    """A run as plain data."""
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
