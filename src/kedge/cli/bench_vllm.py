"""`kedge bench vllm`: what the plug-in gains over stock vLLM (KVFlow, figures 5, 6 and 8; KVCOMM, tables 2 and 3)."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kedge.cli.results import save

if TYPE_CHECKING:
    from kedge.bench.vllm.measure import VllmCase
    from kedge.bench.vllm.team import TeamResult

CASE_COLUMNS = ("engine", "s", "x stock", "hits", "waited for", "TTFT p50 ms", "p90", "tokens/s")
TEAM_COLUMNS = ("agent", "prompt", "translated", "dense ms", "stock ms", "Kedge ms", "x dense", "x stock")


def vllm(
    case: Annotated[
        list[str] | None,
        typer.Option(help="cycle, no-hints, no-pressure, flows, peer or team; repeatable. Default: all."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter prompts, three trials.")] = False,
    model_size: Annotated[str, typer.Option(help="32m, 100m or 8b: a Llama with random weights.")] = "32m",
    trials: Annotated[int | None, typer.Option(min=1, help="Of each engine in each case; default 5, quick 3.")] = None,
    load_ratio: Annotated[
        float, typer.Option(min=0.0, help="Seconds to load a fixed prompt over seconds to compute it.")
    ] = 0.43,
    samples: Annotated[
        int | None, typer.Option(min=2, help="team: samples in every pool before the measurement.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Stock vLLM with prefix caching against vLLM with Kedge's plug-in: hits, TTFT, end to end, tokens per second."""
    from kedge.bench.vllm.measure import CASES, VllmBenchSettings, measure
    from kedge.bench.vllm.team import QUICK_TEAM, TeamSettings
    from kedge.bench.workflow.cases import QUICK, CaseSizes

    team = QUICK_TEAM if quick else TeamSettings()
    settings = VllmBenchSettings(
        tuple(case or CASES),
        model_size,
        trials or (3 if quick else 5),
        load_ratio,
        QUICK if quick else CaseSizes(),
        replace(team, samples=samples or team.samples),
    )
    console = Console()
    with console.status("building the model") as status:
        result = measure(settings, status.update)
    for one in result.cases:
        console.print(_case_table(one))
        if not one.tokens_identical:
            console.print("the engines did not give the same tokens", style="red")
    if result.team:
        console.print(_team_table(result.team))
    if json_file:
        save(console, json_file, {"settings": asdict(settings), **result.as_json()})


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _case_table(case: VllmCase) -> Table:
    from kedge.bench.vllm.measure import STOCK

    table = _table(f"{case.name}: {case.workload.name}", CASE_COLUMNS)
    for name, row in case.as_json()["engines"].items():
        gain = f"{case.speedups(name)['median']:.2f}" if name != STOCK else ""
        table.add_row(name, f"{row['seconds']['median']:.2f}", gain, *_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    rates = [f"{row[key]:.3f}" for key in ("hit_rate", "waited_rate")]
    return [*rates, *(f"{row[key]:.1f}" for key in ("ttft_p50_ms", "ttft_p90_ms", "tokens_per_s"))]


def _team_table(team: TeamResult) -> Table:
    said = team.as_json()
    ends = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in said["seconds"].items())
    table = _table(f"team, {team.settings.samples} samples; a question end to end: {ends}", TEAM_COLUMNS)
    for row in said["agents"]:
        times = [f"{row[key]:.1f}" for key in ("dense_ms", "stock_ms", "kedge_ms")]
        gains = [f"{row[key]:.1f}" for key in ("speedup_over_dense", "speedup_over_stock")]
        table.add_row(str(row["agent"] + 1), str(row["prompt_tokens"]), str(row["translated_tokens"]), *times, *gains)
    return table
