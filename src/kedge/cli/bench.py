"""`kedge bench …`: measurements as commands, each against a baseline in the same run."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kedge.cli import bench_tables as tables
from kedge.cli.bench_guard import guard
from kedge.cli.bench_lab import add_to
from kedge.cli.bench_load import load
from kedge.cli.bench_plain import plain
from kedge.cli.bench_round import reading_round
from kedge.cli.bench_sessions import sessions
from kedge.cli.bench_vllm import vllm
from kedge.cli.bench_workflow import workflow
from kedge.cli.options import Device, Json, ModelSize
from kedge.cli.preflight import require_outputs
from kedge.cli.results import save

if TYPE_CHECKING:
    from kedge.bench.ttft.measure import TtftSettings

Quick = Annotated[bool, typer.Option("--quick", help="Smaller and fewer: about a minute.")]
Samples = Annotated[
    int | None, typer.Option(metavar="N", min=2, help="In every pool before the measurement. Default 20, quick 4.")
]
Repeats = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Repeats of every measurement. Default 3, quick 1.")
]
Output = Annotated[
    int | None, typer.Option(metavar="N", min=8, help="Tokens of every agent's answer. Default 512, quick 64.")
]
bench = typer.Typer(no_args_is_help=True, help="Measurements, each against a baseline in the same run.")
bench.command()(workflow)
bench.command()(load)
add_to(bench)
bench.command()(vllm)
bench.command()(sessions)
bench.command()(plain)
bench.command()(guard)
bench.command("round")(reading_round)


@bench.command()
def ttft(
    quick: Quick = False,
    model_size: ModelSize = "32m",
    question: Annotated[
        int | None, typer.Option(metavar="N", min=8, help="Tokens of the question. Default 1000, quick 200.")
    ] = None,
    prefix: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens of every agent's own prefix. Default 512, quick 128.")
    ] = None,
    output: Output = None,
    agents: Annotated[int | None, typer.Option(metavar="N", min=1, help="Default 5, quick 3.")] = None,
    samples: Samples = None,
    repeats: Repeats = None,
    estimator: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="token, interpolate, nearest, cosine, mean, linear, linear+token, or moved: without anchors.",
        ),
    ] = "token",
    recompute_head: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="First tokens that are recomputed. Default: the engine's.")
    ] = None,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Measure the TTFT of every agent, dense and translated, on one engine (KVCOMM, tables 2 and 3)."""
    require_outputs(json_file)
    from kedge.bench.ttft.measure import measure

    sizes = {"question": question, "prefix": prefix, "output": output, "agents": agents}
    repeated = {"samples": samples, "repeats": repeats, "recompute_head": recompute_head}
    settings = _ttft_settings(quick, model_size, device, **sizes, **repeated, estimator=estimator)
    console = Console()
    with console.status("building the model") as status:
        result = measure(settings, status.update)
    data = result.as_json()
    console.print(tables.ttft(settings, data))
    for line in tables.ttft_parts(data):
        console.print(line, highlight=False)
    console.print(f"floor: the bytes that must move, at the {result.bandwidth / 1e9:.1f} GB/s of a copy on this device")
    console.print(f"anchors weigh {result.memory_ratio:.2f} times the KV of the messages they are of")
    if json_file:
        save(console, json_file, {"settings": asdict(settings), **data})


@bench.command()
def preassembly(
    quick: Quick = False,
    model_size: ModelSize = "32m",
    samples: Samples = None,
    repeats: Repeats = None,
    output: Output = None,
    device: Device = None,
    json_file: Json = None,
) -> None:
    """Measure the next agent's TTFT without a hint, with one, and with its prompt assembled ahead."""
    require_outputs(json_file)
    from kedge.bench.ttft.preassembly import measure

    settings = _ttft_settings(quick, model_size, device, output=output, samples=samples, repeats=repeats)
    console = Console()
    with console.status("building the model") as status:
        rows = [times.as_json() for times in measure(settings, status.update)]
    console.print(tables.preassembly(settings, rows))
    if json_file:
        save(console, json_file, {"settings": asdict(settings), "agents": rows})


def _ttft_settings(quick: bool, model_size: str, device: str | None, **given: object) -> TtftSettings:
    from kedge.bench.ttft.measure import QUICK, TtftSettings

    base = replace(QUICK if quick else TtftSettings(), model_size=model_size)
    return _with(base, device=device, **given)


def _with(settings: Any, **given: object) -> Any:
    """Return the settings with the values that are not None."""
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


@bench.command("matching-cost")
def matching_cost(
    quick: Quick = False,
    model_size: ModelSize = "32m",
    samples: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Samples in the pool. Default 20, quick 5.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=8, help="Tokens of every sample and of the value. Default 500, quick 100."),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Repeats of every measurement. Default 20, quick 5.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Measure the time to match a value with its pool and to blend its offsets, by estimator (KVCOMM, Table A.5)."""
    require_outputs(json_file)
    from kedge.bench.ttft.matching_cost import QUICK, MatchingSettings, measure

    base = QUICK if quick else MatchingSettings()
    settings = _with(base, model_size=model_size, samples=samples, tokens=tokens, repeats=repeats)
    console = Console()
    with console.status("measuring"):
        results = measure(settings)
    console.print(tables.matching_cost(settings, results))
    if json_file:
        save(console, json_file, {"settings": asdict(settings), "estimators": results})


@bench.command()
def soak(
    quick: Quick = False,
    questions: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Questions, one after the other, all new. Default 2000, quick 100."),
    ] = None,
    every: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Questions between two measurements. Default 200, quick 20.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Check that nothing grows with the number of past messages (a tiny model, new questions only)."""
    require_outputs(json_file)
    from kedge.bench.load.soak import QUICK, SoakSettings
    from kedge.bench.load.soak import soak as run_soak

    settings = _with(QUICK if quick else SoakSettings(), questions=questions, every=every)
    console = Console()
    with console.status("asking") as status:
        looks = run_soak(settings, lambda look: status.update(f"{look['questions']} of {settings.questions} questions"))
    console.print(tables.soak(looks))
    if json_file:
        save(console, json_file, {"looks": looks})


@bench.command()
def cache(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes only.")] = False,
    repeats: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Repeats of every operation. Default 50, quick 20.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Measure the cache's policy alone, without a model: 10^3 to 10^6 blocks, 10 to 10^4 agents, and how times grow."""
    require_outputs(json_file)
    from kedge.bench.workflow.cache import QUICK, CacheSettings, growth, measure

    settings = _with(QUICK if quick else CacheSettings(), repeats=repeats)
    console = Console()
    with console.status("filling the cache") as status:
        result = measure(settings, status.update)
    for name, times in (("blocks", result.blocks), ("agents", result.agents)):
        console.print(tables.cache(name, [one.as_json() for one in times], growth(times)))
    if json_file:
        save(console, json_file, {"settings": asdict(settings), **result.as_json()})
