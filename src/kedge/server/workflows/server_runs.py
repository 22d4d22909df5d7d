"""Runs of registered workflows that the server drives, with their events."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from kedge.errors import KedgeError, RequestError
from kedge.runner.run import EventKind, RunEvent, RunResult, run
from kedge.server.history import REMEMBERED
from kedge.server.http import CallFailure, event, receipt
from kedge.server.service import Service
from kedge.server.tenancy import Meter, Tenant
from kedge.types import RequestId, ReuseMode, RunId
from kedge.workflow.graph import Workflow

logger = logging.getLogger(__name__)
KEEP_ALIVE, KEEP_ALIVE_SECONDS = b": still there\n\n", 15.0
"""A comment, and the time without an event after which a stream sends it."""


class RunStatus(StrEnum):
    """State of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(eq=False)
class ServerRun:
    """Run that the server drives, in a thread of its own, which posts all events to the event loop. Belongs to the
    event loop, except `is_cancelled`, which its thread reads.
    """

    service: Service
    tenant: Tenant
    flow: Workflow
    inputs: Mapping[str, str]
    meter: Meter
    id: str = field(default_factory=lambda: f"run-{uuid.uuid4().hex}")
    status: RunStatus = RunStatus.RUNNING
    events: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    """Names and data, as they are streamed"""
    in_flight: set[RequestId] = field(default_factory=set)
    is_cancelled: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def __post_init__(self) -> None:
        """Start the run."""
        tracing = self.service.tracing
        self._span = tracing.run(self.tenant.id, self.id, self.flow) if tracing else None
        self.service.metrics.runs.labels(self.tenant.id).inc()
        self.service.calls[self] = lambda _: self.cancel()
        result = self.service.threads.wait(self._run)
        result.add_done_callback(lambda ended: self._loop.call_soon_threadsafe(self._end, ended))

    @property
    def workflow(self) -> str:
        """The workflow's name."""
        return self.flow.name

    async def follow(self, start: int = 0) -> AsyncIterator[bytes]:
        """Yield the events from number `start` on until the run ends, and a comment after a while without one."""
        at = max(0, start)
        while True:
            news = self._news
            while at < len(self.events):
                name, data = self.events[at]
                yield event(data, name=name, number=at)
                at += 1
            if self.status is not RunStatus.RUNNING:
                return
            try:
                await asyncio.wait_for(news.wait(), KEEP_ALIVE_SECONDS)
            except TimeoutError:
                yield KEEP_ALIVE

    def to_dict(self) -> dict[str, Any]:
        """Return the run's state; of an ended one with its result or error."""
        ended = self.events[-1][1] if self.status is not RunStatus.RUNNING else {}
        return {"id": self.id, "object": "run", "workflow": self.workflow, "status": self.status, **ended}

    # the run's thread ---------------------------------------------------------------------------------------------

    def _run(self) -> RunResult:
        return run(
            self.service.engine,
            self.flow,
            self.inputs,
            reuse=ReuseMode.EXACT,
            run_id=RunId(self.id),
            tenant=self.tenant.id,
            on_event=self._post,
        )

    def _post(self, event: RunEvent) -> None:
        if self._span:
            self._span.record(event)
        self._loop.call_soon_threadsafe(self._take, event)
        if self.is_cancelled:
            raise RequestError("run", self.id, "was cancelled")

    # the event loop -----------------------------------------------------------------------------------------------

    def _take(self, event: RunEvent) -> None:
        request = event.request_id
        if event.kind is EventKind.SUBMITTED:
            self.in_flight.add(request)
            if self.is_cancelled:
                self.service.threads.cancel([request])
        if event.completion:
            self.in_flight.discard(request)
            self.service.finished(self.tenant, event.completion)
        if event.kind is not EventKind.TEXT or event.text:
            data: dict[str, Any] = {"agent": event.agent, "turn": event.turn}
            if event.kind is not EventKind.SUBMITTED:
                data["text"] = event.text
            if event.completion:
                data |= {"finish_reason": event.completion.finish_reason, "receipt": receipt(event.completion)}
            self._add_event(event.kind, data)

    def _add_event(self, name: str, data: Mapping[str, Any]) -> None:
        """Append an event and wake the followers."""
        self.events.append((name, data))
        self._news.set()
        self._news = asyncio.Event()

    def _end(self, ended: Future[RunResult]) -> None:
        self.meter.give_back()
        del self.service.calls[self]
        error, status, data = ended.exception(), RunStatus.FAILED, dict[str, Any]()
        died = error and self.service.engine_error
        if error is None:
            status, data = RunStatus.FINISHED, _result(ended.result())
        elif self.is_cancelled and not died:
            status = RunStatus.CANCELLED
        else:
            error = died or error
            if not isinstance(error, KedgeError):
                logger.error("a run failed", exc_info=error)
            failure = replace(CallFailure.of(error), workflow=self.workflow, run=self.id)
            data = failure.body()
            self.service.report_failure(self.tenant.id, failure)
        if self._span:
            self._span.ended(status.value, error if status is RunStatus.FAILED else None)
        self.status = status
        self.service.metrics.runs.labels(self.tenant.id).dec()
        self.service.metrics.ended_runs.labels(self.tenant.id, status).inc()
        self._add_event(status, data)

    def cancel(self) -> None:
        """Cancel the run; an ended one stays as it is."""
        if self.status is RunStatus.RUNNING:
            self.is_cancelled = True
            self.service.threads.cancel(list(self.in_flight))


def start_run(service: Service, tenant: Tenant, workflow: Workflow, inputs: Mapping[str, str]) -> ServerRun:
    """Start a run of a workflow whose agents all have their modes. The oldest ended ones are forgotten.

    Raises `LimitReached` or `Overloaded`.
    """
    started = ServerRun(service, tenant, workflow, inputs, service.admit(tenant, 1))
    mine = service.runs.of(tenant.id)
    mine[started.id] = started
    ended = [name for name, served in mine.items() if served.status is not RunStatus.RUNNING]
    for name in ended[: max(0, len(ended) - REMEMBERED)]:
        del mine[name]
    return started


def _result(result: RunResult) -> dict[str, Any]:
    agents = [
        {
            "agent": one.agent,
            "turn": one.turn,
            "text": one.text,
            "tool_result": one.tool_result,
            "finish_reason": one.completion.finish_reason,
            "receipt": receipt(one.completion),
        }
        for one in result.results
    ]
    return {"answer": result.text, "total_ms": result.total_ms, "agents": agents}
