"""An engine wrapper that reports calls and results to a watcher, and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kedge.engine.base import Engine, Item, Quota, Stream
from kedge.engine.common.stream import TokenStream
from kedge.engine.validation import sensible_hints
from kedge.hints.actions import ActionOutcome
from kedge.types import (
    Completion,
    GenerateRequest,
    Namespace,
    RequestId,
    RunKey,
    TenantId,
    Tokens,
    TurnHints,
)
from kedge.workflow.forecast import AgentKey, Changes


class Watcher:
    """A listener to what an engine is asked and answers, called from any thread; subclasses override what they need."""

    def submitted(self, request: GenerateRequest) -> None:
        """Take note that the engine has taken a request."""

    def begun(self, tenant: TenantId, request_id: RequestId) -> None:
        """Take note of a request's first token."""

    def ended(self, tenant: TenantId, request_id: RequestId, completion: Completion | None = None) -> None:
        """Take note, once, that a request is over: without a completion where it failed. That of a cancelled one is no
        answer.
        """

    def forecast(self, changes: Changes) -> None:
        """Take note of the changes of the forecast."""


class WatchedEngine(Engine):
    """An `Engine` that forwards every call to `engine` and reports requests and forecasts to `watcher`."""

    def __init__(self, engine: Engine, watcher: Watcher) -> None:
        self._engine, self._watcher = engine, watcher
        self.tokenizer, self.state = engine.tokenizer, engine.state

    @property
    def failure(self) -> BaseException | None:
        return self._engine.failure

    def submit(self, request: GenerateRequest) -> WatchedStream:
        stream = self._engine.submit(request)
        self._watcher.submitted(request)
        return WatchedStream(stream, request.tenant, self._watcher)

    def prepare(self, request: GenerateRequest) -> None:
        """Forward a hint. The watcher gets no report: the request itself will come."""
        self._engine.prepare(request)

    def advise(self, namespace: Namespace, hints: TurnHints) -> tuple[ActionOutcome, ...]:
        return self._engine.advise(namespace, hints)

    def limit(self, tenant: TenantId, quota: Quota) -> None:
        self._engine.limit(tenant, quota)

    def inspect(self) -> Mapping[str, Any]:
        return self._engine.inspect()

    def inspect_tenants(
        self, owns: Callable[[Namespace], bool], prompts: Sequence[tuple[Namespace, Tokens]]
    ) -> Mapping[str, Any]:
        return self._engine.inspect_tenants(owns, prompts)

    def traffic(self, owns: Callable[[Namespace], bool]) -> Mapping[str, Any] | None:
        return self._engine.traffic(owns)

    def cancel(self, request_id: RequestId) -> bool:
        return self._engine.cancel(request_id)

    def end_run(self, run: RunKey) -> None:
        self._engine.end_run(run)

    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        changes, prompts = sensible_hints(changes, prompts)
        self._engine.forecast(changes, prompts)
        self._watcher.forecast(changes)

    def close(self) -> None:
        self._engine.close()


class WatchedStream(TokenStream):
    """A stream that reports its first token and its end as they come, whether or not anybody reads it."""

    def __init__(self, stream: Stream, tenant: TenantId, watcher: Watcher) -> None:
        super().__init__(stream.request_id)
        self._tenant, self._watcher, self._has_begun = tenant, watcher, False
        stream.listen(self.put)

    def put(self, item: Item) -> None:
        delta = None if isinstance(item, BaseException) else item
        if delta and delta.tokens and not self._has_begun:
            self._has_begun = True
            self._watcher.begun(self._tenant, self.request_id)
        if delta is None or delta.completion:
            self._watcher.ended(self._tenant, self.request_id, delta.completion if delta else None)
        super().put(item)
