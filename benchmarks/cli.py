"""The commands of the benchmarks: `kedge bench ttft`, `workflow`, `guard`, `plain`, and the papers' studies."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from benchmarks import tables
from kedge.bench.flows import with_given
from kedge.cli import options
from kedge.cli.options import Device, ModelSize
from kedge.cli.preflight import require_file, require_model, require_packages, require_parent
from kedge.cli.results import save, write
from kedge.errors import ConfigError
from kedge.models import is_bundled

if TYPE_CHECKING:
    from benchmarks.studies.study import SeedRows, Study, StudySettings

ABOUT = {
    "accuracy": "Accuracy, cost and speed by number of agents, next to dense prefill and peers (KVCOMM, Table 1).",
    "order": "Accuracy and reuse by order of the questions (KVCOMM, Table 4).",
    "roles": "One text, two roles with opposite answers: accuracy when KV moves between them, by direction.",
}
PLAIN_CASES = ("links", "sessions", "gain", "teams")

_NOTHING: Mapping[str, Any] = MappingProxyType({"seconds": 0.0, "trials": ()})
"""The results of a study before its first seed."""
Task = Annotated[str | None, options.name(help="math, choice or code, or a data set such as gsm8k; default math.")]
Dataset = Annotated[Path | None, typer.Option(metavar="FILE", help="A JSONL file with the questions of a data set.")]
Questions = Annotated[int | None, options.number(help="Questions that count, per seed; default 200.")]
Taught = Annotated[int | None, options.number(min=0, help="Questions learned from before, in some; default 20.")]
Agents = Annotated[int | None, options.number(min=2, help="Default 4; in accuracy teams of several sizes.")]
Seeds = Annotated[int | None, options.number(help="Repetitions with other questions; default 3.")]
Methods = Annotated[str | None, typer.Option(metavar="NAMES", help="Methods to compare, separated by commas, in some.")]
Quick = Annotated[bool, typer.Option("--quick", help="A minute or two: the choice task, few questions, one seed.")]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the results to this file, after every seed.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Keep the seeds that the file of --json has, and go on.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Write a picture here (extra `plot`).")]
benchmarks = typer.Typer()


def _require_outputs(json_file: Path | None, plot_file: Path | None) -> None:
    require_parent("--json", json_file)
    require_parent("--plot", plot_file)
    if plot_file is not None:
        require_packages("--plot", ("matplotlib",), "plot")


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
    if json_file:
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
    plot_file: Plot = None,
) -> None:
    """Compare eviction policies on one engine: latency, hits, loads and stalls (KVFlow, figures 5, 6, 8)."""
    _require_outputs(json_file, plot_file)
    from benchmarks.plots import workflow_plot
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
    if json_file:
        save(console, json_file, {"settings": asdict(settings), **result.as_json()})
    if plot_file:
        workflow_plot({case.workload.name: case.speedups() for case in result.cases}, plot_file)
        console.print(f"picture: {plot_file}")


@benchmarks.command()
def guard(
    part: Annotated[
        list[str] | None,
        options.name(help="faults, clean or clean_default: what to measure; default: all; repeatable."),
    ] = None,
    fault: Annotated[list[str] | None, options.name(help="A fault to inject; default: all; repeatable.")] = None,
    model: options.Model = None,
    task: Annotated[
        str | None, options.name(help="math, choice, code, gsm8k or reading. Default: code, of a real model reading.")
    ] = None,
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
    require_parent("--json", json_file)
    from benchmarks.guard.faults import QUICK, GuardBenchSettings
    from benchmarks.guard.measure import measure

    sizes: dict[str, Any] = {"learned": learned, "limit": limit, "calls": calls}
    task = task or ("code" if model is None else "reading")
    start = replace(QUICK if quick else GuardBenchSettings(), model=model, task=task)
    base = replace(start, idle=idle, clients=clients, seed=seed)
    sized = with_given(base, **sizes, parts=tuple(part) if part else None, device=device)
    settings = replace(sized, faults=tuple(fault or ()))
    console = Console()
    with console.status("guard") as status:
        data = measure(settings, status.update)
    if "faults" in data:
        console.print(tables.guard(data["faults"], data["evidence"]))
    for how, clean in (("anchors", data.get("clean")), ("default", data.get("clean_default"))):
        if clean:
            counts = "{calls} calls, {translated} translated, {checks} checked, {false_alarms} false alarms"
            end = "switched off" if clean["ever_off"] else "never switched off"
            console.print(f"clean, {how}: {counts.format(**clean)}, {end}")
    if json_file:
        save(console, json_file, {"settings": {**asdict(settings), "model": model and str(model)}, **data})


@benchmarks.command()
def plain(
    case: Annotated[list[str] | None, options.name(help=f"{', '.join(PLAIN_CASES)}; repeatable.")] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Agent trace or Mooncake's, .jsonl or .gz, for links and sessions."),
    ] = None,
    live: Annotated[int | None, options.number(max=1000, help="Live conversations; default 32, quick 8.")] = None,
    requests: Annotated[
        int | None, options.number(min=10, help="Arrivals of each replay; default 6000, quick 800.")
    ] = None,
    trials: Annotated[int | None, options.number(help="gain: trials of each lane; default 4, quick 2.")] = None,
    questions: Annotated[int | None, options.number(help="Questions of each team; default 50, quick 12.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of orders, prompts and questions.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Short replays, a tiny model, one team.")] = False,
    json_file: options.Json = None,
) -> None:
    """Serve sessions, workflows and teams whose clients say nothing: what is found, and what it gains."""
    require_parent("--json", json_file)
    for file in trace or []:
        require_file("--trace", file)
    if "teams" in (case or PLAIN_CASES):
        require_packages("kedge bench plain, teams", ("openai", "fastapi", "uvicorn"), "openai,server")
    from benchmarks.plain.measure import QUICK, PlainBenchSettings, measure
    from kedge.bench.sessions.arrivals import SLICE

    base = QUICK if quick else PlainBenchSettings()
    settings = replace(
        base,
        cases=tuple(case or PLAIN_CASES),
        live=live or base.live,
        requests=requests or base.requests,
        seed=seed,
        gain=replace(base.gain, seeds=trials or base.gain.seeds, seed=seed),
        teams=replace(base.teams, questions=questions or base.teams.questions, seed=seed),
    )
    console = Console()
    with console.status("reading") as status:
        data = measure(trace or [SLICE], settings, status.update)
    _show_plain(console, data)
    if json_file:
        save(console, json_file, {"settings": asdict(settings), **data})


def _show_plain(console: Console, data: Mapping[str, Any]) -> None:
    """Print a table for each case that was measured."""
    if "links" in data:
        console.print(tables.links(data["links"]))
        per_request, per_token = data["cost"]["us_per_request"], data["cost"]["ns_per_token"]
        console.print(f"cost: {per_request:.0f} us per request, {per_token:.0f} ns per token")
    if "sessions" in data:
        console.print(tables.plain_sessions(data["sessions"]))
    if "gain" in data:
        console.print(tables.plain_gain(data["gain"], data["agents"]))
    if "teams" in data:
        console.print(tables.plain_teams(data["teams"], data["agents"]))


def _command(name: str) -> Callable[..., None]:
    def command(
        task: Task = None,
        dataset: Dataset = None,
        questions: Questions = None,
        taught: Taught = None,
        agents: Agents = None,
        seeds: Seeds = None,
        methods: Methods = None,
        model: options.Model = None,
        quick: Quick = False,
        json_file: Json = None,
        resume: Resume = False,
        plot_file: Plot = None,
    ) -> None:
        _require_outputs(json_file, plot_file)
        _require(task, dataset, model)
        from benchmarks.studies.papers import STUDIES

        given: dict[str, Any] = {"task": task, "dataset": dataset, "questions": questions, "taught": taught}
        given |= {
            "agents": agents,
            "seeds": seeds,
            "model": model,
            "methods": tuple(methods.split(",")) if methods else None,
        }
        _run(Console(), STUDIES[name], given, json_file, plot_file, quick=quick, resume=resume)

    return command


def _require(task: str | None, dataset: Path | None, model: Path | None) -> None:
    """Raise before anything heavy is imported where the questions or the model are not there."""
    from benchmarks.workloads.catalog import require_available
    from benchmarks.workloads.roles import TASKS

    require_model(model)
    if (task is not None and task not in TASKS) or dataset is not None:
        require_available(task or "math", dataset)


def _run(
    console: Console,
    study: Study,
    given: dict[str, Any],
    json_file: Path | None,
    plot_file: Path | None,
    *,
    quick: bool,
    resume: bool,
) -> None:
    import torch

    from benchmarks.plots import study_plot
    from benchmarks.studies.study import averaged

    settings = study.settings(quick=quick, **given)
    if is_bundled(settings.model):
        torch.set_num_threads(1)  # bundled models are too small for two: they would mostly wait for each other
    saved = _saved(json_file, study, settings) if resume else _NOTHING
    with console.status(study.name) as status:
        trials = _measured(study, settings, saved, json_file, lambda what: status.update(f"{study.name}, {what}"))
    rows = averaged(trials)
    console.print(
        tables.study(study.title, rows), *study.notes, f"The paper: {study.paper}\n", sep="\n", highlight=False
    )
    if json_file:
        console.print(f"results: {json_file}")
    if plot_file:
        study_plot(study.plot, rows, study.title, plot_file)
        console.print(f"figure: {plot_file}")


def _measured(
    study: Study, settings: StudySettings, saved: Mapping[str, Any], file: Path | None, note: Callable[[str], None]
) -> list[SeedRows]:
    """Return the trials of all seeds, saved ones first. The file is written again after each seed."""
    from benchmarks.studies.study import averaged

    began, trials = time.perf_counter() - saved["seconds"], list[Any]()
    about: dict[str, Any] = {"study": study.name, "title": study.title, "paper": study.paper, "notes": study.notes}
    about["settings"] = settings.as_json()
    for trial in study.trials(settings, note, saved["trials"]):
        trials.append(trial)
        if file:
            seconds = round(time.perf_counter() - began, 1)
            write(file, {**about, "seconds": seconds, "rows": averaged(trials), "trials": trials})
    return trials


def _earlier(file: Path | None) -> Any:
    """Return what a file of results holds, None where there is no such file yet.

    Raises `ConfigError` where no file was given, or for one that is not JSON.
    """
    if file is None:
        raise ConfigError("resume", True, "needs --json, the file with earlier results")
    if not file.exists():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("json", str(file), f"is not valid JSON: {error}") from error


def _saved(file: Path | None, study: Study, settings: StudySettings) -> Mapping[str, Any]:
    """Return the file's results of this study. Raises `ConfigError` where it holds other results."""
    saved = _earlier(file)
    if saved is None:
        return _NOTHING
    wanted = json.loads(json.dumps({"study": study.name, "settings": settings.as_json()}))
    if not isinstance(saved, dict) or _asked(saved) != _asked(wanted):
        raise ConfigError("json", str(file), "holds results of another study or of other settings")
    return saved


def _asked(results: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the study and its settings, without the number of seeds."""
    return results.get("study"), {**results.get("settings", {}), "seeds": None}


for _name, _about in ABOUT.items():
    benchmarks.command(_name, help=_about)(_command(_name))
