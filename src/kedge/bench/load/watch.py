"""An engine that takes calls until a window ends, keeps what came of each, and tells how many run at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kedge.engine.base import Inspectable
from kedge.engine.common.watched import WatchedEngine, WatchedStream, Watcher
from kedge.engine.local.engine import LocalEngine
from kedge.errors import EngineClosed
from kedge.types import Completion, GenerateRequest, RequestId, RunId, TenantId

now: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Call:
    """A call that ended well, of which run, and from when to when it took."""

    run: RunId
    began: float
    ended: float
    completion: Completion


class CallLog(Watcher):
    """A watcher that keeps every call that ends well."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls
        self._begun: dict[RequestId, tuple[RunId, float]] = {}

    def submitted(self, request: GenerateRequest) -> None:
        self._begun[request.request_id] = request.run, now()

    def ended(self, tenant: TenantId, request_id: RequestId, completion: Completion | None = None) -> None:  # noqa: ARG002
        begun = self._begun.pop(request_id, None)
        if begun and completion:
            self._calls.append(Call(*begun, now(), completion))


class WindowEngine(WatchedEngine):
    """An `Engine` that hands everything on to another one and keeps every call that ends well.

    From `deadline` on it is closed for calls; those that it has taken go on.
    """

    def __init__(self, engine: LocalEngine, deadline: float, calls: list[Call]) -> None:
        super().__init__(engine, CallLog(calls))
        self._deadline = deadline

    def submit(self, request: GenerateRequest) -> WatchedStream:
        if now() >= self._deadline:
            raise EngineClosed("engine", request.request_id, "the window has ended")
        return super().submit(request)

    def running(self) -> int:
        """Return how many requests run now, between two steps."""
        assert isinstance(self.watched, Inspectable)
        figures: Any = self.watched.inspect()
        return int(figures["scheduler"]["running"])
