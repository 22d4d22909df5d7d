"""`kedge demo`: the main job on the bundled model, dense and translated side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from kedge.bench.demo import Comparison, TeamScore


def demo(
    questions: Annotated[int, typer.Option(min=1, help="How many questions the team answers.")] = 100,
    task: Annotated[str, typer.Option(help="math, choice or code.")] = "math",
    estimators: Annotated[str, typer.Option(help="Estimators to run, separated by commas.")] = "token,interpolate",
    model: Annotated[Path | None, typer.Option(help="Folder of a model; default: the bundled one.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the questions.")] = 11,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this file (needs matplotlib).")] = Path(
        "kedge-demo.png"
    ),
) -> None:
    """Five agents answer questions with dense prefill and with translated KV; pools fill from empty."""
    console = Console()
    results = _run_all(console, questions, task, [name.strip() for name in estimators.split(",")], model, seed)
    for name, result in results.items():
        console.print(_table(name, result), _summary(name, result))
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
    from kedge.bench.demo import Comparison, answer, questions
    from kedge.config import AnchorSettings, EngineConfig, estimator_settings
    from kedge.engine.local.engine import LocalEngine
    from kedge.errors import ConfigError, TranslationRefused
    from kedge.types import ReuseMode
    from kedge.workloads.miniature import TASKS

    if task_name not in TASKS:
        raise ConfigError("task", task_name, f"is none of {', '.join(TASKS)}")
    task = TASKS[task_name]
    asked = questions(task, count, seed)
    results: dict[str, Comparison] = {}
    with _progress(console) as progress:
        dense = None
        for name in estimators:
            config = EngineConfig(model=model, anchors=AnchorSettings(**estimator_settings(name)))
            with LocalEngine(config=config) as engine:
                if engine.translation_refusal:
                    raise TranslationRefused("model", str(model), engine.translation_refusal)
                if dense is None:
                    dense = answer(engine, task, asked, ReuseMode.OFF, _step(progress, "dense prefill", count))
                step = _step(progress, f"translated, {name}", count)
                results[name] = Comparison(dense, answer(engine, task, asked, ReuseMode.TRANSLATE, step))
    return results


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console)


def _step(progress: Progress, what: str, count: int) -> Callable[[TeamScore], None]:
    bar = progress.add_task(what, total=count, note="")

    def advance(score: TeamScore) -> None:
        note = f"accuracy {score.accuracy:.0%}" + (f", reuse {score.reuse_rate:.0%}" if score.reuse_rate else "")
        progress.update(bar, advance=1, note=note)

    return advance


def _table(name: str, result: Comparison) -> Table:
    table = Table(title=f"translated with `{name}` against dense prefill")
    for column in ("agent", "TTFT dense ms", "p90", "TTFT translated ms", "p90", "speed-up", "reuse rate",
                   "exact / translated / computed", "accuracy dense", "translated"):  # fmt: skip
        table.add_column(column, justify="left" if column == "agent" else "right")
    for agent, dense in result.dense.agents.items():
        ours = result.translated.agents[agent]
        total = ours.exact + ours.translated + ours.computed
        shares = " / ".join(f"{n / total:.0%}" for n in (ours.exact, ours.translated, ours.computed))
        table.add_row(
            agent, f"{dense.ttft_median:.1f}", f"{dense.ttft_p90:.1f}", f"{ours.ttft_median:.1f}",
            f"{ours.ttft_p90:.1f}", f"{dense.ttft_median / ours.ttft_median:.2f}x", f"{ours.reuse_rate:.0%}", shares,
            f"{dense.accuracy:.1%}", f"{ours.accuracy:.1%}",
        )  # fmt: skip
    return table


def _summary(name: str, result: Comparison) -> str:
    return (
        f"{name}: final answer right {result.dense.accuracy:.1%} dense, {result.translated.accuracy:.1%} translated; "
        f"the same in {result.same_final_answer:.1%}; {result.translated.reuse_rate:.1%} of all calls translated\n"
    )
