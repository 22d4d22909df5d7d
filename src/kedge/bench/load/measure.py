"""Teams of agents under load: closed-loop clients for a fixed time, one reuse mode after the other.

Every client runs its team again and again, each time with a new question; the next run begins when the last one has
ended. A client's questions depend on its number alone, so that all modes are asked the same. Each combination of case,
number of clients and mode has an engine of its own, with nothing cached and nothing learned, around the same weights.
The clock starts with the first request: whatever a mode has to learn, it learns within the measured time. Only the
process is warmed up, by one team without reuse before the first measurement.

Each call counts as its share of a team, and one that the end of the window finds under way counts by the share of its
time that lies within: whole runs alone would lose as many as there are clients. For that, calls under way then are
waited for, as long as the window was; no new ones are taken. Calls of runs that failed do not count.
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

from kedge.bench.load.teams import Team, case_names, team
from kedge.bench.load.watch import Call, WindowEngine, now
from kedge.engine.local.engine import LocalEngine
from kedge.errors import ConfigError, EngineClosed, KedgeError
from kedge.runner.run import run
from kedge.settings import AnchorSettings, EngineSettings
from kedge.types import ReuseMode, RunId
from kedge.workloads.base import QUESTION

PERIOD = 0.2
"""Seconds between two looks at how many requests run."""
BINS = 12
"""Parts of the window over which the batch is averaged, so that its course can be seen."""

Key = tuple[str, int, ReuseMode]
"""A case, how many clients, and their mode."""


@dataclass(frozen=True)
class LoadSettings:
    """What a measurement depends on, whatever else is measured beside it."""

    seconds: float = 120.0
    """Of each combination of case, clients and mode."""
    kv_memory: str | None = None
    """None: the engine's default, here and in both below."""
    anchor_memory: str | None = None
    """Of all pools of anchors."""
    base_memory: str | None = None
    """Of all base KV."""
    model_size: str = "32m"
    """Of the random model."""
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
    """What is measured: every mode with every number of clients in every case."""

    cases: tuple[str, ...]
    clients: tuple[int, ...] = (1, 8, 32)
    modes: tuple[ReuseMode, ...] = (ReuseMode.OFF, ReuseMode.EXACT, ReuseMode.TRANSLATE)

    def of(self, case: str) -> list[Key]:
        """The combinations of one case, in the order in which they are measured."""
        return [(case, clients, mode) for clients, mode in product(self.clients, self.modes)]


@dataclass(frozen=True, slots=True)
class Run:
    """A run that ended: when, after how many seconds, and by which error, if it failed."""

    id: RunId
    ended: float
    seconds: float
    error: str | None = None


@dataclass
class Record:
    """What was seen of one combination. Times are on the clock of `load_watch.now`."""

    began: float
    seconds: float
    calls_per_run: int
    calls: list[Call] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    batch: list[tuple[float, int]] = field(default_factory=list)
    """When it was looked, and how many requests were running."""

    @property
    def deadline(self) -> float:
        return self.began + self.seconds

    def as_json(self) -> dict[str, Any]:
        """Return the figures of what ended within the window; None where nothing did."""
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

    def _teams_per_min(self, calls: list[Call], start: float) -> float:
        """Return the rate within the window from a share `start` of it on."""
        first = self.began + start * self.seconds
        done = sum(_overlap(one, first, self.deadline) for one in calls)
        return 60 * done / self.calls_per_run / (self.deadline - first)

    def _batch(self, start: float, stop: float) -> float | None:
        """The mean within a part of the window, given by shares of it."""
        first, last = (self.began + share * self.seconds for share in (start, stop))
        seen = [running for at, running in self.batch if first <= at < last]
        return round(fmean(seen), 3) if seen else None


def _overlap(call: Call, start: float, stop: float) -> float:
    """Return the share of a call's time that lies between two moments."""
    within = min(call.ended, stop) - max(call.began, start)
    return max(0.0, within) / (call.ended - call.began)


def _shares(calls: list[Call]) -> dict[str, float | None]:
    """Return where the tokens of the calls' prompts came from."""
    receipts = [one.completion.receipt for one in calls]
    tokens = sum(receipt.prompt_tokens for receipt in receipts)
    sources = {name: sum(getattr(one, name) for one in receipts) for name in ("translated", "exact", "computed")}
    return {f"{name}_share": round(some / tokens, 4) if tokens else None for name, some in sources.items()}


def percentile(values: list[float], share: float, digits: int) -> float | None:
    """Return the value that so many are at or below (nearest rank); None of no values."""
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
        asked = team(case, settings.model_size, settings.device, settings.seed)
        with _threads(asked.threads):
            _warm(asked, settings)
            for key in keys:
                progress(f"{case}: {key[1]} clients, {key[2]}")
                _free(asked)
                yield key, load(asked, settings, key[1], key[2]).as_json()


def _check(settings: LoadSettings, selection: Selection) -> None:
    known = case_names(settings.model_size)
    for case in selection.cases:
        if case not in known:
            raise ConfigError("case", case, f"not one of {', '.join(known)}")
    for clients in selection.clients:
        if clients < 1:
            raise ConfigError("clients", clients, "must be at least 1")
    settings.engine()


@contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    """Have new threads compute with so many threads of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _warm(asked: Team, settings: LoadSettings) -> None:
    """Run one team without reuse, for the first use of kernels, memory and tools."""
    with _engine(asked, settings) as engine:
        inputs = {QUESTION: next(asked.questions("warm-up"))}
        run(engine, asked.flow, inputs, reuse=ReuseMode.OFF, on_tool_error="text")


def _engine(asked: Team, settings: LoadSettings) -> LocalEngine:
    """Return an engine that has cached and learned nothing."""
    return LocalEngine.from_runner(asked.runner, asked.tokenizer, settings.engine(asked.anchors))


def _free(asked: Team) -> None:
    """Free the KV of the engines before: each is a circle of objects, and CUDA graphs hold the storage of theirs."""
    asked.runner.graphs = None
    gc.collect()


def load(asked: Team, settings: LoadSettings, clients: int, mode: ReuseMode) -> Record:
    """Measure one combination on an engine of its own."""
    with ThreadPoolExecutor(clients, "kedge-client") as pool:
        with _engine(asked, settings) as inner:
            record = Record(now(), settings.seconds, len(asked.flow.steps))
            engine = WindowEngine(inner, record.deadline, record.calls)
            loops = [pool.submit(_client, engine, asked, f"client-{i}", mode, record) for i in range(clients)]
            _look(engine, record, loops)
            wait(loops, timeout=record.deadline - now() + settings.seconds)
        for loop in loops:
            loop.result()
    return record


def _look(engine: WindowEngine, record: Record, clients: list[Future[None]]) -> None:
    """Note at regular times how many requests run, until the window, the clients or the engine end."""
    due = record.began
    with suppress(EngineClosed):
        while (due := max(due + PERIOD, now())) < record.deadline:
            if not wait(clients, timeout=due - now()).not_done:
                return
            running = engine.running()
            record.batch.append((now(), running))


def _client(engine: WindowEngine, asked: Team, name: str, mode: ReuseMode, record: Record) -> None:
    """Run the team with one question after the other until the window ends; one that fails is only counted."""
    for number, question in enumerate(asked.questions(name)):
        began, run_id = now(), RunId(f"{name}-{number}")
        if began >= record.deadline:
            return
        error = _run(engine, asked, question, run_id, mode)
        record.runs.append(Run(run_id, now(), now() - began, type(error).__name__ if error else None))
        if isinstance(error, EngineClosed):
            return


def _run(engine: WindowEngine, asked: Team, question: str, run_id: RunId, mode: ReuseMode) -> KedgeError | None:
    """Run the team once; what it failed by, if it did."""
    try:
        run(engine, asked.flow, {QUESTION: question}, reuse=mode, run_id=run_id, on_tool_error="text")
    except KedgeError as error:
        return error
    return None
