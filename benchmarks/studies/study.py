"""The common form of the papers' tables and figures: settings, rows, and the paper's figures beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from benchmarks.lab.comparison import LabSettings, Summary, run_pairs
from benchmarks.workloads.catalog import load, team_of
from kedge.errors import ConfigError
from kedge.workloads.base import Question, Team


def shown(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Format rows for readers: cells by heading, a mean with its spread, a dash where nothing was measured."""
    return [
        {
            key.replace("_", " "): _cell(value, row.get(f"{key}_sd"))
            for key, value in row.items()
            if not key.endswith("_sd")
        }
        for row in rows
    ]


def _cell(value: object, spread: float | None) -> str:
    if value is None:
        return "–"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if spread is None else f"{text} ±{spread:.2g}"


Row = dict[str, Any]
"""One line of a table: text and integers are keys, floats (or None) are measurements."""
SeedRows = list[Row]
"""The rows of one seed."""
Note = Callable[[str], None]
"""Callback for progress."""


@dataclass(frozen=True)
class StudySettings:
    """The size of a study; not every study uses all fields."""

    task: str = "math"
    """A workload of `benchmarks.workloads.catalog`."""
    dataset: Path | None = None
    """A local file with the questions, for a workload with a data set."""
    questions: int = 200
    """Questions per seed that count."""
    taught: int = 20
    """Questions before them, which every method prefills densely and learns from, in studies that teach."""
    agents: int = 4
    """0: teams of several sizes, in studies that compare these"""
    seeds: int = 3
    methods: tuple[str, ...] | None = None
    """Methods of `benchmarks.lab.methods` to compare; None is the study's own choice."""
    model: Path | None = None
    """None is the bundled one."""
    quick: bool = False
    """Fewer points on every axis."""

    def as_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Plot:
    """A figure: one panel for each of `ys`, over `x`, with one series for each value of `by`."""

    x: str
    ys: tuple[str, ...]
    by: str | None = None
    kind: Literal["bars", "lines"] = "bars"
    of: str | None = None
    """Column with one row of panels for each of its values."""


@dataclass(frozen=True)
class Study:
    """One table or figure of a paper as a runnable experiment."""

    name: str
    title: str
    paper: str
    """The paper's figures, with their place."""
    measure: Callable[[StudySettings, int, Note], list[Row]] = field(repr=False)
    """(settings, seed, note) -> rows, as many and in the same order for every seed."""
    plot: Plot
    quick: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a quick run."""
    notes: tuple[str, ...] = ()
    """Sentences below the table."""
    default: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a full run that differ from those of other studies."""

    def settings(self, *, quick: bool, **given: Any) -> StudySettings:
        """Return the settings of a quick or a full run; `given` values other than None override them."""
        chosen = StudySettings(**{**QUICK, **self.quick, "quick": True}) if quick else StudySettings(**self.default)
        return replace(chosen, **{key: value for key, value in given.items() if value is not None})

    def run(self, settings: StudySettings, note: Note = lambda _: None) -> list[Row]:
        """Return means over all seeds. Raises `ConfigError` for an unknown workload or fewer than one seed."""
        return averaged(list(self.trials(settings, note)))

    def trials(self, settings: StudySettings, note: Note, done: Sequence[SeedRows] = ()) -> Iterator[SeedRows]:
        """Yield the rows of each seed in turn, beginning with those in `done`. Raises as `run` does."""
        if settings.seeds < 1:
            raise ConfigError("seeds", settings.seeds, "must be at least 1")
        yield from done[: settings.seeds]
        for seed in range(len(done), settings.seeds):
            yield self.measure(settings, seed, noted(note, f"seed {seed}"))


QUICK = {"task": "choice", "questions": 4, "taught": 5, "agents": 3, "seeds": 1}


def averaged(trials: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the means of what was measured, row by row, and with several trials the standard deviation as `…_sd`."""
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


def noted(note: Note, where: str) -> Note:
    """Return a callback for progress that says where."""
    return lambda what: note(f"{where}, {what}")


def asked(settings: StudySettings, seed: int) -> tuple[Team, list[Question]]:
    """Return the workload with its questions."""
    workload, questions = load(settings.task, settings.dataset, seed)
    return workload, list(islice(questions, settings.questions))


def compared(settings: StudySettings, seed: int, methods: Sequence[str], note: Note) -> dict[str, Summary]:
    """Let teams answer, and judges judge, by all methods on the same questions."""
    workload, questions = asked(settings, seed)
    lab = LabSettings(agents=settings.agents, model=settings.model, seed=seed, judged=True, timed=True)
    runs = run_pairs(workload, questions, methods, lab, lambda n: note(f"{n + 1} of {settings.questions} questions"))
    return {name: one.summary() for name, one in runs.items()}


def team_sizes(settings: StudySettings, several: Sequence[int]) -> tuple[int, ...]:
    """Return the number of agents that was asked for; without one, those of `several` that the task's team has."""
    most = len(team_of(settings.task).workflow().agents)
    return (settings.agents,) if settings.agents else tuple(agents for agents in several if agents <= most)


def picked(summary: Summary, *columns: str) -> Row:
    """Return measures of a summary by name."""
    return {column: getattr(summary, column) for column in columns}
