"""`kedge bench …`: measurements as commands, each against a baseline in the same run."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kedge.cli.bench_lab import add_to
from kedge.cli.bench_load import load
from kedge.cli.bench_vllm import vllm
from kedge.cli.bench_workflow import workflow
from kedge.cli.results import save

if TYPE_CHECKING:
    from kedge.bench.ttft.measure import TtftResult, TtftSettings
    from kedge.bench.workflow.cache import OperationTimes

TTFT_COLUMNS = (
    "agent", "prompt", "generate ms", "dense ms", "Kedge ms", "speed-up", "floor ms", "x floor",
    "parts of 1 ms and more",
)  # fmt: skip
bench = typer.Typer(no_args_is_help=True, help="Measurements, each against a baseline in the same run.")
bench.command()(workflow)
bench.command()(load)
add_to(bench)
bench.command()(vllm)


@bench.command()
def ttft(
    model_size: Annotated[str, typer.Option(help="32m, 100m or 8b: a Llama of that size with random weights.")] = "32m",
    question: Annotated[int, typer.Option(min=8, help="Tokens of the question.")] = 1000,
    prefix: Annotated[int, typer.Option(min=1, help="Tokens of every agent's own prefix.")] = 512,
    output: Annotated[int, typer.Option(min=8, help="Tokens of every agent's answer.")] = 512,
    agents: Annotated[int, typer.Option(min=1)] = 5,
    samples: Annotated[int, typer.Option(min=2, help="Samples in every pool before the measurement.")] = 20,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    estimator: Annotated[str, typer.Option(help="A name of `kedge.anchors.registry.ESTIMATORS`.")] = "token",
    recompute_head: Annotated[int | None, typer.Option(min=0, help="Default: the engine's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """TTFT of every agent, dense and translated on one engine (KVCOMM, tables 2 and 3)."""
    from kedge.bench.ttft.measure import TtftSettings, measure

    settings = TtftSettings(
        model_size, question, prefix, output, agents, samples, repeats, estimator, recompute_head, device
    )
    console = Console()
    with console.status("building the model") as status:
        result = measure(settings, status.update)
    console.print(_table(settings, result))
    console.print(f"floor: the bytes that must move, at the {result.bandwidth / 1e9:.1f} GB/s of a copy on this device")
    console.print(f"anchors weigh {result.memory_ratio:.2f} times the KV of the messages they are of")
    if json_file:
        save(console, json_file, {"settings": asdict(settings), **result.as_json()})


@bench.command()
def preassembly(
    model_size: Annotated[str, typer.Option(help="32m, 100m or 8b: a Llama of that size with random weights.")] = "32m",
    samples: Annotated[int, typer.Option(min=2, help="Samples in every pool before the measurement.")] = 20,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    output: Annotated[int, typer.Option(min=8, help="Tokens of every agent's answer.")] = 512,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """TTFT of the next agent without a hint, with one, and with its prompt assembled before the request arrives."""
    from kedge.bench.ttft.measure import TtftSettings
    from kedge.bench.ttft.preassembly import measure

    settings = TtftSettings(model_size, output=output, samples=samples, repeats=repeats, device=device)
    console = Console()
    with console.status("building the model") as status:
        rows = [times.as_json() for times in measure(settings, status.update)]
    table = Table(title=f"TTFT, {model_size}, ms; the last column: TTFT of a prompt that was ready over a decode step")
    for column in ("agent", "prompt", "ready", "no hint", "at once", "ahead", "step", "ahead / step"):
        table.add_column(column, justify="right")
    for row in rows:
        counted = (str(row["agent"] + 1), str(row["prompt_tokens"]), str(row["preassembled"]))
        times = (f"{row[f'{name}_ms']:.1f}" for name in ("no_hint", "at_once", "ahead", "step"))
        table.add_row(*counted, *times, f"{row['steps']:.2f}")
    console.print(table)
    if json_file:
        save(console, json_file, {"settings": asdict(settings), "agents": rows})


@bench.command("matching-cost")
def matching_cost(
    model_size: Annotated[str, typer.Option(help="32m, 100m or 8b: the shape of the KV.")] = "32m",
    samples: Annotated[int, typer.Option(min=2, help="Samples in the pool.")] = 20,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of every sample and of the value.")] = 500,
    repeats: Annotated[int, typer.Option(min=1)] = 20,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Time to match a value with its pool and to blend its offsets, by estimator (KVCOMM, Table A.5)."""
    from kedge.bench.ttft.matching_cost import MatchingSettings, measure

    settings = MatchingSettings(model_size, samples, tokens, repeats)
    results = measure(settings)
    table = Table(title=f"matching cost, {model_size}, {samples} samples of {tokens} tokens, ms")
    for column in ("estimator", "match", "blend", "both", "both, p90"):
        table.add_column(column, justify="right")
    for name, row in results.items():
        table.add_row(name, *(f"{ms:.2f}" for ms in row.values()))
    console = Console()
    console.print(table)
    if json_file:
        save(console, json_file, {"settings": asdict(settings), "estimators": results})


@bench.command()
def soak(
    questions: Annotated[int, typer.Option(min=1, help="New questions, one after the other.")] = 2000,
    every: Annotated[int, typer.Option(min=1, help="Questions between two looks.")] = 200,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Whether anything grows with the number of past messages (a tiny model, new questions only)."""
    from kedge.bench.load.soak import SoakSettings
    from kedge.bench.load.soak import soak as run_soak

    console = Console()
    looks = run_soak(SoakSettings(questions=questions, every=every), console.print)
    if json_file:
        save(console, json_file, {"looks": looks})


@bench.command()
def cache(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes only.")] = False,
    repeats: Annotated[int | None, typer.Option(min=2, help="Measurements of each operation.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """The cache's policy alone, no model: 10^3 to 10^6 blocks, 10 to 10^4 agents, and how the times grow (KVFlow)."""
    from kedge.bench.workflow.cache import QUICK, CacheSettings, growth, measure

    settings = QUICK if quick else CacheSettings()
    settings = replace(settings, repeats=repeats or settings.repeats)
    console = Console()
    with console.status("filling the cache") as status:
        result = measure(settings, status.update)
    for name, times in (("blocks", result.blocks), ("agents", result.agents)):
        console.print(_cache_table(name, times, growth(times)))
    if json_file:
        save(console, json_file, {"settings": asdict(settings), **result.as_json()})


def _cache_table(name: str, times: list[OperationTimes], growth: dict[str, dict[str, float]]) -> Table:
    table = Table(title=f"microseconds by number of {name}; match and insert of 4,096 tokens", min_width=80)
    for column in ("operation", *(f"{one.size:,}" for one in times), "~ size^", "of log"):
        table.add_column(column, justify="right")
    for operation, fit in growth.items():
        cells = [f"{one.micros[operation]:.1f}" for one in times]
        table.add_row(operation, *cells, f"{fit['exponent']:.2f}", f"{fit['to_log']:.2f}")
    return table


def _table(settings: TtftSettings, result: TtftResult) -> Table:
    title = f"TTFT, {settings.model_size}, {settings.estimator}, {settings.samples} samples, {settings.repeats} repeats"
    table = Table(title=title)
    for column in TTFT_COLUMNS:
        table.add_column(column, justify="right")
    for row in result.as_json()["agents"]:
        parts = ", ".join(f"{name} {ms:.1f}" for name, ms in row["parts_ms"].items() if ms >= 1)
        measured = (f"{row[key]:.1f}" for key in ("generate_ms", "dense_ms", "translated_ms"))
        floor = ("", "") if row["floor_ms"] is None else (f"{row['floor_ms']:.1f}", f"{row['times_floor']:.1f}")
        speedup = f"{row['speedup']:.1f}x"
        table.add_row(str(row["agent"] + 1), str(row["prompt_tokens"]), *measured, speedup, *floor, parts)
    return table
