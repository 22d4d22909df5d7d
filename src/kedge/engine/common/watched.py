"""An engine wrapper that reports calls and results to a watcher, and changes nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from kedge.engine.base import Engine, Item, Stream
from kedge.engine.common.stream import TokenStream
from kedge.engine.validation import sensible_hints
from kedge.types import AgentKey, Completion, GenerateRequest, RequestId, TenantId, Tokens
from kedge.workflow.forecast import Changes


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

    failure: Any = property(attrgetter("_engine.failure"))
    advise: Any = property(attrgetter("_engine.advise"))
    cancel: Any = property(attrgetter("_engine.cancel"))
    close: Any = property(attrgetter("_engine.close"))
    end_run: Any = property(attrgetter("_engine.end_run"))
    inspect: Any = property(attrgetter("_engine.inspect"))
    inspect_tenants: Any = property(attrgetter("_engine.inspect_tenants"))
    limit: Any = property(attrgetter("_engine.limit"))
    prepare: Any = property(attrgetter("_engine.prepare"))  # without a report: the request itself will come
    traffic: Any = property(attrgetter("_engine.traffic"))
    wait_idle: Any = property(attrgetter("_engine.wait_idle"))

    def __init__(self, engine: Engine, watcher: Watcher) -> None:
        self._engine, self._watcher = engine, watcher
        self.tokenizer, self.state = engine.tokenizer, engine.state

    def submit(self, request: GenerateRequest) -> WatchedStream:
        stream = self._engine.submit(request)
        self._watcher.submitted(request)
        return WatchedStream(stream, request.tenant, self._watcher)

    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        changes, prompts = sensible_hints(changes, prompts)
        self._engine.forecast(changes, prompts)
        self._watcher.forecast(changes)


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
