"""All workloads by name, each with its questions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.workloads import humaneval, mathematics, mmlu
from benchmarks.workloads.rows import DatasetSource
from kedge.errors import ConfigError
from kedge.workloads import real
from kedge.workloads.base import Question, Team
from kedge.workloads.miniature import TASKS

_DATASETS: Mapping[str, tuple[Team, DatasetSource]] = {
    "humaneval": (humaneval.TEAM, humaneval.SOURCE),
    "mmlu": (mmlu.TEAM, mmlu.SOURCE),
    "math500": (mathematics.MATH500, mathematics.MATH500_SOURCE),
    "aime": (mathematics.AIME, mathematics.AIME_SOURCE),
}
_GENERATED: Mapping[str, tuple[Team, Callable[[int], Iterable[Question]]]] = {
    name: (task, partial(task.questions, "test")) for name, task in TASKS.items()
}
NAMES = (*_GENERATED, *real.TEAMS, *_DATASETS)


def require_available(name: str, file: Path | None = None) -> None:
    """Raise `ConfigError` as `load` does, as far as that can be known without reading or downloading a data set."""
    _require_known(name, file)
    if file is not None and not file.is_file():
        raise ConfigError("dataset", str(file), "no such file")
    if name in _DATASETS and file is None:
        _DATASETS[name][1].require_available()


def _require_known(name: str, file: Path | None) -> None:
    if name not in NAMES:
        raise ConfigError("workload", name, f"must be one of {', '.join(NAMES)}")
    if name in _GENERATED and file is not None:
        raise ConfigError("dataset", str(file), f"the questions of {name} are generated")


def team_of(name: str) -> Team:
    """Return a workload without its questions. Raises `ConfigError` for an unknown name."""
    _require_known(name, None)
    return real.TEAMS[name] if name in real.TEAMS else ({**_DATASETS, **_GENERATED})[name][0]


def load(name: str, file: Path | None = None, seed: int = 0) -> tuple[Team, Iterable[Question]]:
    """Return a workload with its questions: an endless stream generated from `seed`, those of the package or of `file`
    shuffled by it, or those of another data set in their own order, read from `file` or else from the hub.

    Raises `ConfigError` for an unknown name, for a file where questions are generated, and as `DatasetSource.questions`
    does.
    """
    _require_known(name, file)
    if name in real.TEAMS:
        return real.load(name, file, seed)
    if name in _DATASETS:
        team, source = _DATASETS[name]
        return team, source.questions(file)
    workload, generate = _GENERATED[name]
    return workload, generate(seed)
