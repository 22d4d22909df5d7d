"""The commands of the benchmarks: `kedge bench ttft`, `workflow`, `guard` and `accuracy`."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import tables
from kedge.bench.flows import with_given
from kedge.cli import options
from kedge.cli.options import Device, ModelSize, RealModel
from kedge.cli.output import save
from kedge.cli.preflight import require_model, require_parent
from kedge.errors import ConfigError

benchmarks = typer.Typer()


@benchmarks.command()
def ttft(
    quick: Annotated[bool, typer.Option("--quick", help="Smaller and fewer: about a minute.")] = False,
    model_size: ModelSize = "32m",
    question: Annotated[
        int | None, options.number(min=8, help="Tokens of the question. Default 1000, quick 200.")
    ] = None,
    prefix: Annotated[
        int | None, options.number(help="Tokens of every agent's own prefix. Default 512, quick 128.")
    ] = None,
    output: Annotated[
        int | None, options.number(min=8, help="Tokens of every agent's answer. Default 512, quick 64.")
    ] = None,
    agents: Annotated[int | None, options.number(help="Default 5, quick 3.")] = None,
    samples: Annotated[
        int | None, options.number(min=2, help="In every pool before the measurement. Default 20, quick 4.")
    ] = None,
    repeats: Annotated[int | None, options.number(help="Repeats of every measurement. Default 3, quick 1.")] = None,
    estimator: Annotated[
        str,
        options.name(help="token, interpolate, or moved: without anchors."),
    ] = "token",
    device: Device = None,
    json_file: options.Json = None,
) -> None:
    """Measure the TTFT of every agent, dense and translated, on one engine (KVCOMM, tables 2 and 3)."""
    require_parent("--json", json_file)
    from benchmarks.ttft import QUICK, TtftSettings, measure

    sizes = {"question": question, "prefix": prefix, "output": output, "agents": agents, "samples": samples}
    base = replace(QUICK if quick else TtftSettings(), model_size=model_size, estimator=estimator)
    settings = with_given(base, **sizes, repeats=repeats, device=device)
    console = Console()
    with console.status("building the model") as status:
        data = measure(settings, status.update)
    console.print(tables.ttft(settings, data))
    for line in tables.ttft_parts(data):
        console.print(line, highlight=False)
    console.print(
        f"floor: the bytes that must move, at the {data['bandwidth_gb_per_s']:.1f} GB/s of a copy on this device"
    )
    console.print(f"anchors weigh {data['memory_ratio']:.2f} times the KV of the messages they are of")
    save(console, json_file, {"settings": asdict(settings), **data})


@benchmarks.command()
def workflow(
    figure: Annotated[
        int, typer.Option(metavar="N", help="5: one cycle of agents. 6: many workflows at once. 8: PEER teams.")
    ] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="One case, shorter prompts, three seeds.")] = False,
    model_size: ModelSize = "32m",
    seeds: Annotated[int | None, options.number(help="Trials of every policy; default 10, quick 3.")] = None,
    load_ratio: Annotated[
        float, options.real(min=0.0, help="Seconds to load a fixed prompt over seconds to compute it.")
    ] = 0.43,
    room: Annotated[
        list[int] | None, options.number(min=2, max=10, help="Figure 5: of how many of the ten agents; repeatable.")
    ] = None,
    flows: Annotated[
        list[int] | None, options.number(help="Figure 6: only its cases of so many workflows; repeatable.")
    ] = None,
    fixed: Annotated[int | None, options.number(min=16, help="Figure 5: tokens of a fixed prompt.")] = None,
    output: Annotated[int | None, options.number(help="Figure 5: tokens of an answer.")] = None,
    controls: Annotated[
        bool, typer.Option("--controls", help="Also figure 5 without pressure, with bad hints and so on.")
    ] = False,
    device: Device = None,
    json_file: options.Json = None,
) -> None:
    """Compare eviction policies on one engine: latency, hits, loads and stalls (KVFlow, figures 5, 6, 8)."""
    require_parent("--json", json_file)
    from benchmarks.workflow.measure import QUICK, CaseSizes, WorkflowSettings, measure

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
    save(console, json_file, {"settings": asdict(settings), **result.as_json()})


@benchmarks.command()
def guard(
    part: Annotated[
        list[str] | None, options.name(help="faults or clean: what to measure; default: both; repeatable.")
    ] = None,
    fault: Annotated[list[str] | None, options.name(help="A fault to inject; default: all; repeatable.")] = None,
    model: RealModel = Path("smollm2"),
    task: Annotated[str, options.name(help="reading, reading-long or gsm8k.")] = "reading",
    learned: Annotated[int | None, options.number(help="Questions before a fault; default 24, quick 8.")] = None,
    limit: Annotated[int | None, options.number(help="Questions after a fault; default 50, quick 20.")] = None,
    calls: Annotated[int | None, options.number(help="Calls without a fault; default 1000, quick 100.")] = None,
    idle: Annotated[
        bool, typer.Option("--idle", help="Pause after every question until its checks are carried out.")
    ] = False,
    clients: Annotated[int, options.number(help="Clients of clean traffic.")] = 4,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the questions.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter: some minutes.")] = False,
    device: Device = None,
    json_file: options.Json = None,
) -> None:
    """Inject faults into translation, and measure how soon the guard stops them, and its false alarms."""
    require_model(model)
    require_parent("--json", json_file)
    from benchmarks.guard import QUICK, GuardBenchSettings, measure

    start = replace(QUICK if quick else GuardBenchSettings(), model=model, task=task, faults=tuple(fault or ()))
    base = replace(start, idle=idle, clients=clients, seed=seed)
    sizes: dict[str, Any] = {"learned": learned, "limit": limit, "calls": calls, "device": device}
    settings = with_given(base, **sizes, parts=tuple(part) if part else None)
    console = Console()
    with console.status("guard") as status:
        data = measure(settings, status.update)
    if "faults" in data:
        console.print(tables.guard(data["faults"]))
    if clean := data.get("clean"):
        counts = "clean: {calls} calls, {translated} translated, {checks} checked, {false_alarms} false alarms"
        console.print(f"{counts.format(**clean)}, {'' if clean['ever_off'] else 'never '}switched off")
    save(console, json_file, {"settings": {**asdict(settings), "model": model.name}, **data})


@benchmarks.command()
def accuracy(
    model: RealModel = Path("smollm2"),
    task: Annotated[str, options.name(help="reading, reading-long, gsm8k, or math, the bundled model's.")] = "reading",
    agents: Annotated[int | None, options.number(min=2, help="Of the team; default: all.")] = None,
    questions: Annotated[int | None, options.number(help="Default 50, quick 4.")] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="NAMES", help="By commas; default epic,kvcomm,token,kedge,served.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the order of the questions.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="4 questions.")] = False,
    json_file: options.Json = None,
) -> None:
    """Let a team answer by itself, densely and by each method: right answers, cost, speed (KVCOMM, Table 1)."""
    require_model(model)
    require_parent("--json", json_file)
    from benchmarks.accuracy import AccuracySettings, measure

    base = AccuracySettings(model, task, agents, 4 if quick else 50, seed=seed)
    settings = with_given(base, questions=questions, methods=tuple(methods.split(",")) if methods else None)
    console = Console()
    with console.status("accuracy") as status:
        rows = measure(settings, status.update)
    console.print(tables.accuracy(settings.task, rows))
    save(console, json_file, {"settings": {**asdict(settings), "model": model.name}, "rows": rows})
