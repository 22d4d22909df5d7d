"""`kedge bench plain`: what Kedge finds by itself in traffic whose clients say nothing about it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kedge.cli import bench_tables as tables
from kedge.cli.options import Json
from kedge.cli.preflight import require_file, require_outputs
from kedge.cli.results import save


def plain(
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Agent trace or Mooncake's, .jsonl or .gz; repeatable. Default: the slice."),
    ] = None,
    live: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1000, help="Live conversations; default 32, quick 8.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(metavar="N", min=10, help="Arrivals of each replay; default 6000, quick 800.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the order of conversations.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="8 live conversations, 800 requests.")] = False,
    json_file: Json = None,
) -> None:
    """Replay traces without ids: which requests are given to the session that they continue, and what that costs."""
    require_outputs(json_file)
    for file in trace or []:
        require_file("--trace", file)
    from kedge.bench.plain.measure import QUICK, PlainBenchSettings, measure
    from kedge.bench.sessions.cases import SLICE

    base = QUICK if quick else PlainBenchSettings()
    settings = replace(base, live=live or base.live, requests=requests or base.requests, seed=seed)
    console = Console()
    with console.status("reading") as status:
        data = measure(trace or [SLICE], settings, status.update).as_json()
    console.print(tables.links(data["links"]))
    cost = data["cost"]
    console.print(f"cost: {cost['us_per_request']:.0f} us per request, {cost['ns_per_token']:.0f} ns per token hashed")
    if json_file:
        save(console, json_file, {"settings": asdict(settings), **data})
