"""All parts of `kedge bench guard`: faults, clean traffic, and what the guard costs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kedge.bench.guard.clean import CleanResult, measure_clean
from kedge.bench.guard.faults import FAULTS
from kedge.bench.guard.faulty import FaultResult, measure_fault
from kedge.bench.guard.oracle import DenseOracle
from kedge.bench.guard.overhead import OverheadResult, measure_overhead
from kedge.bench.guard.settings import DEFAULT_MOVE, LEARNED_MOVE, PARTS, GuardBenchSettings
from kedge.bench.lab.methods import Loaded, load_model
from kedge.errors import ConfigError
from kedge.settings import EngineSettings
from kedge.workloads.miniature import TASKS, workflow

Progress = Callable[[str], None]


@dataclass(frozen=True)
class GuardResult:
    """The figures of the parts that were measured; None is a part that was not."""

    faults: Mapping[str, FaultResult] | None
    clean: CleanResult | None
    """By anchors, as the faults are measured"""
    clean_default: CleanResult | None
    """With the default way to move values"""
    overhead: OverheadResult | None

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        faults = None if self.faults is None else {name: one.as_json() for name, one in self.faults.items()}
        others = {"clean": self.clean, "clean_default": self.clean_default, "overhead": self.overhead}
        parts = {"faults": faults, **{name: one and one.as_json() for name, one in others.items()}}
        return {name: part for name, part in parts.items() if part is not None}

    def evidence(self) -> dict[str, Any]:
        """Return how much each fault changes: one that changes nothing is none."""
        return {name: one.evidence() for name, one in (self.faults or {}).items()}


def measure(settings: GuardBenchSettings, progress: Progress = lambda _: None) -> GuardResult:
    """Measure the chosen parts, one after the other, on one model. Raises `ConfigError` for an unknown task, fault or
    part.
    """
    _check("task", settings.task, TASKS)
    for key, names, known in (("fault", settings.faults, FAULTS), ("part", settings.parts, PARTS)):
        for name in names:
            _check(key, name, known)
    for name in settings.faults:
        if not FAULTS[name]().fits(TASKS[settings.task]):
            raise ConfigError("fault", name, f"the questions of {settings.task} are all of one kind")
    with _one_thread():
        loaded = load_model(None, EngineSettings(device=settings.device))
        parts: dict[str, Callable[[], Any]] = {
            "faults": lambda: _faults(loaded, settings, progress),
            "clean": lambda: measure_clean(loaded, settings, LEARNED_MOVE, progress),
            "clean_default": lambda: measure_clean(loaded, settings, DEFAULT_MOVE, progress),
            "overhead": lambda: measure_overhead(loaded, settings, progress),
        }
        return GuardResult(**{name: part() if name in settings.parts else None for name, part in parts.items()})


def _faults(loaded: Loaded, settings: GuardBenchSettings, progress: Progress) -> dict[str, FaultResult]:
    faults, task = {}, TASKS[settings.task]
    with DenseOracle(loaded, workflow(task), settings.device) as oracle:
        for name in settings.faults or [name for name, make in FAULTS.items() if make().fits(task)]:
            progress(f"fault: {name}")
            faults[name] = measure_fault(FAULTS[name], loaded, settings, oracle)
    return faults


def _check(key: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(key, name, f"must be one of {', '.join(known)}")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run the model on one thread: it is too small for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
