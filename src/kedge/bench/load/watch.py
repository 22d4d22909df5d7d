"""An engine that accepts calls until a window ends and records those that succeed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kedge.engine.base import Engine
from kedge.engine.common.watched import WatchedEngine, WatchedStream, Watcher
from kedge.errors import EngineClosed
from kedge.types import Completion, GenerateRequest, RequestId, RunId, TenantId

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
