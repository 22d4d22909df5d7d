"""What the papers' tables and figures have in common: settings, rows, and what the paper reports beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from kedge.bench.lab.comparison import LabSettings, run_pairs
from kedge.bench.lab.methods import Method
from kedge.bench.lab.pairs import Summary
from kedge.errors import ConfigError
from kedge.workloads.base import Question, Workload
from kedge.workloads.catalog import load

Row = dict[str, Any]
"""One line of a table: texts and integers say what was measured, floats (or None) are the measurements"""
Trial = list[Row]
"""What one seed gave"""
Note = Callable[[str], None]
"""Told what is being done"""


@dataclass(frozen=True)
class StudySettings:
    """How much of a study is run; not every study uses all of it."""

    task: str = "math"
    """A workload of `kedge.workloads.catalog`"""
    dataset: Path | None = None
    """A local file with the questions of a workload that has a data set"""
    questions: int = 200
    """Per seed, those that count"""
    taught: int = 20
    """Questions before them, which every method prefills densely and learns from, where a study says so"""
    agents: int = 4
    seeds: int = 3
    methods: tuple[str, ...] | None = None
    """Those of `kedge.bench.lab.methods` that are compared, where whole methods are; None: the study's own"""
    model: Path | None = None
    """None: the bundled one"""
    quick: bool = False
    """Fewer points on every axis"""

    def as_json(self) -> dict[str, Any]:
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Plot:
    """What the figure shows: a panel for each of `ys`, over `x`, in a series for each value of `by`."""

    x: str
    ys: tuple[str, ...]
    by: str | None = None
    kind: Literal["bars", "lines"] = "bars"


@dataclass(frozen=True)
class Study:
    """One table or figure of a paper, in a form that can be run."""

    name: str
    title: str
    paper: str
    """What the paper reports, with the place"""
    measure: Callable[[StudySettings, int, Note], list[Row]] = field(repr=False)
    """Rows of one seed: always as many, in the same order"""
    plot: Plot
    quick: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a quick run"""

    def settings(self, *, quick: bool, **given: Any) -> StudySettings:
        """What is given (and not None) wins over the settings of a quick or a whole run."""
        chosen = StudySettings(**{**QUICK, **self.quick, "quick": True}) if quick else StudySettings()
        return replace(chosen, **{key: value for key, value in given.items() if value is not None})

    def run(self, settings: StudySettings, note: Note = lambda _: None) -> list[Row]:
        """Means over all seeds. Raises `ConfigError` for an unknown workload or fewer than one seed."""
        return averaged(list(self.trials(settings, note)))

    def trials(self, settings: StudySettings, note: Note, done: Sequence[Trial] = ()) -> Iterator[Trial]:
        """The rows of each seed in turn; the first ones are `done`. Raises as `run` does."""
        if settings.seeds < 1:
            raise ConfigError("seeds", settings.seeds, "is less than 1")
        yield from done[: settings.seeds]
        for seed in range(len(done), settings.seeds):
            yield self.measure(settings, seed, lambda what, seed=seed: note(f"seed {seed}: {what}"))  # type: ignore[misc]


QUICK = {"task": "choice", "questions": 4, "taught": 5, "agents": 3, "seeds": 1}


def averaged(trials: Sequence[Sequence[Row]]) -> list[Row]:
    """Row by row the mean of what was measured; of several trials also its standard deviation, as `…_sd`."""
    return [_averaged(rows) for rows in zip(*trials, strict=True)]


def _averaged(rows: Sequence[Row]) -> Row:
    result: Row = {}
    for key, first in rows[0].items():
        values = [row[key] for row in rows]
        if not any(isinstance(value, float) for value in values):
            result[key] = first
            continue
        known = [value for value in values if value is not None]
        result[key] = fmean(known)
        if len(rows) > 1:
            result[f"{key}_sd"] = stdev(known) if len(known) > 1 else None
    return result


# what most studies do -------------------------------------------------------------------------------------------------


def asked(settings: StudySettings, seed: int, *, taught: bool) -> tuple[Workload, list[Question]]:
    """The workload with its questions, those that are taught first."""
    workload, questions = load(settings.task, settings.dataset, seed)
    count = settings.questions + (settings.taught if taught else 0)
    return workload, list(islice(questions, count))


def compared(
    settings: StudySettings,
    seed: int,
    methods: Sequence[str] | Mapping[str, Method],
    note: Note,
    *,
    taught: bool = False,
    **lab: Any,
) -> dict[str, Summary]:
    """Methods on the same questions; `lab` are further `LabSettings`."""
    workload, questions = asked(settings, seed, taught=taught)
    chosen = LabSettings(
        agents=settings.agents,
        model=settings.model,
        taught=settings.taught if taught else 0,
        seed=seed,
        **{"kv": False, **lab},
    )
    runs = run_pairs(workload, questions, methods, chosen, lambda n: note(f"{n + 1} of {settings.questions} questions"))
    return {name: one.summary() for name, one in runs.items()}


def picked(summary: Summary, *columns: str) -> Row:
    """Measures of a summary by name."""
    return {column: getattr(summary, column) for column in columns}
