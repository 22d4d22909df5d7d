"""Ways to serve requests, and a look inside: answers that are forced, the logits of each, and the prompt's KV."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from kedge.bench.shapes import Loaded
from kedge.engine.base import Engine, Stream
from kedge.engine.common.grammars import Grammars
from kedge.engine.common.stream import TokenStream
from kedge.engine.local.components import Assembler, EngineComponents
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sampler import Draw, ForcedAnswer, Sampler
from kedge.errors import ConfigError
from kedge.guard import GuardMode
from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.plan import ReusePlan, spans_of
from kedge.settings import AnchorSettings, EngineSettings, GuardSettings, PlannerConstants
from kedge.settings.sections import EstimatorName
from kedge.types import Completion, GenerateRequest, RequestId, ReuseMode, RunKey, Source, Tokens
from kedge.workflow.forecast import AgentKey, Changes
from kedge.workflow.graph import Workflow
from kedge.workloads.base import Question, Team


@dataclass(frozen=True)
class Method:
    """A way to serve requests: the mode, settings that differ from the engine's defaults, and replaced components."""

    reuse: ReuseMode
    anchors: Mapping[str, Any] = field(default_factory=dict)
    planner: Mapping[str, Any] = field(default_factory=dict)
    components: EngineComponents = EngineComponents()
    team: Callable[[Workflow], Workflow] | None = None
    """The team that it serves, made from the one that was asked for; None: the same."""
    is_timed: bool = True
    """Whether its times can be compared with those of others: not where tokens run through layers twice only because
    it is an experiment."""
    has_anchors: bool = True
    """Whether it adds offsets, if it translates."""
    guard: Mapping[str, Any] | None = None
    """The guard's settings: it proves what it serves, from the first question on. None: without a guard."""

    @property
    def learns(self) -> bool:
        """Whether it learns anchors from past questions, before those that count."""
        return self.reuse is ReuseMode.TRANSLATE and self.has_anchors and self.guard is None

    @property
    def keeps(self) -> bool:
        """Whether past questions change what it computes: by anchors, or as cached prompts."""
        return self.learns or self.reuse is ReuseMode.EXACT

    def config(self, anchors: Mapping[str, Any], planner: Mapping[str, Any], **engine: Any) -> EngineSettings:
        """Return the settings of an engine that serves this way; the arguments override the method's own.

        Cost-based choices and the guard are off: methods are compared by what they translate.
        """
        return EngineSettings(
            anchors=AnchorSettings(**{**self.anchors, **anchors}),
            planner=PlannerConstants(**{"by_cost": False, **self.planner, **planner}),
            **{"guard": GuardSettings(**({"mode": GuardMode.OFF} if self.guard is None else self.guard)), **engine},
        )

    def open(
        self,
        loaded: Loaded,
        anchors: Mapping[str, Any] = MappingProxyType({}),
        planner: Mapping[str, Any] = MappingProxyType({}),
        components: EngineComponents | None = None,
        **engine: Any,
    ) -> LocalEngine:
        """Open an engine that serves this way; `components` replace the method's own, the other arguments override its
        settings.
        """
        config = self.config(anchors, planner, **engine)
        return LocalEngine.from_runner(*loaded, config, components=components or self.components)


SERVED: Mapping[str, Method] = {
    "dense": Method(ReuseMode.OFF),
    "exact": Method(ReuseMode.EXACT),
    "served": Method(ReuseMode.TRANSLATE, guard={}),
    "kedge": Method(ReuseMode.TRANSLATE),
    **{
        name: Method(ReuseMode.TRANSLATE, {"estimator": name}, {"move": "unlearned"})
        for name in get_args(EstimatorName)
    },
}
"""What an engine can be set to. `served` is the default, cold start and proof included, `kedge` moves without
proof, and an estimator's name is Kedge with that estimator's anchors
wherever they are learned."""


def method_named(name: str, known: Mapping[str, Method] = SERVED) -> Method:
    """Return one of the `known` methods, with settings of its own: `token:weak_error=0.25`.

    Raises `ConfigError` for an unknown one, or a setting that neither anchors nor the planner have.
    """
    base, *given = name.split(":")
    if base not in known:
        raise ConfigError("method", base, f"must be one of {', '.join(known)}")
    method = known[base]
    for one in given:
        key, _, value = one.partition("=")
        if key in AnchorSettings.model_fields:
            method = replace(method, anchors={**method.anchors, key: value})
        elif key in PlannerConstants.model_fields:
            method = replace(method, planner={**method.planner, key: value})
        elif key in GuardSettings.model_fields:
            method = replace(method, guard={**(method.guard or {}), key: value})
        else:
            raise ConfigError(
                f"method {base}", one, "must be key=value, a setting of engine.anchors, .planner or .guard"
            )
    method.config({}, {})  # its values are checked here, before a model is loaded
    return method


@dataclass(frozen=True)
class ProbeResult:
    """The observations of one request."""

    request: GenerateRequest
    completion: Completion
    logits: Tensor
    """float32 [up to the probe's `rows`, vocab] on the CPU, one row per token of the answer."""
    kv: KVSegment | None
    """The prompt's KV when the first token was drawn, keys unrotated; None unless requested."""


@dataclass
class _Watched:
    """What is recorded of one request beside its logits. Only the engine's thread writes to it."""

    wants_kv: bool
    read: Callable[[], KVSegment] | None = None
    kv: KVSegment | None = None

    def prompt_is_computed(self) -> None:
        """Read the prompt's KV, if it is wanted and has not been."""
        if self.wants_kv and self.kv is None and self.read:
            self.kv = self.read()


@dataclass
class _Drawn:
    """A draw function that follows `draw`, and records the logits of the first `rows` tokens."""

    draw: Draw
    rows: int
    watched: _Watched
    logits: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, logits: Tensor) -> int:
        self.watched.prompt_is_computed()
        if len(self.logits) < self.rows:
            self.logits[len(self.logits)] = logits.float().cpu().clone()
        return self.draw(logits)


@dataclass
class _Forced(ForcedAnswer):
    """A forced answer of a watched request."""

    watched: _Watched = field(kw_only=True)

    def __call__(self, logits: Tensor) -> int:
        self.watched.prompt_is_computed()
        return ForcedAnswer.__call__(self, logits)


class Probe:
    """The observer of one engine, which has to be built with `probe.components`.

    While `teaching`, that engine prefills everything densely and learns from it, whatever the plan.
    """

    def __init__(self, components: EngineComponents = EngineComponents(), rows: int = 32) -> None:  # noqa: B008 (frozen)
        """Observe nothing yet. Of each answer the logits of the first `rows` tokens are kept."""
        self.watched: dict[RequestId, _Watched] = {}
        self.teaching, self.rows = False, rows
        self._grammars: Grammars | None = None
        self.components = replace(components, assembler=partial(self._assembler, components))

    def _assembler(self, components: EngineComponents, runner: ModelRunner, storage: PagedStorage) -> Assembler:
        return _ProbingAssembler(components.assembler(runner, storage), storage, self)

    def _grammars_of(self, engine: LocalEngine) -> Grammars:
        if self._grammars is None:
            runner = engine.runner
            self._grammars = Grammars(engine.tokenizer, runner.eos_token_ids, runner.vocab_size)
        return self._grammars

    def submit(
        self, engine: LocalEngine, request: GenerateRequest, forced: Tokens | None = None, *, kv: bool = False
    ) -> ProbedRequest:
        """Submit a request; with `forced` it gives that answer whatever the logits are (teacher forcing)."""
        watched, sampling = _Watched(kv), request.sampling
        probe: _Drawn | _Forced
        if forced:
            sampling = replace(sampling, max_tokens=len(forced), ignore_eos=True, stop=())
            request = replace(request, forced=forced)
            probe = _Forced(forced, self.rows, watched=watched)
        else:
            draw = Sampler(sampling, grammar=self._grammars_of(engine).begin(sampling.grammar))
            probe = _Drawn(draw, self.rows, watched)
        # A grammar is followed behind the probe, which is to see what the model says of all tokens.
        submitted = replace(request, sampling=replace(sampling, grammar=""))
        self.watched[request.request_id] = watched
        close = partial(self.watched.pop, request.request_id, None)
        return ProbedRequest(request, engine.submit(submitted, probe), probe, close)


@dataclass(frozen=True)
class ProbedRequest:
    """A submitted request under observation."""

    request: GenerateRequest
    stream: TokenStream
    _probe: _Drawn | _Forced
    _close: Callable[[], object]

    def result(self, timeout: float | None = None) -> ProbeResult:
        """Wait for the end. Raises the request's error."""
        try:
            completion = self.stream.result(timeout)
        finally:
            self._close()
        rows = self._probe.logits
        logits = torch.stack([rows[at] for at in range(len(rows))])
        rows.clear()  # a vocabulary wide each: they are not kept twice
        return ProbeResult(self.request, completion, logits, self._probe.watched.kv)


def constrained(workload: Team, question: Question, request: GenerateRequest) -> GenerateRequest:
    """Return a request whose answer has to conform to what its workload says of the question."""
    grammar = workload.grammar(request.agent, question)
    return replace(request, sampling=replace(request.sampling, grammar=grammar))


class ChangingEngine(Engine):
    """An engine in front of another one, which stays open: `prepare` may change a request before it is submitted."""

    def __init__(self, engine: Engine, prepare: Callable[[GenerateRequest], GenerateRequest]) -> None:
        self._engine, self._prepare = engine, prepare
        self.tokenizer = engine.tokenizer

    @property
    def failure(self) -> BaseException | None:
        return self._engine.failure

    def submit(self, request: GenerateRequest) -> Stream:
        return self._engine.submit(self._prepare(request))

    def cancel(self, request_id: RequestId) -> bool:
        return self._engine.cancel(request_id)

    def end_run(self, run: RunKey) -> None:
        self._engine.end_run(run)

    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        self._engine.forecast(changes, prompts)

    def close(self) -> None:
        """Do nothing: the engine's owner closes it."""


class Recorder(ChangingEngine):
    """An engine that observes every request of a run."""

    def __init__(
        self, engine: LocalEngine, probe: Probe, prepare: Callable[[GenerateRequest], GenerateRequest], *, kv: bool
    ) -> None:
        super().__init__(engine, prepare)
        self._observe = partial(probe.submit, engine, kv=kv)
        self.pending: list[ProbedRequest] = []
        """In the order of submission."""

    def submit(self, request: GenerateRequest) -> TokenStream:
        self.pending.append(self._observe(self._prepare(request)))
        return self.pending[-1].stream


@dataclass(frozen=True)
class _ProbingAssembler:
    """An assembler that gives each request's probe access to its KV."""

    works_ahead: ClassVar[bool] = False
    inner: Assembler
    storage: PagedStorage
    probe: Probe

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        if watched := self.probe.watched.get(request.request_id):
            watched.read = partial(self.storage.read, table, 0, request.prompt_tokens)
        return self.inner.assemble(request, table, _densely(plan) if self.probe.teaching else plan)


def _densely(plan: ReusePlan) -> ReusePlan:
    """Return the plan with the same exact tokens and all others computed."""
    sources = [span.source for span in plan.spans for _ in range(len(span))]
    computed = (Source.COMPUTED if source is Source.TRANSLATED else source for source in sources)
    return ReusePlan(spans_of(computed), misses=plan.misses)


def compare_logits(dense: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the mean KL(dense ‖ other) in nats and the share of equal argmax, for logits [rows, vocab]."""
    log_p, log_q = dense.double().log_softmax(1), other.double().log_softmax(1)
    kl = (log_p.exp() * (log_p - log_q)).sum(1).mean()
    return float(kl), float((dense.argmax(1) == other.argmax(1)).double().mean())
