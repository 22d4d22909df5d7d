"""All parts of `kedge bench guard`: faults, clean traffic, and what the guard costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kedge.bench.guard.clean import CleanResult, measure_clean
from kedge.bench.guard.faults import FAULTS
from kedge.bench.guard.faulty import FaultResult, measure_fault
from kedge.bench.guard.oracle import DenseOracle
from kedge.bench.guard.overhead import OverheadResult, measure_overhead
from kedge.bench.guard.settings import DEFAULT_MOVE, LEARNED_MOVE, GuardBenchSettings
from kedge.bench.lab.methods import load_model
from kedge.errors import ConfigError
from kedge.settings import EngineSettings
from kedge.workloads.miniature import TASKS, workflow

Progress = Callable[[str], None]


@dataclass(frozen=True)
class GuardResult:
    """The figures of all parts."""

    faults: Mapping[str, FaultResult]
    clean: CleanResult
    """By anchors, as the faults are measured"""
    clean_default: CleanResult
    """With the default way to move values"""
    overhead: OverheadResult

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        return {
            "faults": {name: one.as_json() for name, one in self.faults.items()},
            "clean": self.clean.as_json(),
            "clean_default": self.clean_default.as_json(),
            "overhead": self.overhead.as_json(),
        }

    def evidence(self) -> dict[str, Any]:
        """Return how much each fault changes: one that changes nothing is none."""
        return {name: one.evidence() for name, one in self.faults.items()}


def measure(settings: GuardBenchSettings, progress: Progress = lambda _: None) -> GuardResult:
    """Measure all parts, one after the other, on one model. Raises `ConfigError` for an unknown task or fault."""
    _check("task", settings.task, TASKS)
    for name in settings.faults:
        _check("fault", name, FAULTS)
    with _one_thread():
        loaded = load_model(None, EngineSettings(device=settings.device))
        faults = {}
        with DenseOracle(loaded, workflow(TASKS[settings.task]), settings.device) as oracle:
            for name in settings.faults or FAULTS:
                progress(f"fault: {name}")
                faults[name] = measure_fault(FAULTS[name], loaded, settings, oracle)
        by_anchors, by_default = (
            measure_clean(loaded, settings, move, progress) for move in (LEARNED_MOVE, DEFAULT_MOVE)
        )
        return GuardResult(faults, by_anchors, by_default, measure_overhead(loaded, settings, progress))


def _check(key: str, name: str, known: Mapping[str, Any]) -> None:
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
