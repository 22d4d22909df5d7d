"""Teams of agents under load: closed-loop clients for a fixed time, one reuse mode after the other.

All modes answer the same questions. Each combination of case, number of clients and mode has a fresh engine around the
same weights. The clock starts with the first request, so a mode's learning counts as measured time. Only the process is
warmed up, by one team without reuse before the first measurement.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from kedge.bench.clients import LoadRecord, LoadWindow, drive, warm
from kedge.bench.teams import LoadTeam, case_names, team
from kedge.engine.local.engine import LocalEngine
from kedge.errors import ConfigError
from kedge.settings import AnchorSettings, EngineSettings, GuardSettings
from kedge.types import ReuseMode

Key = tuple[str, int, ReuseMode]
"""A case, the number of clients, and their mode."""


@dataclass(frozen=True)
class LoadSettings:
    """The settings that all combinations of a measurement share."""

    seconds: float = 120.0
    """Window of each combination of case, clients and mode."""
    kv_memory: str | None = None
    """Size of the device tier; None is the engine's default, here and in both below."""
    anchor_memory: str | None = None
    """Size of all pools of anchors."""
    base_memory: str | None = None
    """Size of all base KV."""
    model_size: str = "32m"
    """Size of the random model."""
    device: str = "auto"
    seed: int = 0

    def engine(
        self,
        anchors: AnchorSettings = AnchorSettings(),  # noqa: B008 (it is frozen)
        guard: GuardSettings = GuardSettings(),  # noqa: B008
    ) -> EngineSettings:
        """Return the settings of an engine. Raises `ConfigError`."""
        bounds = _given(max_bytes=self.anchor_memory, max_base_bytes=self.base_memory)
        settings = _given(device=self.device, kv_memory=self.kv_memory)
        return EngineSettings.model_validate(
            {**settings, "anchors": {**anchors.model_dump(), **bounds}, "guard": guard.model_dump()}
        )


def _given(**settings: str | None) -> dict[str, str]:
    return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True)
class Selection:
    """The combinations to measure: every mode with every number of clients in every case."""

    cases: tuple[str, ...]
    clients: tuple[int, ...] = (1, 8, 32)
    modes: tuple[ReuseMode, ...] = (ReuseMode.OFF, ReuseMode.EXACT, ReuseMode.TRANSLATE)

    def of(self, case: str) -> list[Key]:
        """Return the combinations of one case, in the order of measurement."""
        return [(case, clients, mode) for clients, mode in product(self.clients, self.modes)]


def measure(
    settings: LoadSettings,
    selection: Selection,
    done: Callable[[Key], bool] = lambda _: False,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Yield the figures of each combination that is not `done`, as soon as they are there. Raises `ConfigError`."""
    _check(settings, selection)
    for case in selection.cases:
        keys = [key for key in selection.of(case) if not done(key)]
        if not keys:
            continue
        progress(f"{case}: loading and warming up")
        loaded = team(case, settings.model_size, settings.device, settings.seed)
        with _threads(loaded.threads):
            with _engine(loaded, settings) as engine:
                warm(engine, loaded.flow, loaded.questions)
            for key in keys:
                progress(f"{case}: {key[1]} clients, {key[2]}")
                _free(loaded)
                yield key, load(loaded, settings, key[1], key[2]).as_json()


def _check(settings: LoadSettings, selection: Selection) -> None:
    known = case_names(settings.model_size)
    for case in selection.cases:
        if case not in known:
            raise ConfigError("case", case, f"must be one of {', '.join(known)}")
    for clients in selection.clients:
        if clients < 1:
            raise ConfigError("clients", clients, "must be at least 1")
    settings.engine()


@contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    """Limit the threads of one operation on a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _engine(loaded: LoadTeam, settings: LoadSettings) -> LocalEngine:
    """Return an engine that has cached and learned nothing."""
    return LocalEngine.from_runner(loaded.runner, loaded.tokenizer, settings.engine(loaded.anchors, loaded.guard))


def _free(loaded: LoadTeam) -> None:
    """Free the KV of earlier engines, which are reference cycles; CUDA graphs keep the storage of theirs."""
    loaded.runner.graphs = None
    gc.collect()


def load(loaded: LoadTeam, settings: LoadSettings, clients: int, mode: ReuseMode) -> LoadRecord:
    """Measure one combination on an engine of its own."""
    window = LoadWindow(settings.seconds, clients, mode)
    return drive(_engine(loaded, settings), loaded.flow, loaded.questions, window)
