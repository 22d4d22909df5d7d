"""`kedge bench plain`: what Kedge finds by itself in traffic whose clients say nothing about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kedge.cli import bench_tables as tables
from kedge.cli.options import Json
from kedge.cli.preflight import require_file, require_outputs
from kedge.cli.results import save


def plain(
    case: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="links, gain, teams; repeatable. Default: all.")
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="links: agent trace or Mooncake's, .jsonl or .gz. Default: the slice."),
    ] = None,
    live: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1000, help="links: live conversations; default 32, quick 8.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(metavar="N", min=10, help="links: arrivals of each replay; default 6000, quick 800.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="gain: trials of each lane; default 4, quick 2.")
    ] = None,
    questions: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="teams: questions of each team; default 50, quick 12.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of orders, prompts and questions.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Short replays, a tiny model, one team.")] = False,
    json_file: Json = None,
) -> None:
    """Serve sessions, workflows and teams whose clients say nothing: what is found, and what it gains."""
    require_outputs(json_file)
    for file in trace or []:
        require_file("--trace", file)
    from kedge.bench.plain.measure import QUICK, PlainBenchSettings, measure
    from kedge.bench.sessions.cases import SLICE

    base = QUICK if quick else PlainBenchSettings()
    settings = replace(
        base,
        cases=tuple(case or base.cases),
        live=live or base.live,
        requests=requests or base.requests,
        seed=seed,
        gain=replace(base.gain, trials=trials or base.gain.trials, seed=seed),
        teams=replace(base.teams, questions=questions or base.teams.questions, seed=seed),
    )
    console = Console()
    with console.status("reading") as status:
        data = measure(trace or [SLICE], settings, status.update).as_json()
    _show(console, data)
    if json_file:
        save(console, json_file, {"settings": asdict(settings), **data})


def _show(console: Console, data: Mapping[str, Any]) -> None:
    """Print a table for each case that was measured."""
    if "links" in data:
        cost = data["cost"]
        console.print(tables.links(data["links"]))
        console.print(
            f"cost: {cost['us_per_request']:.0f} us per request, {cost['ns_per_token']:.0f} ns per token hashed"
        )
    if "gain" in data:
        console.print(tables.plain_gain(data["gain"], data["agents"]))
    if "teams" in data:
        console.print(tables.plain_teams(data["teams"], data["agents"]))
