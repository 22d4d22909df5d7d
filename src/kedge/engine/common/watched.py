"""An engine wrapper that reports calls and results to a watcher, and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from kedge.engine.base import Engine, Item, Listener, Quota, Stream
from kedge.engine.validation import sensible_hints
from kedge.hints.actions import ActionOutcome
from kedge.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Namespace,
    RequestId,
    RunKey,
    TenantId,
    TokenDelta,
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
        """Take note that a request is over, without a completion where there is no answer. The first call counts."""

    def cancelled(self, request_id: RequestId) -> None:
        """Take note that a request is being cancelled; its stream may have no reader who would report its end."""

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
        was_known = self._engine.cancel(request_id)
        if was_known:
            self._watcher.cancelled(request_id)
        return was_known

    def end_run(self, run: RunKey) -> None:
        self._engine.end_run(run)

    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        changes, prompts = sensible_hints(changes, prompts)
        self._engine.forecast(changes, prompts)
        self._watcher.forecast(changes)

    def close(self) -> None:
        self._engine.close()


class WatchedStream:
    """A stream that reports its first token and its end, see `kedge.engine.base.Stream`."""

    def __init__(self, stream: Stream, tenant: TenantId, watcher: Watcher) -> None:
        self.request_id = stream.request_id
        self._stream, self._tenant, self._watcher = stream, tenant, watcher
        self._has_begun = False

    def __iter__(self) -> Iterator[TokenDelta]:
        try:
            for delta in self._stream:
                self._tell(delta)
                yield delta
        finally:
            self._tell_end(None)

    def result(self, timeout: float | None = None) -> Completion:
        completion = self._stream.result(timeout)
        self._tell_end(completion)
        return completion

    def listen(self, listener: Listener) -> None:
        """Pass everything to the listener and the watcher."""
        self._stream.listen(partial(self._hear, listener))

    def _hear(self, listener: Listener, item: Item) -> None:
        if isinstance(item, BaseException):
            self._tell_end(None)
        else:
            self._tell(item)
        listener(item)

    def _tell(self, delta: TokenDelta) -> None:
        if delta.tokens and not self._has_begun:
            self._has_begun = True
            self._watcher.begun(self._tenant, self.request_id)
        if delta.completion:
            self._tell_end(delta.completion)

    def _tell_end(self, completion: Completion | None) -> None:
        """Report the end; only the first call counts. None, or a cancelled completion, means that there is no
        answer.
        """
        answered = completion and completion.finish_reason is not FinishReason.CANCELLED
        self._watcher.ended(self._tenant, self.request_id, completion if answered else None)
