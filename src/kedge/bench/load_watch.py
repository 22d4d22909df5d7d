"""An engine that takes calls until a window ends, keeps what came of each, and tells how many run at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kedge.engine.base import Stream, Tokenizer
from kedge.engine.local.engine import LocalEngine
from kedge.errors import EngineClosed
from kedge.types import Completion, FinishReason, GenerateRequest, RequestId, RunId, TenantId, TokenDelta, Tokens
from kedge.workflow.forecast import AgentKey, Changes

now: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Call:
    """A call that ended well, of which run, and from when to when it took."""

    run: RunId
    began: float
    ended: float
    completion: Completion


class WatchedEngine:
    """An `Engine` that hands everything on to another one and keeps every call that ends well.

    From `deadline` on it is closed for calls; those that it has taken go on.
    """

    def __init__(self, engine: LocalEngine, deadline: float, calls: list[Call]) -> None:
        self._engine, self._deadline, self._calls = engine, deadline, calls

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def failure(self) -> BaseException | None:
        return self._engine.failure

    def submit(self, request: GenerateRequest) -> Stream:
        if now() >= self._deadline:
            raise EngineClosed("engine", request.request_id, "the window has ended")
        return _WatchedStream(self._engine.submit(request), request.run, self._calls)

    def cancel(self, request_id: RequestId) -> bool:
        return self._engine.cancel(request_id)

    def end_run(self, tenant: TenantId, run: RunId) -> None:
        self._engine.end_run(tenant, run)

    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        self._engine.forecast(changes, prompts)

    def prepare(self, request: GenerateRequest) -> None:
        self._engine.prepare(request)

    def running(self) -> int:
        """Return how many requests run now, between two steps."""
        figures: Any = self._engine.inspect()
        return int(figures["scheduler"]["running"])

    def close(self) -> None:
        """Whoever opened the engine closes it."""


class _WatchedStream:
    def __init__(self, inner: Stream, run: RunId, calls: list[Call]) -> None:
        self.request_id = inner.request_id
        self._inner, self._run, self._calls, self._began = inner, run, calls, now()

    def __iter__(self) -> Iterator[TokenDelta]:
        return iter(self._inner)

    def result(self, timeout: float | None = None) -> Completion:
        completion = self._inner.result(timeout)
        if completion.finish_reason is not FinishReason.CANCELLED:
            self._calls.append(Call(self._run, self._began, now(), completion))
        return completion
