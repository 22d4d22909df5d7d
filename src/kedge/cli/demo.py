"""`kedge demo`: the main job, dense and translated side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kedge.cli.options import Json, Model
from kedge.cli.preflight import require_model, require_parent
from kedge.cli.results import save
from kedge.cli.tables import table_of
from kedge.errors import ConfigError
from kedge.models import is_bundled

if TYPE_CHECKING:
    from kedge.bench.demo import AgentScore, Comparison, TeamScore


TOY = (
    "The bundled model is a toy of 4.6 million parameters that knows this task alone: times tell something, answers "
    "nothing. A real model: kedge demo --model smollm2."
)
REAL = "How far answers are from dense prefill, beside KV in fp8: kedge bench fidelity."


def demo(
    questions: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="How many questions the team answers. Default 100, a real model 20."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A fifth of the questions.")] = False,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="math, the bundled model's and its default; or reading or gsm8k, default reading.",
        ),
    ] = None,
    model: Model = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the questions.")] = 11,
    json_file: Json = None,
) -> None:
    """Run a team on many questions, with dense prefill and with translated KV; pools fill from empty."""
    require_model(model)
    require_parent("--json", json_file)
    from kedge.bench.demo import DEMO_TASKS

    is_toy = is_bundled(model)
    task = task or ("math" if is_toy else "reading")
    if task not in DEMO_TASKS:
        raise ConfigError("--task", task, f"must be one of {', '.join(DEMO_TASKS)}")
    questions = questions or (100 if is_toy else 20) // (5 if quick else 1)
    console = Console()
    result = _compare(console, questions, task, model, seed)
    console.print(score_table(result), _summary(result))
    console.print(TOY if is_toy else REAL, highlight=False)
    if json_file:
        data = {**result.as_json(), "task": task, "questions": questions, "seed": seed}
        save(console, json_file, data)


def _compare(console: Console, count: int, task: str, model: Path | None, seed: int) -> Comparison:
    import torch

    from kedge.bench.demo import Comparison, answer, team
    from kedge.engine.local.engine import LocalEngine
    from kedge.errors import TranslationRefused
    from kedge.types import ReuseMode

    if is_bundled(model):
        torch.set_num_threads(1)  # the bundled model is too small for two: they would mostly wait for each other
    workload, asked = team(task, count, seed)
    with progress_bar(console) as progress, LocalEngine(model) as engine:
        if engine.translation_refusal:
            raise TranslationRefused("model", str(model), engine.translation_refusal)
        dense, translated = (
            answer(engine, workload, asked, mode, engine.wait_idle, _step(progress, name, count))
            for mode, name in ((ReuseMode.OFF, "dense prefill"), (ReuseMode.TRANSLATE, "translated"))
        )
    return Comparison(dense, translated)


def progress_bar(console: Console, width: int = 8) -> Progress:
    """Return a progress bar that fits 80 columns with its note."""
    columns = (TextColumn("{task.description}"), BarColumn(width), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console)


def _step(progress: Progress, what: str, count: int) -> Callable[[TeamScore], None]:
    bar = progress.add_task(what, total=count, note="")

    def advance(score: TeamScore) -> None:
        note = f"accuracy {_share(score.accuracy)}" + (f", reuse {score.reuse_rate:.0%}" if score.reuse_rate else "")
        progress.update(bar, advance=1, note=note)

    return advance


def score_table(result: Comparison) -> Group:
    """Return the table of the agents' times, dense and translated; tokens are exact/translated/computed."""
    title = "TTFT, median (p90), and accuracy: dense prefill | translated"
    headings = ("agent", "dense ms", "translated ms", "speed-up", "calls reused", "tokens %", "accuracy")
    pairs = [(dense, result.translated.agents[agent]) for agent, dense in result.dense.agents.items()]
    return table_of(title, headings, [_row(*pair) for pair in pairs], left={"agent"})


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


def _summary(result: Comparison) -> str:
    return (
        f"final answer right {_share(result.dense.accuracy)} dense, {_share(result.translated.accuracy)} "
        f"translated; the same in {result.same_final_answer:.1%}, readers' answers to the letter in "
        f"{result.same_answers:.1%}; {result.translated.reuse_rate:.1%} of all calls translated "
        "(tokens: exact/translated/computed)\n"
    )
