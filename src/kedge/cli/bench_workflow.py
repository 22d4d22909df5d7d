"""`kedge bench workflow`: what workflow-aware caching gains over LRU on a real model (KVFlow, figures 5, 6 and 8)."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import typer
from rich.console import Console

from kedge.cli import bench_tables as tables
from kedge.cli.options import Device, Json, ModelSize, Plot
from kedge.cli.preflight import require_outputs
from kedge.cli.results import save
from kedge.errors import ConfigError


def workflow(
    figure: Annotated[
        int, typer.Option(metavar="N", help="5: one cycle of agents. 6: many workflows at once. 8: PEER teams.")
    ] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="One case, shorter prompts, three seeds.")] = False,
    model_size: ModelSize = "32m",
    seeds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Trials of every policy; default 10, quick 3.")
    ] = None,
    load_ratio: Annotated[
        float, typer.Option(metavar="X", min=0.0, help="Seconds to load a fixed prompt over seconds to compute it.")
    ] = 0.43,
    room: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=2, max=10, help="Figure 5: of how many of the ten agents; repeatable."),
    ] = None,
    flows: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=1, help="Figure 6: only its cases of so many workflows; repeatable."),
    ] = None,
    fixed: Annotated[int | None, typer.Option(metavar="N", min=16, help="Figure 5: tokens of a fixed prompt.")] = None,
    output: Annotated[int | None, typer.Option(metavar="N", min=1, help="Figure 5: tokens of an answer.")] = None,
    controls: Annotated[
        bool, typer.Option("--controls", help="Also figure 5 without pressure, with bad hints and so on.")
    ] = False,
    device: Device = None,
    json_file: Json = None,
    plot_file: Plot = None,
) -> None:
    """Compare eviction policies on one engine: latency, hits, loads and stalls (KVFlow, figures 5, 6, 8)."""
    require_outputs(json_file, plot_file)
    from kedge.bench.plots import workflow_plot
    from kedge.bench.workflow.cases import QUICK, CaseSizes
    from kedge.bench.workflow.measure import WorkflowSettings, measure

    shape = QUICK if quick else CaseSizes()
    sizes = replace(shape.sizes, fixed=fixed or shape.sizes.fixed, output=output or shape.sizes.output)
    chosen = tuple(case for case in shape.flows if not flows or case[1] in flows)
    if not chosen:
        raise ConfigError("flows", flows, f"the cases have {', '.join(str(many) for _, many in shape.flows)} workflows")
    shape = replace(shape, sizes=sizes, rooms=tuple(room or shape.rooms), flows=chosen)
    settings = WorkflowSettings(
        figure, model_size, seeds or (3 if quick else 10), load_ratio, shape, controls, device=device or "auto"
    )
    console = Console()
    with console.status("building the model") as status:
        result = measure(settings, status.update)
    for case in (*result.cases, *result.controls.values()):
        console.print(tables.workflow(case.as_json()))
    if not all(case.tokens_identical for case in (*result.cases, *result.controls.values())):
        console.print("the policies did not all give the same tokens", style="red")
    if json_file:
        save(console, json_file, {"settings": asdict(settings), **result.as_json()})
    if plot_file:
        workflow_plot({case.workload.name: case.speedups() for case in result.cases}, plot_file)
        console.print(f"picture: {plot_file}")
