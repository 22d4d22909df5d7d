"""`kedge bench guard`: injected faults, clean traffic, and what the quality guard costs."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kedge.cli import bench_tables as tables
from kedge.cli.options import Device, Json
from kedge.cli.preflight import require_outputs
from kedge.cli.results import save

if TYPE_CHECKING:
    from kedge.bench.guard.measure import GuardResult


def guard(
    part: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="faults, clean, clean_default or overhead: what to measure; default: all; repeatable."
        ),
    ] = None,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A fault to inject; default: all; repeatable.")
    ] = None,
    task: Annotated[str, typer.Option(metavar="NAME", help="math, choice or code.")] = "code",
    learned: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Questions before a fault; default 24, quick 8.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Questions after a fault; default 50, quick 20.")
    ] = None,
    calls: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Calls without a fault; default 1000, quick 100.")
    ] = None,
    idle: Annotated[
        bool, typer.Option("--idle", help="Pause after every question until its checks are carried out.")
    ] = False,
    pairs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Windows with and without guard; default 3, quick 1.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="X", min=0.1, help="Seconds of each window; default 20, quick 4.")
    ] = None,
    clients: Annotated[int, typer.Option(metavar="N", min=1, help="Clients of clean and timed traffic.")] = 4,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the questions.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter: some minutes.")] = False,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Inject faults into translation, and measure how soon the guard stops them, its false alarms and its cost."""
    require_outputs(json_file)
    from kedge.bench.guard.measure import measure
    from kedge.bench.guard.settings import QUICK, GuardBenchSettings

    sizes: dict[str, Any] = {"learned": learned, "limit": limit, "calls": calls, "pairs": pairs, "seconds": seconds}
    given = {name: value for name, value in sizes.items() if value is not None}
    base = replace(QUICK if quick else GuardBenchSettings(), task=task, idle=idle, clients=clients, seed=seed)
    given |= {"parts": tuple(part)} if part else {}
    settings = replace(base, **given, faults=tuple(fault or ()), device=device or "auto")
    console = Console()
    with console.status("guard") as status:
        result = measure(settings, status.update)
    _show(console, result)
    if json_file:
        save(console, json_file, {"settings": asdict(settings), **result.as_json(), "evidence": result.evidence()})


def _show(console: Console, result: GuardResult) -> None:
    data = result.as_json()
    if result.faults:
        console.print(tables.guard(data["faults"], result.evidence()))
    for how, clean in (("anchors", result.clean), ("default", result.clean_default)):
        if clean:
            console.print(
                f"clean, {how}: {clean.calls} calls, {clean.translated} translated, {clean.checks} checked, "
                f"{clean.false_alarms} false alarms, {'switched off' if clean.ever_off else 'never switched off'}"
            )
    if result.overhead:
        shares = [f"{share:.1%}" if share is not None else "?" for share in data["overhead"].values()]
        console.print("with the guard: {} of throughput, {} of TTFT p50".format(*shares))
