"""Ways to serve requests, and a look inside: answers that are forced, the logits of each, and the prompt's KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from pydantic import BaseModel
from torch import Tensor

from kedge.bench.shapes import Loaded
from kedge.engine.common.stream import TokenStream
from kedge.engine.common.watched import WatchedEngine, Watcher
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.sampler import ForcedAnswer, Sampler
from kedge.errors import ConfigError
from kedge.guard import GuardMode
from kedge.kv.segment import KVSegment
from kedge.settings import AnchorSettings, EngineSettings, GuardSettings, PlannerConstants
from kedge.settings.sections import EstimatorName
from kedge.types import Completion, GenerateRequest, ReuseMode, Tokens

SECTIONS: Mapping[str, type[BaseModel]] = {
    "anchors": AnchorSettings,
    "planner": PlannerConstants,
    "guard": GuardSettings,
}
"""Those of an engine's settings that a method may have of its own"""


@dataclass(frozen=True)
class Method:
    """A way to serve requests: the mode, and settings that differ from the engine's defaults."""

    reuse: ReuseMode
    anchors: Mapping[str, Any] = field(default_factory=dict)
    planner: Mapping[str, Any] = field(default_factory=dict)
    guard: Mapping[str, Any] | None = None
    """The guard's settings: it proves what it serves, from the first question on. None: without a guard."""

    @property
    def learns(self) -> bool:
        """Whether it learns anchors from past questions, before those that count."""
        return self.reuse is ReuseMode.TRANSLATE and self.guard is None

    def config(self, **engine: Any) -> EngineSettings:
        """Return the settings of an engine that serves this way. Cost-based choices are off, and without settings of
        its own the guard: methods are compared by what they translate.
        """
        guard = {"mode": GuardMode.OFF} if self.guard is None else self.guard
        own = {"anchors": self.anchors, "planner": {"by_cost": False, **self.planner}, "guard": guard}
        return EngineSettings(**{**{name: SECTIONS[name](**given) for name, given in own.items()}, **engine})

    def open(self, loaded: Loaded, **engine: Any) -> LocalEngine:
        """Open an engine that serves this way."""
        return LocalEngine.from_runner(*loaded, self.config(**engine))


SERVED: Mapping[str, Method] = {
    "dense": Method(ReuseMode.OFF),
    "exact": Method(ReuseMode.EXACT),
    "served": Method(ReuseMode.TRANSLATE, guard={}),
    "kedge": Method(ReuseMode.TRANSLATE),
    **{
        name: Method(ReuseMode.TRANSLATE, {"estimator": name}, {"move": "unlearned"})
        for name in get_args(EstimatorName)
    },
    "epic": Method(ReuseMode.TRANSLATE, planner={"recompute_head": 16}),
    "kvcomm": Method(
        ReuseMode.TRANSLATE,
        {"estimator": "interpolate"},
        {"recompute_short": 0, "min_translated": 0.0, "move": "never"},
    ),
}
"""What an engine can be set to. `served` is the default, cold start and proof included; `kedge` moves all it can,
without proof; an estimator's name is Kedge with that estimator's anchors wherever they are learned. `epic` computes the
first 16 tokens of each text that is moved (LegoLink, arXiv 2410.15332); `kvcomm` is the paper's design as published:
nothing is moved without anchors, one token is computed, and there is no least share."""


def method_named(name: str) -> Method:
    """Return a method by name, with settings of its own: `token:weak_error=0.25`.

    Raises `ConfigError` for an unknown one, or a setting that neither anchors nor the planner have.
    """
    base, *given = name.split(":")
    if base not in SERVED:
        raise ConfigError("method", base, f"must be one of {', '.join(SERVED)}")
    method = SERVED[base]
    for one in given:
        key, _, value = one.partition("=")
        section = next((name for name, kind in SECTIONS.items() if key in kind.model_fields), None)
        if section is None:
            raise ConfigError(f"method {base}", one, f"must be key=value, a setting of {', '.join(SECTIONS)}")
        changed: dict[str, Any] = {section: {**(getattr(method, section) or {}), key: value}}
        method = replace(method, **changed)
    method.config()  # its values are checked here, before a model is loaded
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


@dataclass(frozen=True)
class ProbedRequest:
    """A submitted request under observation."""

    request: GenerateRequest
    stream: TokenStream
    logits: dict[int, Tensor]
    kv: list[KVSegment]
    """The prompt's, once it was read"""

    def result(self) -> ProbeResult:
        """Wait for the end. Raises the request's error."""
        completion = self.stream.result()
        logits = torch.stack([self.logits[at] for at in range(len(self.logits))])
        self.logits.clear()  # a vocabulary wide each: they are not kept twice
        return ProbeResult(self.request, completion, logits, next(iter(self.kv), None))


class Recorder(WatchedEngine):
    """An engine that observes all requests of a run. Nothing is prepared ahead: all methods do the same work."""

    def __init__(self, engine: LocalEngine, rows: int, *, kv: bool) -> None:
        """Observe nothing yet. Of each answer the logits of the first `rows` tokens are kept, by `kv` also the prompt's
        KV when the first token is drawn.
        """
        super().__init__(engine, Watcher())
        self._local, self._rows, self._kv = engine, rows, kv
        self._parts = engine.query(lambda parts: parts)
        self.pending: list[ProbedRequest] = []
        """In the order of submission."""

    def submit(self, request: GenerateRequest) -> Any:
        sampler, held, logits = Sampler(request.sampling), list[KVSegment](), dict[int, Tensor]()

        def draw(row: Tensor) -> int:
            if self._kv and not held:
                held.append(self._read(request))
            if len(logits) < self._rows:
                logits[len(logits)] = row.float().cpu().clone()
            return sampler(row)

        stream = self._local.submit(request, draw)
        self.pending.append(ProbedRequest(request, stream, logits, held))
        return stream

    def prepare(self, request: GenerateRequest) -> None:
        """Do nothing."""

    def _read(self, request: GenerateRequest) -> KVSegment:
        """Return the KV of a prompt that is computed. Called by the engine's thread."""
        table = next(one.table for one in self._parts.running if one.request.request_id == request.request_id)
        assert table is not None
        return self._parts.storage.read(table, 0, request.prompt_tokens)


def force(engine: LocalEngine, request: GenerateRequest, answer: Tokens, rows: int) -> ProbedRequest:
    """Submit a request that gives this answer, whatever the logits are (teacher forcing); `rows` of them are kept."""
    sampling = replace(request.sampling, max_tokens=len(answer), ignore_eos=True, stop=())
    request, forced = replace(request, forced=answer, sampling=sampling), ForcedAnswer(answer, rows)
    return ProbedRequest(request, engine.submit(request, forced), forced.logits, [])
