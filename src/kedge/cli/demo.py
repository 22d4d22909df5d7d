"""`kedge demo`: the main job, dense and translated side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kedge.cli.options import Json, Model, Plot
from kedge.cli.preflight import require_model, require_outputs
from kedge.cli.tables import FittingTable
from kedge.errors import ConfigError
from kedge.models import bundled

if TYPE_CHECKING:
    from kedge.bench.demo import AgentScore, Comparison, TeamScore


TOY = (
    "The bundled model is a toy of 4.6 million parameters that knows these tasks alone: times tell something, answers "
    "nothing. A real model: kedge demo --model smollm2."
)
REAL = "How far answers are from dense prefill, beside KV in fp8: kedge bench fidelity."


def demo(
    questions: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="How many questions the team answers. Default 100, a real model 20."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A fifth of the questions, one estimator.")] = False,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="math, choice or code, the bundled models' tasks, default math; or reading or gsm8k, default reading.",
        ),
    ] = None,
    estimators: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Estimators to run, separated by commas. Default token, with a toy interpolate too."
        ),
    ] = None,
    model: Model = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the questions.")] = 11,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Run a team on many questions, with dense prefill and with translated KV; pools fill from empty."""
    require_model(model)
    require_outputs(json_file, plot)
    from kedge.bench.demo import DEMO_TASKS

    is_toy = model is None or bundled(model) is not None
    task = task or ("math" if is_toy else "reading")
    if task not in DEMO_TASKS:
        raise ConfigError("--task", task, f"must be one of {', '.join(DEMO_TASKS)}")
    questions = questions or (100 if is_toy else 20) // (5 if quick else 1)
    usual = "token" if quick or not is_toy else "token,interpolate"
    names = [name.strip() for name in (estimators or usual).split(",")]
    console = Console()
    results = _run_all(console, questions, task, names, model, seed)
    for name, result in results.items():
        console.print(score_table(name, result), _summary(name, result))
    console.print(TOY if is_toy else REAL, highlight=False)
    first, *others = results.items()
    if json_file:
        data = {**first[1].as_json(), "estimator": first[0], "task": task, "questions": questions, "seed": seed}
        data["others"] = {name: result.as_json() for name, result in others}
        json_file.write_text(json.dumps(data, indent=1) + "\n")
        console.print(f"results: {json_file}")
    if plot:
        from kedge.bench.plots import demo_plot

        demo_plot(results, plot)
        console.print(f"plot: {plot}")


def _run_all(
    console: Console, count: int, task_name: str, estimators: list[str], model: Path | None, seed: int
) -> dict[str, Comparison]:
    import torch

    from kedge.bench.demo import Comparison, answer, team
    from kedge.engine.local.engine import LocalEngine
    from kedge.errors import TranslationRefused
    from kedge.settings import AnchorSettings, EngineSettings, PlannerSettings, estimator_settings
    from kedge.types import ReuseMode

    if model is None or bundled(model):
        torch.set_num_threads(1)  # bundled models are too small for two: they would mostly wait for each other
    workload, asked = team(task_name, count, seed)
    results: dict[str, Comparison] = {}
    with progress_bars(console) as progress:
        dense = None
        for name in estimators:
            anchors = AnchorSettings(**estimator_settings(name))
            paper = anchors.criterion == "entropy"  # which has no other way than anchors
            planner = PlannerSettings(move="never") if paper else PlannerSettings()
            config = EngineSettings(model=model, anchors=anchors, planner=planner)
            with LocalEngine(config=config) as engine:
                if engine.translation_refusal:
                    raise TranslationRefused("model", str(model), engine.translation_refusal)
                if dense is None:
                    step = _step(progress, "dense prefill", count)
                    dense = answer(engine, workload, asked, ReuseMode.OFF, engine.wait_idle, step)
                step = _step(progress, f"translated, {name}", count)
                translated = answer(engine, workload, asked, ReuseMode.TRANSLATE, engine.wait_idle, step)
                results[name] = Comparison(dense, translated)
    return results


def progress_bars(console: Console) -> Progress:
    """Return progress bars that fit 80 columns with their notes."""
    columns = (TextColumn("{task.description}"), BarColumn(8), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console)


def _step(progress: Progress, what: str, count: int) -> Callable[[TeamScore], None]:
    bar = progress.add_task(what, total=count, note="")

    def advance(score: TeamScore) -> None:
        note = f"accuracy {_share(score.accuracy)}" + (f", reuse {score.reuse_rate:.0%}" if score.reuse_rate else "")
        progress.update(bar, advance=1, note=note)

    return advance


def score_table(name: str, result: Comparison) -> FittingTable:
    """Return the table of the agents' times, dense and translated; tokens are exact/translated/computed."""
    title = f"TTFT, median (p90), and accuracy: dense prefill | translated with `{name}`"
    headings = ("agent", "dense ms", "translated ms", "speed-up", "calls reused", "tokens %", "accuracy")
    pairs = [(dense, result.translated.agents[agent]) for agent, dense in result.dense.agents.items()]
    return FittingTable(title, headings, [_row(*pair) for pair in pairs], left=frozenset({"agent"}))


def _row(dense: AgentScore, ours: AgentScore) -> list[str]:
    counts = (ours.exact, ours.translated, ours.computed)
    return [
        dense.agent,
        _ttft(dense),
        _ttft(ours),
        f"{dense.ttft_median / ours.ttft_median:.2f}x",
        f"{ours.reuse_rate:.0%}",
        "/".join(f"{count / sum(counts) * 100:.0f}" for count in counts),
        f"{_share(dense.accuracy)} | {_share(ours.accuracy)}",
    ]


def _share(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{accuracy:.0%}"


def _ttft(score: AgentScore) -> str:
    return f"{score.ttft_median:.1f} ({score.ttft_p90:.0f})"


def _summary(name: str, result: Comparison) -> str:
    return (
        f"{name}: final answer right {_share(result.dense.accuracy)} dense, {_share(result.translated.accuracy)} "
        f"translated; the same in {result.same_final_answer:.1%}, readers' answers to the letter in "
        f"{result.same_answers:.1%}; {result.translated.reuse_rate:.1%} of all calls translated "
        "(tokens: exact/translated/computed)\n"
    )
