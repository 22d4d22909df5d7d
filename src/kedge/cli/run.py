"""`kedge run`: a user's own workflow on a model of their choice, with a receipt for every agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group

from kedge.cli import options
from kedge.cli.options import Config, Device, Model
from kedge.cli.output import save, table_of, terminal
from kedge.cli.preflight import require_file, require_model, require_parent
from kedge.errors import ConfigError, KedgeError, RequestError
from kedge.types import ReuseMode

if TYPE_CHECKING:
    from kedge.engine.base import Engine
    from kedge.guard import FidelityNote
    from kedge.runner.run import RunEvent, RunResult
    from kedge.settings import Settings
    from kedge.workflow.graph import Workflow


def run(
    flow: Annotated[Path, typer.Argument(metavar="FLOW", help="The workflow: a .yaml or .json file.")],
    inputs: Annotated[
        list[str] | None, typer.Option("--input", "-i", metavar="NAME=VALUE", help="An input; once for each.")
    ] = None,
    inputs_file: Annotated[
        Path | None,
        options.file("--inputs", help="Many questions: a .jsonl file with an object of inputs on each line."),
    ] = None,
    model: Model = None,
    reuse: Annotated[
        ReuseMode | None, typer.Option(metavar="MODE", help="off, exact or translate. Default: translate.")
    ] = None,
    device: Device = None,
    config: Config = None,
    json_file: Annotated[Path | None, options.file("--json", help="Write answers and receipts to this file.")] = None,
) -> None:
    """Run a workflow on one or many questions, and show answers and the sources of the prompts' tokens."""
    require_file("--inputs", inputs_file)
    require_parent("--json", json_file)
    values = parse_inputs(inputs or [])
    from kedge.runner.run import check_inputs
    from kedge.settings import Settings
    from kedge.workflow.spec import load_workflow

    settings = Settings.load(config, server={"reuse": reuse}, engine={"model": model, "device": device})
    workflow = load_workflow(flow)
    if inputs_file is None:
        check_inputs(workflow, values)
        asked: Sequence[Mapping[str, str]] = [values]
    else:
        asked = read_questions(inputs_file, values, workflow)
    _run(terminal(), settings, workflow, asked, json_file, is_single=inputs_file is None)


def _run(
    console: Console,
    settings: Settings,
    workflow: Workflow,
    asked: Sequence[Mapping[str, str]],
    json_file: Path | None,
    *,
    is_single: bool,
) -> None:
    """Run all questions on one engine, a single one with its events. If one of many fails, earlier answers are still
    shown and written.
    """
    from kedge.runner import run as running

    results: list[RunResult] = []
    show, reuse = partial(show_event, console), settings.server.reuse or ReuseMode.TRANSLATE
    with open_engine(settings) as engine:
        try:
            for number, inputs in enumerate(asked, 1):
                result = running.run(engine, workflow, inputs, reuse=reuse, on_event=show if is_single else None)
                results.append(result)
                if not is_single:
                    console.print(f"{number} of {len(asked)}, {sources([result])}: {result.text}")
                    engine.wait_idle()  # for what is compared in idle time: there is none between two questions
        except KedgeError as error:
            if not is_single:
                error.add_note(f"question {len(results) + 1} of {len(asked)}")
            raise
        finally:
            if results:
                console.print(receipts(results[-1], "" if is_single else " in the last question"))
                for reason, segments in misses_by_reason(results[-1]).items():
                    console.print(f"· {reason}: {', '.join(segments)}")
                if not is_single:
                    console.print(f"all questions: {sources(results)}")
                if json_file:
                    runs = [
                        {"inputs": dict(inputs), **run_json(one)} for inputs, one in zip(asked, results, strict=False)
                    ]
                    found = run_json(results[0]) if is_single else {"questions": runs}
                    save(console, json_file, {"workflow": workflow.name, "reuse": reuse, **found})


def sources(results: Sequence[RunResult]) -> str:
    """Return how many prompt tokens of all calls were translated, and how many computed."""
    calls = [one.completion.receipt for result in results for one in result.results]
    prompt, translated, computed = (
        sum(getattr(call, name) for call in calls) for name in ("prompt_tokens", "translated", "computed")
    )
    return f"{translated / prompt:.0%} of {prompt:,} prompt tokens translated, {computed / prompt:.0%} computed"


def open_engine(settings: Settings, **beside: Any) -> Engine:
    """Open the engine that the settings name; vLLM gets what is `beside` them.

    Raises `ConfigError` where vLLM is named and not installed, and `ModelNotFound`.
    """
    if settings.engine.backend == "vllm":
        from kedge.integrations.vllm.engine.engine import VLLMEngine

        return VLLMEngine(config=settings.engine, **beside)
    if settings.engine.vllm.model_fields_set:
        raise ConfigError("engine.vllm", settings.engine.vllm.model_dump(), "the engine is not vLLM (--engine vllm)")
    require_model(settings.engine.model)
    from kedge.engine.local.engine import LocalEngine

    return LocalEngine(config=settings.engine)


def parse_inputs(pairs: Sequence[str]) -> dict[str, str]:
    """Parse `NAME=VALUE` texts into a mapping. Raises `RequestError` for a text without a name, or a name given
    twice.
    """
    inputs: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise RequestError("--input", pair, "must be NAME=VALUE")
        if name in inputs:
            raise RequestError("--input", name, "duplicate: the input is given twice")
        inputs[name] = value
    return inputs


def read_questions(
    file: Path, common: Mapping[str, str], flow: Workflow, option: str = "--inputs"
) -> list[Mapping[str, str]]:
    """Read one run's inputs from every line of a JSONL file; `common` are the inputs that a line does not name itself,
    `option` is what the file was given as.

    Raises `ConfigError` for a file that has no line, and as `read_rows` does, and `RequestError` with the line's number
    for inputs that do not fit the workflow (also `MissingInput`).
    """
    from kedge.runner.run import check_inputs
    from kedge.workloads.base import read_rows

    def inputs(given: object) -> Mapping[str, str]:
        if not isinstance(given, dict):
            raise TypeError(given)
        check_inputs(flow, values := {**common, **given})
        return values

    if not (questions := read_rows(file, inputs, "a JSON object from input names to texts", option)):
        raise ConfigError(option, str(file), "has no line with inputs")
    return questions


def show_event(console: Console, event: RunEvent) -> None:
    """Print an event of a run as it happens."""
    name = f"{event.agent}" + (f", turn {event.turn}" if event.turn else "")
    if event.kind == "submitted":
        console.print(f"› {name}", style="dim")
    elif event.kind == "answered" and event.completion:
        took = f"  first token {event.completion.ttft_ms:.0f} ms, all {event.completion.total_ms:.0f} ms"
        console.print(f"✓ {name}{took}", style="bold")
        console.print(event.text)
    elif event.kind == "tool":
        console.print(f"⚙ {name}: {event.text}", style="cyan")


def receipts(result: RunResult, where: str = "") -> Group:
    """Return the table of the prompt tokens of every call by source, and of its agent's fidelity."""
    headings = ("agent", "turn", "prompt", "exact", "translated", "computed", "TTFT ms", "way", "KL a token")
    rows = []
    for one in result.results:
        receipt = one.completion.receipt
        counts = (one.turn, receipt.prompt_tokens, receipt.exact, receipt.translated, receipt.computed)
        rows.append([one.agent, *map(str, counts), f"{one.completion.ttft_ms:.1f}", *_fidelity(receipt.fidelity)])
    return table_of(f"where the prompt tokens came from{where}", headings, rows, left={"agent", "way"})


def _fidelity(note: FidelityNote | None) -> tuple[str, str]:
    """Return how an agent is translated, and its mean divergence, as measured."""
    if note is None or note.mean is None:
        return ("" if note is None else f"computed; {note.checks} compared"), ""
    return note.rung, f"{note.mean:.4f}"


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
        "agents": [
            {
                "agent": one.agent,
                "turn": one.turn,
                "text": one.text,
                "tool_result": one.tool_result,
                "finish_reason": one.completion.finish_reason,
                "ttft_ms": one.completion.ttft_ms,
                "total_ms": one.completion.total_ms,
                "tokens": {name: getattr(one.completion.receipt, name) for name in ("exact", "translated", "computed")},
                "spans": [asdict(span) for span in one.completion.receipt.spans],
                "misses": [asdict(miss) for miss in one.completion.receipt.misses],
                "fidelity": (note := one.completion.receipt.fidelity) and asdict(note),
                "parts_ms": dict(one.completion.receipt.parts_ms),
            }
            for one in result.results
        ],
    }
