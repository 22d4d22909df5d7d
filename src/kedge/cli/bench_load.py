"""`kedge bench load`: teams of agents under load, by reuse mode and number of clients."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kedge.cli import bench_tables as tables
from kedge.cli.options import Device, ModelSize
from kedge.cli.preflight import require_outputs
from kedge.cli.results import write
from kedge.errors import ConfigError
from kedge.types import ReuseMode

if TYPE_CHECKING:
    from kedge.bench.load.measure import Key, LoadSettings

QUICK_SECONDS, QUICK_CLIENTS = 10.0, (1, 8)
Leaves = dict[str, dict[str, dict[str, dict[str, Any]]]]
"""Case -> clients -> mode -> figures."""


def load(
    case: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="nano, SIZE or SIZE-long, SIZE that of --model-size; repeatable."),
    ] = None,
    clients: Annotated[
        list[int] | None, typer.Option(metavar="N", min=1, help="Default 1, 8 and 32, quick 1 and 8; repeatable.")
    ] = None,
    mode: Annotated[
        list[ReuseMode] | None,
        typer.Option(metavar="MODE", help="off, exact or translate. Default: all three; repeatable."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="X", min=0.1, help="Seconds of each run; default 120, quick 10.")
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="KV memory of each engine, such as 4GiB; default: the engine's.")
    ] = None,
    anchor_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of each engine's anchors; default: the engine's.")
    ] = None,
    base_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of each engine's base KV; default: the engine's.")
    ] = None,
    model_size: ModelSize = "32m",
    device: Device = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the questions.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Ten seconds per run, 1 and 8 clients.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results to this file, after each run.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the results in the --json file, and go on.")] = False,
) -> None:
    """Measure teams per minute, latencies and batch size with many clients, one reuse mode after the other."""
    require_outputs(json_file)
    from kedge.bench.load.measure import LoadSettings, Selection, measure
    from kedge.bench.load.teams import case_names

    memory = {"kv_memory": kv_memory, "anchor_memory": anchor_memory, "base_memory": base_memory}
    seconds = seconds or (QUICK_SECONDS if quick else 120.0)
    settings = LoadSettings(seconds, **memory, model_size=model_size, device=device or "auto", seed=seed)
    selection = Selection(
        tuple(case or case_names(model_size)),
        tuple(clients or (QUICK_CLIENTS if quick else Selection.clients)),
        tuple(mode or Selection.modes),
    )
    console, leaves = Console(), _saved(json_file, settings) if resume else {}
    with console.status("load") as status:
        for key, figures in measure(settings, selection, lambda key: _has(leaves, key), status.update):
            _put(leaves, key, figures)
            if json_file:
                write(json_file, {"settings": asdict(settings), "cases": leaves})
    for name in selection.cases:
        console.print(tables.load(name, settings.seconds, leaves[name]))
    if json_file:
        console.print(f"results: {json_file}")


def _has(leaves: Leaves, key: Key) -> bool:
    case, clients, mode = key
    return mode in leaves.get(case, {}).get(str(clients), {})


def _put(leaves: Leaves, key: Key, figures: dict[str, Any]) -> None:
    case, clients, mode = key
    leaves.setdefault(case, {}).setdefault(str(clients), {})[mode.value] = figures


def _saved(file: Path | None, settings: LoadSettings) -> Leaves:
    """Return the file's results. Raises `ConfigError` where it holds other results."""
    if file is None:
        raise ConfigError("resume", True, "needs --json, the file with earlier results")
    if not file.exists():
        return {}
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("json", str(file), f"is not valid JSON: {error}") from error
    if not isinstance(saved, dict) or saved.get("settings") != asdict(settings) or "cases" not in saved:
        raise ConfigError("json", str(file), "holds results of another benchmark or of other settings")
    return saved["cases"]
