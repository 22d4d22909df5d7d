"""Teams of agents under load: closed-loop clients for a fixed time, one reuse mode after the other.

Every client runs its team again and again, each time with a new question; the next run begins when the last one has
ended. A client's questions depend on its number alone, so all modes answer the same. Each combination of case, number
of clients and mode has a fresh engine around the same weights. The clock starts with the first request, so a mode's
learning counts as measured time. Only the process is warmed up, by one team without reuse before the first measurement.

Each call counts as its share of a team, and a call under way at the end of the window counts by the share of its time
within the window: whole runs alone would lose as many as there are clients. The measurement waits for such calls for as
long as the window was; no new ones are accepted. Calls of failed runs do not count.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean
from typing import Any

import torch

from kedge.bench.load.teams import LoadTeam, case_names, team
from kedge.bench.load.watch import TimedCall, WindowEngine, now
from kedge.engine.local.engine import LocalEngine
from kedge.errors import ConfigError, EngineClosed, KedgeError
from kedge.runner.run import run
from kedge.settings import AnchorSettings, EngineSettings
from kedge.types import ReuseMode, RunId
from kedge.workloads.base import QUESTION

PERIOD = 0.2
"""Seconds between two samples of the number of running requests."""
BINS = 12
"""Parts of the window over which the batch is averaged."""

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

    def engine(self, anchors: AnchorSettings = AnchorSettings()) -> EngineSettings:  # noqa: B008 (it is frozen)
        """Return the settings of an engine. Raises `ConfigError`."""
        bounds = _given(max_bytes=self.anchor_memory, max_base_bytes=self.base_memory)
        settings = _given(device=self.device, kv_memory=self.kv_memory)
        return EngineSettings.model_validate({**settings, "anchors": {**anchors.model_dump(), **bounds}})


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


@dataclass(frozen=True, slots=True)
class TeamRun:
    """A finished run: its end, its duration and, if it failed, the error."""

    id: RunId
    ended: float
    seconds: float
    error: str | None = None


@dataclass
class LoadRecord:
    """The observations of one combination. Times are on the clock of `kedge.bench.load.watch.now`."""

    began: float
    seconds: float
    calls_per_run: int
    calls: list[TimedCall] = field(default_factory=list)
    runs: list[TeamRun] = field(default_factory=list)
    batch: list[tuple[float, int]] = field(default_factory=list)
    """When it was looked, and how many requests were running."""

    @property
    def deadline(self) -> float:
        """The end of the window."""
        return self.began + self.seconds

    def as_json(self) -> dict[str, Any]:
        """Return the figures of the calls and runs within the window; None where there are none."""
        runs = [one for one in self.runs if one.ended <= self.deadline]
        failed = Counter(one.error for one in runs if one.error)
        spoiled = {one.id for one in runs if one.error}
        good = [one for one in self.calls if one.run not in spoiled]
        calls = [one for one in good if one.ended <= self.deadline]
        ttft = [one.completion.ttft_ms for one in calls]
        latency = [one.seconds for one in runs if not one.error]
        return {
            "teams_per_min": round(self._teams_per_min(good, 0.0), 3),
            "teams_per_min_last_third": round(self._teams_per_min(good, 2 / 3), 3),
            "ttft_p50_ms": percentile(ttft, 0.5, 2),
            "ttft_p99_ms": percentile(ttft, 0.99, 2),
            "latency_p50_s": percentile(latency, 0.5, 4),
            "latency_p99_s": percentile(latency, 0.99, 4),
            "batch_mean": self._batch(0.0, 1.0),
            "batch_mean_last_third": self._batch(2 / 3, 1.0),
            "batch_over_time": [self._batch(at / BINS, (at + 1) / BINS) for at in range(BINS)],
            **_shares(calls),
            "calls": len(calls),
            "runs": len(latency),
            "errors": failed.total(),
            "errors_by_kind": dict(failed),
        }

    def _teams_per_min(self, calls: list[TimedCall], start: float) -> float:
        """Return the rate from a share `start` of the window to its end."""
        first = self.began + start * self.seconds
        done = sum(_overlap(one, first, self.deadline) for one in calls)
        return 60 * done / self.calls_per_run / (self.deadline - first)

    def _batch(self, start: float, stop: float) -> float | None:
        """Return the mean batch within a part of the window, given as shares of it."""
        first, last = (self.began + share * self.seconds for share in (start, stop))
        seen = [running for at, running in self.batch if first <= at < last]
        return round(fmean(seen), 3) if seen else None


def _overlap(call: TimedCall, start: float, stop: float) -> float:
    """Return the share of a call's time that lies between two moments."""
    within = min(call.ended, stop) - max(call.began, start)
    return max(0.0, within) / (call.ended - call.began)


def _shares(calls: list[TimedCall]) -> dict[str, float | None]:
    """Return the share of the calls' prompt tokens by source."""
    receipts = [one.completion.receipt for one in calls]
    tokens = sum(receipt.prompt_tokens for receipt in receipts)
    sources = {name: sum(getattr(one, name) for one in receipts) for name in ("translated", "exact", "computed")}
    return {f"{name}_share": round(some / tokens, 4) if tokens else None for name, some in sources.items()}


def percentile(values: list[float], share: float, digits: int) -> float | None:
    """Return the nearest-rank percentile; None of no values."""
    ordered = sorted(values)
    return round(ordered[int(share * (len(ordered) - 1) + 0.5)], digits) if ordered else None


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
            _warm(loaded, settings)
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


def _warm(loaded: LoadTeam, settings: LoadSettings) -> None:
    """Run one team without reuse, for the first use of kernels, memory and tools."""
    with _engine(loaded, settings) as engine:
        inputs = {QUESTION: next(loaded.questions("warm-up"))}
        run(engine, loaded.flow, inputs, reuse=ReuseMode.OFF, on_tool_error="text")


def _engine(loaded: LoadTeam, settings: LoadSettings) -> LocalEngine:
    """Return an engine that has cached and learned nothing."""
    return LocalEngine.from_runner(loaded.runner, loaded.tokenizer, settings.engine(loaded.anchors))


def _free(loaded: LoadTeam) -> None:
    """Free the KV of earlier engines, which are reference cycles; CUDA graphs keep the storage of theirs."""
    loaded.runner.graphs = None
    gc.collect()


def load(loaded: LoadTeam, settings: LoadSettings, clients: int, mode: ReuseMode) -> LoadRecord:
    """Measure one combination on an engine of its own."""
    with ThreadPoolExecutor(clients, "kedge-client") as pool:
        with _engine(loaded, settings) as inner:
            record = LoadRecord(now(), settings.seconds, len(loaded.flow.steps))
            engine = WindowEngine(inner, record.deadline, record.calls)
            loops = [pool.submit(_client, engine, loaded, f"client-{i}", mode, record) for i in range(clients)]
            _look(engine, record, loops)
            wait(loops, timeout=record.deadline - now() + settings.seconds)
        for loop in loops:
            loop.result()
    return record


def _look(engine: WindowEngine, record: LoadRecord, clients: list[Future[None]]) -> None:
    """Record the batch at regular times, until the window, the clients or the engine end."""
    due = record.began
    with suppress(EngineClosed):
        while (due := max(due + PERIOD, now())) < record.deadline:
            if not wait(clients, timeout=due - now()).not_done:
                return
            running = engine.running()
            record.batch.append((now(), running))


def _client(engine: WindowEngine, loaded: LoadTeam, name: str, mode: ReuseMode, record: LoadRecord) -> None:
    """Run the team with one question after the other until the window ends; failed runs are counted."""
    for number, question in enumerate(loaded.questions(name)):
        began, run_id = now(), RunId(f"{name}-{number}")
        if began >= record.deadline:
            return
        error = _run(engine, loaded, question, run_id, mode)
        record.runs.append(TeamRun(run_id, now(), now() - began, type(error).__name__ if error else None))
        if isinstance(error, EngineClosed):
            return


def _run(engine: WindowEngine, loaded: LoadTeam, question: str, run_id: RunId, mode: ReuseMode) -> KedgeError | None:
    """Run the team once; return the error of a failed run."""
    try:
        run(engine, loaded.flow, {QUESTION: question}, reuse=mode, run_id=run_id, on_tool_error="text")
    except KedgeError as error:
        return error
    return None
