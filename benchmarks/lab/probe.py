"""Observation of an engine's requests, which may be forced to an answer: logits and the KV of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from kedge.engine.base import Tokenizer
from kedge.engine.local.components import Assembler, EngineComponents
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sampler import Draw, Sampler
from kedge.engine.local.sequence import LocalStream
from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.plan import ReusePlan, spans_of
from kedge.types import Completion, GenerateRequest, RequestId, RunKey, Source, Tokens
from kedge.workflow.forecast import AgentKey, Changes

ROWS = 32
"""Tokens of an answer whose logits are kept."""


@dataclass(frozen=True)
class ProbeResult:
    """The observations of one request."""

    request: GenerateRequest
    completion: Completion
    logits: Tensor
    """float32 [up to `ROWS`, vocab] on the CPU, one row per token of the answer."""
    kv: KVSegment | None
    """The prompt's KV when the first token was drawn, keys unrotated; None unless requested."""


@dataclass
class _RequestProbe:
    """A draw function that also records logits and KV of one request. Only the engine's thread calls it."""

    draw: Draw
    wants_kv: bool
    read: Callable[[], KVSegment] | None = None
    kv: KVSegment | None = None
    logits: list[Tensor] = field(default_factory=list)

    def __call__(self, logits: Tensor) -> int:
        if self.wants_kv and not self.logits and self.read:
            self.kv = self.read()
        if len(self.logits) < ROWS:
            self.logits.append(logits.float().cpu().clone())
        return self.draw(logits)


class Probe:
    """The observer of one engine, which has to be built with `probe.components`.

    While `teaching`, that engine prefills everything densely and learns from it, whatever the plan.
    """

    def __init__(self, components: EngineComponents = EngineComponents()) -> None:  # noqa: B008 (it is frozen)
        self.probes: dict[RequestId, _RequestProbe] = {}
        self.teaching = False
        self.components = replace(components, assembler=partial(self._assembler, components))

    def _assembler(self, components: EngineComponents, runner: ModelRunner, storage: PagedStorage) -> Assembler:
        return _ProbingAssembler(components.assembler(runner, storage), storage, self)

    def submit(
        self, engine: LocalEngine, request: GenerateRequest, forced: Tokens | None = None, *, kv: bool = False
    ) -> ProbedRequest:
        """Submit a request; with `forced` it gives that answer whatever the logits are (teacher forcing)."""
        if forced:
            sampling = replace(request.sampling, max_tokens=len(forced), ignore_eos=True, stop=())
            request = replace(request, sampling=sampling)
        probe = _RequestProbe(_forcing(forced) if forced else Sampler(request.sampling), kv)
        self.probes[request.request_id] = probe
        return ProbedRequest(
            request, engine.submit(request, probe), probe, partial(self.probes.pop, request.request_id, None)
        )


@dataclass(frozen=True)
class ProbedRequest:
    """A submitted request under observation."""

    request: GenerateRequest
    stream: LocalStream
    _probe: _RequestProbe
    _close: Callable[[], object]

    def result(self, timeout: float | None = None) -> ProbeResult:
        """Wait for the end. Raises the request's error."""
        try:
            completion = self.stream.result(timeout)
        finally:
            self._close()
        return ProbeResult(self.request, completion, torch.stack(self._probe.logits), self._probe.kv)


class Recorder:
    """An `Engine` that observes every request of a run."""

    def __init__(self, engine: LocalEngine, probe: Probe, *, kv: bool) -> None:
        self._engine, self._probe, self._kv = engine, probe, kv
        self.pending: list[ProbedRequest] = []
        """In the order of submission."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def submit(self, request: GenerateRequest) -> LocalStream:
        self.pending.append(self._probe.submit(self._engine, request, kv=self._kv))
        return self.pending[-1].stream

    def cancel(self, request_id: RequestId) -> bool:
        return self._engine.cancel(request_id)

    def end_run(self, run: RunKey) -> None:
        self._engine.end_run(run)

    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        self._engine.forecast(changes, prompts)

    def close(self) -> None:
        """Do nothing: the engine's owner closes it."""


@dataclass(frozen=True)
class _ProbingAssembler:
    """An assembler that gives each request's probe access to its KV."""

    works_ahead: ClassVar[bool] = False
    inner: Assembler
    storage: PagedStorage
    probe: Probe

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        if probe := self.probe.probes.get(request.request_id):
            probe.read = partial(self.storage.read, table, 0, request.prompt_tokens)
        return self.inner.assemble(request, table, _densely(plan) if self.probe.teaching else plan)


def _densely(plan: ReusePlan) -> ReusePlan:
    """Return the plan with the same exact tokens and all others computed."""
    sources = [span.source for span in plan.spans for _ in range(len(span))]
    computed = (Source.COMPUTED if source is Source.TRANSLATED else source for source in sources)
    return ReusePlan(spans_of(computed), misses=plan.misses)


def _forcing(answer: Tokens) -> Draw:
    tokens = iter(answer)
    return lambda _: next(tokens)
