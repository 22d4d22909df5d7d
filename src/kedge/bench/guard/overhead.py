"""What the guard costs: closed-loop clients of a team, with it and without it in turn."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kedge.bench.guard.settings import GuardBenchSettings
from kedge.bench.lab.methods import Loaded
from kedge.bench.load.clients import LoadWindow, drive, warm
from kedge.bench.load.teams import nano_questions
from kedge.engine.local.engine import LocalEngine
from kedge.guard import GuardMode
from kedge.settings import EngineSettings, GuardSettings
from kedge.types import ReuseMode
from kedge.workloads.miniature import TASKS, workflow

OVERHEAD_TASK = "math"
"""The team of `kedge bench load`, whose questions these are"""


@dataclass(frozen=True)
class OverheadResult:
    """Figures of the windows, with the guard and without it."""

    on: Sequence[dict[str, Any]]
    off: Sequence[dict[str, Any]]

    def share(self, figure: str) -> float | None:
        """Return the median over pairs of a figure with the guard, as a share of that without it; None where no window
        was long enough for it.
        """
        pairs = [(a[figure], b[figure]) for a, b in zip(self.on, self.off, strict=True)]
        shares = [a / b for a, b in pairs if a is not None and b]
        return round(median(shares), 4) if shares else None

    def as_json(self) -> dict[str, Any]:
        """Return both shares."""
        return {"throughput_share": self.share("teams_per_min"), "ttft_share": self.share("ttft_p50_ms")}


def measure_overhead(
    loaded: Loaded, settings: GuardBenchSettings, progress: Callable[[str], None] = lambda _: None
) -> OverheadResult:
    """Time pairs of windows, each with a fresh engine of the default settings; every second pair begins without the
    guard.
    """
    found: dict[GuardMode, list[dict[str, Any]]] = {GuardMode.ON: [], GuardMode.OFF: []}
    with _engine(loaded, settings, GuardMode.OFF) as engine:
        warm(engine, workflow(TASKS[OVERHEAD_TASK]), nano_questions(settings.seed))
    for pair in range(settings.pairs):
        for mode in (GuardMode.ON, GuardMode.OFF) if pair % 2 == 0 else (GuardMode.OFF, GuardMode.ON):
            progress(f"overhead: pair {pair + 1} of {settings.pairs}, guard {mode}")
            found[mode].append(_window(loaded, settings, mode))
    return OverheadResult(found[GuardMode.ON], found[GuardMode.OFF])


def _window(loaded: Loaded, settings: GuardBenchSettings, mode: GuardMode) -> dict[str, Any]:
    gc.collect()  # engines are reference cycles
    window = LoadWindow(settings.seconds, settings.clients, ReuseMode.TRANSLATE)
    flow, questions = workflow(TASKS[OVERHEAD_TASK]), nano_questions(settings.seed)
    return drive(_engine(loaded, settings, mode), flow, questions, window).as_json()


def _engine(loaded: Loaded, settings: GuardBenchSettings, mode: GuardMode) -> LocalEngine:
    config = EngineSettings(device=settings.device, guard=GuardSettings(mode=mode))
    return LocalEngine.from_runner(*loaded, config)
