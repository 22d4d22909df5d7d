"""Runs of registered workflows that the server drives, and what happened in them."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from kedge.errors import KedgeError, NotFound, RequestError
from kedge.runner.results import EventKind, RunEvent, RunResult
from kedge.runner.run import check_inputs, run
from kedge.server.errors import INTERNAL, body_of, told
from kedge.server.openai import protocol
from kedge.server.service import Service
from kedge.server.telemetry.in_flight import InFlight
from kedge.server.telemetry.tracing import RunSpan
from kedge.server.tenancy import Tenant, Ticket
from kedge.types import RequestId, ReuseMode, RunId, TenantId
from kedge.workflow.graph import Workflow

logger = logging.getLogger(__name__)
KEPT_RUNS = 64
"""Ended runs of a tenant that can still be asked for."""
QUIET_SECONDS = 15.0
"""After so long without an event, a stream says that it is still there."""


class RunStatus(StrEnum):
    """Where a run is."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Told:
    """Something that a stream of a run tells."""

    name: str
    data: Mapping[str, Any]


@dataclass(eq=False)
class ServedRun:
    """One run. Belongs to the event loop, but for `is_cancelled`, which its thread reads."""

    tenant: TenantId
    workflow: str
    id: str = field(default_factory=lambda: f"run-{uuid.uuid4().hex}")
    status: RunStatus = RunStatus.RUNNING
    told: list[Told] = field(default_factory=list)
    in_flight: set[RequestId] = field(default_factory=set)
    is_cancelled: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, name: str, data: Mapping[str, Any]) -> None:
        """Something happened."""
        self.told.append(Told(name, data))
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, start: int = 0) -> AsyncIterator[tuple[int, Told] | None]:
        """What happened from number `start` on, and what happens, until the run ends. None: nothing for a while."""
        at = max(0, start)
        while True:
            news = self._news
            while at < len(self.told):
                yield at, self.told[at]
                at += 1
            if self.status is not RunStatus.RUNNING:
                return
            try:
                await asyncio.wait_for(news.wait(), QUIET_SECONDS)
            except TimeoutError:
                yield None

    def as_json(self) -> dict[str, Any]:
        """The run as it is now; an ended one with its result or its error."""
        ended = self.told[-1].data if self.status is not RunStatus.RUNNING else {}
        return {"id": self.id, "object": "run", "workflow": self.workflow, "status": self.status, **ended}


class Runs:
    """The runs that a server drives. Belongs to the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._of: dict[TenantId, dict[str, ServedRun]] = {}

    def start(self, tenant: Tenant, workflow: Workflow, inputs: Mapping[str, str]) -> ServedRun:
        """Start a run of a workflow whose agents all have their modes. Raises `MissingInput` or `RequestError` for
        inputs, `LimitReached` or `Overloaded`."""
        check_inputs(workflow, inputs)
        ticket = self._service.admit(tenant, 1)
        started = ServedRun(tenant.id, workflow.name)
        mine = self._of.setdefault(tenant.id, {})
        mine[started.id] = started
        self._forget_old(mine)
        self._service.metrics.runs.inc(tenant=tenant.id)
        span = self._service.tracing.run(tenant.id, started.id, workflow)
        in_flight = InFlight(self._service.metrics, tenant.id)
        loop = asyncio.get_running_loop()
        execution = _Execution(self._service, tenant, started, workflow, inputs, span, in_flight, loop)
        self._service.threads.wait(execution).add_done_callback(partial(execution.post_end, ticket))
        return started

    def get(self, tenant: Tenant, name: str) -> ServedRun:
        """The tenant's run with this id. Raises `NotFound`."""
        found = self._of.get(tenant.id, {}).get(name)
        if found is None:
            raise NotFound("run", name, "no run of this tenant has this id")
        return found

    def all(self, tenant: Tenant) -> list[ServedRun]:
        """The tenant's runs that go on, and the last ones that have ended, oldest first."""
        return list(self._of.get(tenant.id, {}).values())

    @property
    def going_on(self) -> bool:
        """Whether any tenant's run does."""
        return any(one.status is RunStatus.RUNNING for mine in self._of.values() for one in mine.values())

    def cancel(self, served: ServedRun) -> None:
        """Ends a run soon; one that has ended stays as it is."""
        if served.status is RunStatus.RUNNING:
            served.is_cancelled = True
            self._service.threads.cancel(list(served.in_flight))

    def cancel_all(self) -> None:
        """Ends everything soon."""
        for mine in self._of.values():
            for served in mine.values():
                self.cancel(served)

    def _forget_old(self, mine: dict[str, ServedRun]) -> None:
        ended = [name for name, served in mine.items() if served.status is not RunStatus.RUNNING]
        for name in ended[: max(0, len(ended) - KEPT_RUNS)]:
            del mine[name]


@dataclass(frozen=True)
class _Execution:
    """A run in its thread; everything that it learns it posts to the event loop."""

    service: Service
    tenant: Tenant
    served: ServedRun
    workflow: Workflow
    inputs: Mapping[str, str]
    span: RunSpan
    in_flight: InFlight
    loop: asyncio.AbstractEventLoop

    # the run's thread ---------------------------------------------------------------------------------------------

    def __call__(self) -> RunResult:
        return run(
            self.service.engine,
            self.workflow,
            self.inputs,
            reuse=ReuseMode.EXACT,
            run_id=RunId(self.served.id),
            tenant=self.tenant.id,
            on_event=self._heard,
        )

    def _heard(self, happened: RunEvent) -> None:
        self.span.heard(happened)
        self.loop.call_soon_threadsafe(self._take, happened)
        if self.served.is_cancelled:
            raise RequestError("run", self.served.id, "was cancelled")

    def post_end(self, ticket: Ticket, ended: Future[RunResult]) -> None:
        self.loop.call_soon_threadsafe(self._end, ticket, ended)

    # the event loop -----------------------------------------------------------------------------------------------

    def _take(self, happened: RunEvent) -> None:
        if happened.kind is EventKind.SUBMITTED:
            self.served.in_flight.add(happened.request_id)
            self.in_flight.submitted(happened.request_id)
            if self.served.is_cancelled:
                self.service.threads.cancel([happened.request_id])
        if happened.kind is EventKind.TEXT:
            self.in_flight.begun(happened.request_id)
        if happened.completion:
            self.in_flight.ended(happened.request_id)
            self.served.in_flight.discard(happened.request_id)
            self.service.finished(self.tenant, happened.completion)
        if happened.kind is not EventKind.TEXT or happened.text:
            self.served.tell(happened.kind, _data(happened))

    def _end(self, ticket: Ticket, ended: Future[RunResult]) -> None:
        ticket.release()
        self.in_flight.clear()
        status, data = self._outcome(ended)
        self.span.ended(status.value, ended.exception() if status is RunStatus.FAILED else None)
        self.served.status = status
        self.service.metrics.runs.inc(-1, tenant=self.tenant.id)
        self.service.metrics.run_ended(self.tenant.id, status)
        self.served.tell(status, data)

    def _outcome(self, ended: Future[RunResult]) -> tuple[RunStatus, dict[str, Any]]:
        error = ended.exception()
        if error is None:
            return RunStatus.FINISHED, _result(ended.result())
        if died := self.service.engine_error:
            return RunStatus.FAILED, told(died)
        if self.served.is_cancelled:
            return RunStatus.CANCELLED, {}
        if isinstance(error, KedgeError):
            return RunStatus.FAILED, told(error)
        logger.error("a run failed", exc_info=error)
        return RunStatus.FAILED, body_of("the server has a bug; its log tells which", INTERNAL)


def _data(happened: RunEvent) -> dict[str, Any]:
    data: dict[str, Any] = {"agent": happened.agent, "turn": happened.turn}
    if happened.kind is not EventKind.SUBMITTED:
        data["text"] = happened.text
    if happened.completion:
        data["finish_reason"] = happened.completion.finish_reason
        data["receipt"] = protocol.receipt(happened.completion)
    return data


def _result(result: RunResult) -> dict[str, Any]:
    agents = [
        {
            "agent": one.agent,
            "turn": one.turn,
            "text": one.text,
            "tool_result": one.tool_result,
            "finish_reason": one.completion.finish_reason,
            "receipt": protocol.receipt(one.completion),
        }
        for one in result.results
    ]
    return {"answer": result.text, "total_ms": result.total_ms, "agents": agents}
