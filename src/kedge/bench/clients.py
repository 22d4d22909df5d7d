"""Closed-loop clients of a team on any engine, for a fixed time, and what they saw.

Every client runs its team again and again, each time with a new question; the next run begins when the last one has
ended. A client's questions depend on its number alone. The clock starts with the first request.

Each call counts as its share of a team, and a call under way at the end of the window counts by the share of its time
within the window: whole runs alone would lose as many as there are clients. The measurement waits for such calls for as
long as the window was; no new ones are accepted. Calls of failed runs do not count.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from kedge.bench.teams import Questions
from kedge.engine.base import Engine
from kedge.engine.common.watched import WatchedEngine, WatchedStream, Watcher
from kedge.errors import EngineClosed, KedgeError
from kedge.runner.run import run
from kedge.types import Completion, GenerateRequest, RequestId, ReuseMode, RunId, TenantId
from kedge.workflow.graph import Workflow
from kedge.workloads.base import QUESTION

now: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A successful call with its run and its times."""

    run: RunId
    began: float
    ended: float
    completion: Completion


class CallLog(Watcher):
    """A watcher that records every successful call."""

    def __init__(self, calls: list[TimedCall]) -> None:
        self._calls = calls
        self._begun: dict[RequestId, tuple[RunId, float]] = {}

    def submitted(self, request: GenerateRequest) -> None:
        self._begun[request.request_id] = request.run, now()

    def ended(self, tenant: TenantId, request_id: RequestId, completion: Completion | None = None) -> None:  # noqa: ARG002
        begun = self._begun.pop(request_id, None)
        if begun and completion:
            self._calls.append(TimedCall(*begun, now(), completion))


class WindowEngine(WatchedEngine):
    """An `Engine` in front of another that records every successful call.

    It accepts no calls after `deadline`; those under way go on.
    """

    def __init__(self, engine: Engine, deadline: float, calls: list[TimedCall]) -> None:
        super().__init__(engine, CallLog(calls))
        self._deadline = deadline

    def submit(self, request: GenerateRequest) -> WatchedStream:
        if now() >= self._deadline:
            raise EngineClosed("engine", request.request_id, "the window has ended")
        return super().submit(request)

    def running(self) -> int:
        """Return the number of requests that run now, between two steps."""
        figures = self.inspect()
        return int((figures.get("scheduler") or figures["requests"])["running"])


PERIOD = 0.2
"""Seconds between two samples of the number of running requests."""
BINS = 12
"""Parts of the window over which the batch is averaged."""


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """The clients that run at once, their mode, and the seconds for which they are measured."""

    seconds: float
    clients: int
    mode: ReuseMode


@dataclass(frozen=True, slots=True)
class TeamRun:
    """A finished run: its end, its duration and, if it failed, the error."""

    id: RunId
    ended: float
    seconds: float
    error: str | None = None


@dataclass
class LoadRecord:
    """The observations of one combination. Times are on the clock of `kedge.bench.clients.now`."""

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


def warm(engine: Engine, flow: Workflow, questions: Questions) -> None:
    """Run the team once without reuse, for the first use of kernels, memory and tools."""
    inputs = {QUESTION: next(questions("warm-up"))}
    run(engine, flow, inputs, reuse=ReuseMode.OFF, on_tool_error="text")


def drive(
    opened: AbstractContextManager[Engine], flow: Workflow, questions: Questions, window: LoadWindow
) -> LoadRecord:
    """Let all clients run on an engine until the window ends. The engine is closed in any case."""
    with ThreadPoolExecutor(window.clients, "kedge-client") as pool:
        with opened as inner:
            record = LoadRecord(now(), window.seconds, len(flow.steps))
            client = _Client(WindowEngine(inner, record.deadline, record.calls), flow, questions, window.mode, record)
            loops = [pool.submit(client.loop, f"client-{i}") for i in range(window.clients)]
            _look(client.engine, record, loops)
            wait(loops, timeout=record.deadline - now() + window.seconds)
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


@dataclass(frozen=True)
class _Client:
    """A client of a team; all clients share it, each with a name of its own."""

    engine: WindowEngine
    flow: Workflow
    questions: Questions
    mode: ReuseMode
    record: LoadRecord

    def loop(self, name: str) -> None:
        """Run the team with one question after the other until the window ends; failed runs are counted."""
        for number, question in enumerate(self.questions(name)):
            began, run_id = now(), RunId(f"{name}-{number}")
            if began >= self.record.deadline:
                return
            error = self._run(question, run_id)
            self.record.runs.append(TeamRun(run_id, now(), now() - began, type(error).__name__ if error else None))
            if isinstance(error, EngineClosed):
                return

    def _run(self, question: str, run_id: RunId) -> KedgeError | None:
        """Run the team once; return the error of a failed run."""
        try:
            run(self.engine, self.flow, {QUESTION: question}, reuse=self.mode, run_id=run_id, on_tool_error="text")
        except KedgeError as error:
            return error
        return None
