"""`kedge bench round`: several readers of one value in one round."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console

from kedge.cli import bench_tables as tables
from kedge.cli.options import Device, Json, ModelSize
from kedge.cli.preflight import require_outputs
from kedge.cli.results import save


def reading_round(
    quick: Annotated[bool, typer.Option("--quick", help="Smaller and fewer: less than a minute.")] = False,
    readers: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=1, help="Readers of one value; can be repeated. Default 1, 2, 4, quick 1, 2."),
    ] = None,
    model_size: ModelSize = "32m",
    value: Annotated[
        int | None, typer.Option(metavar="N", min=8, help="Tokens of the value. Default 512, quick 96.")
    ] = None,
    prefix: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens of every reader's prefix. Default 128, quick 32.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Values learned before. Default 20, quick 4.")
    ] = None,
    trials: Annotated[int | None, typer.Option(metavar="N", min=1, help="Default 10, quick 3.")] = None,
    estimator: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="moved (without anchors), token, interpolate, nearest, cosine, mean, linear or linear+token.",
        ),
    ] = "moved",
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Measure what several readers of one value take in the same round, against one: translating, and all."""
    require_outputs(json_file)
    from kedge.bench.ttft.round import QUICK, RoundSettings, as_json, measure

    given = {"value": value, "prefix": prefix, "samples": samples, "trials": trials, "device": device}
    known: dict[str, Any] = {name: one for name, one in given.items() if one is not None}
    base = replace(QUICK if quick else RoundSettings(), model_size=model_size, estimator=estimator)
    settings = replace(base, readers=tuple(readers or base.readers), **known)
    console = Console()
    with console.status("building the model") as status:
        rows = as_json(measure(settings, status.update))
    console.print(tables.reading_round(settings, rows))
    if json_file:
        save(console, json_file, {"settings": asdict(settings), "rounds": rows})
