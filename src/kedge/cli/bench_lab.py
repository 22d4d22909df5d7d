"""`kedge bench accuracy`, `… estimators` and so on, `kedge bench all` and `kedge report`: the papers' experiments."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kedge.cli import bench_tables as tables
from kedge.cli.options import Model, Plot
from kedge.cli.preflight import require_folder, require_model, require_outputs, require_packages
from kedge.cli.results import write
from kedge.errors import ConfigError
from kedge.models import bundled

if TYPE_CHECKING:
    from kedge.bench.lab.studies.study import SeedRows, Study, StudySettings

ABOUT = {
    "accuracy": "Accuracy, cost and speed by number of agents, next to dense prefill and peers (KVCOMM, Table 1).",
    "order": "Accuracy and reuse by order of the questions (KVCOMM, Table 4).",
    "ablation": "Rotation, offsets of placeholders and of prefix segments, in all combinations (KVCOMM, Table 5).",
    "sensitivity": "The entropy threshold, the pool size (KVCOMM, Table 6), and what is computed of a value.",
    "criterion": "What makes a value shareable (KVCOMM, Table A.3).",
    "estimators": "Estimators at the same reuse rate, with learning curves (KVCOMM, Table A.4).",
    "first": "What is translated of a new team's first question, and how right it is then, three tasks.",
    "frontier": "Quality over the share of tokens computed, every method with that share swept, three tasks.",
    "memory": "What anchors weigh, by length and number (KVCOMM, figure A.1).",
    "offload": "Anchors in host memory against anchors on the device (KVCOMM, Table A.6).",
    "offsets": "Offsets of one message behind ten prefixes, by layer (KVCOMM, figures 1 and A.4 to A.11).",
    "proximity": "Whether near tokens have near KV and near offsets, by layer (KVCOMM, figure 4).",
    "anchors": "How often anchors are leaned on (KVCOMM, figure A.3).",
    "similarity": "Cosine with and error against dense KV, by layer and estimator (KVCOMM, figure A.12).",
    "unseen": "Lengths outside what was observed, and roles never seen.",
}

_NOTHING: Mapping[str, Any] = MappingProxyType({"seconds": 0.0, "trials": ()})
"""The results of a study before its first seed."""
Task = Annotated[
    str | None, typer.Option(metavar="NAME", help="math, choice or code, or a data set such as gsm8k; default math.")
]
Dataset = Annotated[Path | None, typer.Option(metavar="FILE", help="A JSONL file with the questions of a data set.")]
Questions = Annotated[int | None, typer.Option(metavar="N", min=1, help="Questions that count, per seed; default 200.")]
Taught = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="Questions learned from before, in some; default 20.")
]
Agents = Annotated[
    int | None, typer.Option(metavar="N", min=2, help="Default 4; in accuracy and offload teams of several sizes.")
]
Seeds = Annotated[int | None, typer.Option(metavar="N", min=1, help="Repetitions with other questions; default 3.")]
Methods = Annotated[str | None, typer.Option(metavar="NAMES", help="Methods to compare, separated by commas, in some.")]
Quick = Annotated[bool, typer.Option("--quick", help="A minute or two: the choice task, few questions, one seed.")]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the results to this file, after every seed.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Keep the seeds that the file of --json has, and go on.")]


def add_to(bench: typer.Typer) -> None:
    """Add a command for every study, and `all`."""
    for name, about in ABOUT.items():
        bench.command(name, help=about)(_command(name))
    bench.command("all")(run_all)


def _command(name: str) -> Callable[..., None]:
    def command(
        task: Task = None,
        dataset: Dataset = None,
        questions: Questions = None,
        taught: Taught = None,
        agents: Agents = None,
        seeds: Seeds = None,
        methods: Methods = None,
        model: Model = None,
        quick: Quick = False,
        json_file: Json = None,
        resume: Resume = False,
        plot_file: Plot = None,
    ) -> None:
        require_outputs(json_file, plot_file)
        _require(task, dataset, model)
        from kedge.bench.lab.studies.catalog import STUDIES

        given: dict[str, Any] = {
            "task": task,
            "dataset": dataset,
            "questions": questions,
            "taught": taught,
            "agents": agents,
        }
        given |= {"seeds": seeds, "model": model, "methods": tuple(methods.split(",")) if methods else None}
        _run(Console(), STUDIES[name], given, json_file, plot_file, quick=quick, resume=resume)

    return command


def run_all(
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for results, figures and a page; default: none is written."),
    ] = None,
    task: Task = None,
    questions: Questions = None,
    seeds: Seeds = None,
    model: Model = None,
    quick: Quick = False,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the seeds that the files in --out have.")] = False,
) -> None:
    """Run all of the papers' experiments on quality; with --out, write results, figures and a report to one folder."""
    _require_out(out, resume)
    _require(task, None, model)
    from kedge.bench.lab.studies.catalog import STUDIES

    console = Console()
    given = {"task": task, "questions": questions, "seeds": seeds, "model": model}
    for name, study in STUDIES.items():
        files = (out / f"{name}.json", out / f"{name}.png") if out else (None, None)
        _run(console, study, given, *files, quick=quick, resume=resume)
    if out:
        report(out)


def _require_out(out: Path | None, resume: bool) -> None:
    """Make the folder. Raises `ConfigError` where it cannot be made, or where `resume` finds no results in it."""
    if out is None:
        if resume:
            raise ConfigError("--resume", True, "needs --out, the folder with earlier results")
        return
    require_packages("--out", ("matplotlib",), "plot")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out", str(out), f"cannot be made: {error.strerror}") from error


def _require(task: str | None, dataset: Path | None, model: Path | None) -> None:
    """Raise before anything heavy is imported where the questions or the model are not there."""
    from kedge.workloads.catalog import require_available

    require_model(model)
    if task is not None or dataset is not None:
        require_available(task or "math", dataset)


def report(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Results of `kedge bench`.")]) -> None:
    """Put the results and figures of a folder into one page, `report.html`, that needs no other file."""
    require_folder("DIR", folder)
    from kedge.bench.lab.studies.report import write_report

    typer.echo(f"page: {write_report(folder)}")


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

    from kedge.bench.lab.studies.study import averaged
    from kedge.bench.plots import study_plot

    settings = study.settings(quick=quick, **given)
    if settings.model is None or bundled(settings.model):
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
    from kedge.bench.lab.studies.study import averaged

    began, trials = time.perf_counter() - saved["seconds"], list[Any]()
    about: dict[str, Any] = {"study": study.name, "title": study.title, "paper": study.paper, "notes": study.notes}
    about["settings"] = settings.as_json()
    for trial in study.trials(settings, note, saved["trials"]):
        trials.append(trial)
        if file:
            seconds = round(time.perf_counter() - began, 1)
            write(file, {**about, "seconds": seconds, "rows": averaged(trials), "trials": trials})
    return trials


def _saved(file: Path | None, study: Study, settings: StudySettings) -> Mapping[str, Any]:
    """Return the file's results of this study. Raises `ConfigError` where it holds other results."""
    if file is None:
        raise ConfigError("resume", True, "needs --json, the file with earlier results")
    if not file.exists():
        return _NOTHING
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("json", str(file), f"is not valid JSON: {error}") from error
    wanted = json.loads(json.dumps({"study": study.name, "settings": settings.as_json()}))
    if not isinstance(saved, dict) or _asked(saved) != _asked(wanted):
        raise ConfigError("json", str(file), "holds results of another study or of other settings")
    return saved


def _asked(results: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the study and its settings, without the number of seeds."""
    return results.get("study"), {**results.get("settings", {}), "seeds": None}
