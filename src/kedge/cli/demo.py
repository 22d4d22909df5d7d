"""`kedge demo`: the main job, dense and translated side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group

from kedge.cli import options
from kedge.cli.options import Json, Model
from kedge.cli.output import save, table_of, terminal
from kedge.cli.preflight import require_model, require_parent
from kedge.errors import ConfigError
from kedge.models import is_bundled

TOY = (
    "The bundled model is a toy of 4.6 million parameters that knows this task alone: times tell something, answers "
    "nothing. A real model: kedge demo --model smollm2."
)
REAL = "How far answers are from dense prefill, beside KV in fp8: kedge bench fidelity."


def demo(
    questions: Annotated[
        int | None, options.number(help="How many questions the team answers. Default 100, a real model 20.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="20 questions, a real model 12.")] = False,
    task: Annotated[
        str | None,
        options.name(help="math, the bundled model's; reading (the others'), gsm8k, reading-long or -sessions."),
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
    questions = questions or ((20 if quick else 100) if is_toy else (12 if quick else 20))
    console = terminal()
    result = _compare(console, questions, task, model, seed)
    console.print(score_table(result["agents"]), _summary(result))
    console.print(TOY if is_toy else f"{model} in {result['dtype']}. {REAL}")
    save(console, json_file, {**result, "task": task, "seed": seed})


def _compare(console: Console, count: int, task: str, model: Path | None, seed: int) -> dict[str, Any]:
    import torch

    from kedge.bench.demo import TeamScore, answer, compared, team
    from kedge.engine.local.engine import LocalEngine
    from kedge.errors import TranslationRefused
    from kedge.types import ReuseMode

    if is_bundled(model):
        torch.set_num_threads(1)  # the bundled model is too small for two: they would mostly wait for each other
    workload, asked = team(task, count, seed)
    with console.status("loading the model") as status, LocalEngine(model) as engine:
        if engine.translation_refusal:
            raise TranslationRefused("model", str(model), engine.translation_refusal)

        def answered(mode: ReuseMode, name: str) -> TeamScore:
            def note(score: TeamScore) -> None:
                status.update(f"{name}: {len(score.answered)} of {len(asked)} questions")

            return answer(engine, workload, asked, mode, note)

        both = answered(ReuseMode.OFF, "dense prefill"), answered(ReuseMode.TRANSLATE, "translated")
        return {**compared(*both), "questions": len(asked), "dtype": engine.inspect()["dtype"]}


def score_table(agents: Sequence[Mapping[str, Any]]) -> Group:
    """Return the table of the agents' times, dense and translated; tokens are exact/translated/computed."""
    title = "TTFT, median (p90), and accuracy: dense prefill | translated"
    headings = ("agent", "dense ms", "translated ms", "speed-up", "calls reused", "tokens %", "accuracy")
    return table_of(title, headings, [_row(one) for one in agents], left={"agent"})


def _row(one: Mapping[str, Any]) -> list[str]:
    dense, ours = (one[f"ttft_{mode}_ms"] for mode in ("dense", "translated"))
    counts = one["tokens"].values()
    return [
        one["agent"],
        f"{dense:.1f} ({one['ttft_dense_p90_ms']:.0f})",
        f"{ours:.1f} ({one['ttft_translated_p90_ms']:.0f})",
        f"{dense / ours:.2f}x" if one["reuse_rate"] else "-",
        f"{one['reuse_rate']:.0%}",
        "/".join(f"{count / sum(counts) * 100:.0f}" for count in counts),
        " | ".join(_accuracies(one)),
    ]


def _accuracies(one: Mapping[str, Any]) -> list[str]:
    return ["-" if (right := one[f"accuracy_{mode}"]) is None else f"{right:.0%}" for mode in ("dense", "translated")]


def _summary(result: Mapping[str, Any]) -> str:
    dense, translated = _accuracies(result)
    return (
        f"final answer right {dense} dense, {translated} translated; the same in {result['same_final_answer']:.1%}, "
        f"readers' answers to the letter in {result['same_answers']:.1%}; {result['reuse_rate']:.1%} of all calls "
        "translated (tokens: exact/translated/computed)\n"
    )
