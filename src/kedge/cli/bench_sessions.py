"""`kedge bench sessions`: caching of sessions that grow, pause and come back, on traces of real agents."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kedge.cli import bench_tables as tables
from kedge.cli.options import Json, Plot
from kedge.cli.preflight import require_file, require_outputs
from kedge.cli.results import save


def sessions(
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Agent trace or Mooncake's, .jsonl or .gz; repeatable. Default: the slice."),
    ] = None,
    live: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", min=1, max=1000, help="Live conversations; default 8, 16, 32 and 48, quick 8; repeatable."
        ),
    ] = None,
    capacity: Annotated[
        list[float] | None,
        typer.Option(metavar="X", min=0.001, max=10, help="Cache over working set; default 0.05 to 1; repeatable."),
    ] = None,
    cap: Annotated[
        float, typer.Option(metavar="X", min=0.0, help="Seconds at which the gaps between requests are cut.")
    ] = 3600.0,
    requests: Annotated[
        int | None, typer.Option(metavar="N", min=10, help="Arrivals of each replay; default 6000, quick 800.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the order of conversations.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="8 live conversations, three capacities.")] = False,
    json_file: Json = None,
    plot_file: Plot = None,
) -> None:
    """Replay traces of agents in virtual time: hit rates of Kedge, LRU, TTL and Belady, and what the policy costs."""
    require_outputs(json_file, plot_file)
    for file in trace or []:
        require_file("--trace", file)
    from kedge.bench.plots import sessions_plot
    from kedge.bench.sessions.cases import QUICK, SLICE, SessionBenchSettings, load_traces
    from kedge.bench.sessions.closed import ClosedSettings, closed_loop
    from kedge.bench.sessions.measure import measure

    base = QUICK if quick else SessionBenchSettings()
    sizes = replace(base, live=tuple(live or base.live), capacities=tuple(capacity or base.capacities))
    settings = replace(sizes, cap=cap, requests=requests or base.requests, seed=seed)
    console = Console()
    with console.status("reading") as status:
        closed = partial(closed_loop, settings.live, ClosedSettings(seed=seed))
        result = measure(settings, load_traces(trace or [SLICE]), closed, status.update)
    data = result.as_json()
    for table in tables.sessions(data):
        console.print(table)
    console.print(tables.session_cost(data["cost"]), highlight=False)
    if json_file:
        save(console, json_file, {"settings": asdict(settings), **data})
    if plot_file:
        sessions_plot(data["traces"], plot_file)
        console.print(f"picture: {plot_file}")
