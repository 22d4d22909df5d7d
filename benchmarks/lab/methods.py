"""The ways to serve a workflow that the papers' tables compare, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab.baselines import WHOLE, Ablation, NoAnchors, Seams
from benchmarks.lab.cacheblend import RATIOS, CacheBlend
from benchmarks.lab.relay import DecodedBases, RelayCaching, RelayedAnswers
from kedge.anchors.registry import ESTIMATORS
from kedge.bench.shapes import Loaded
from kedge.engine.local.components import EngineComponents
from kedge.engine.local.engine import LocalEngine
from kedge.errors import ConfigError
from kedge.guard import GuardMode
from kedge.models import NANO_BOTH
from kedge.settings import AnchorSettings, EngineSettings, GuardSettings, PlannerSettings, estimator_settings
from kedge.types import ReuseMode
from kedge.workflow.graph import Workflow
from kedge.workloads.miniature import TOOLS, role_last

_PAPER: Mapping[str, Any] = {
    "recompute_head": 0,
    "pick_tail": 0,
    "recompute_short": 0,
    "trail": 0,
    "surprise": math.inf,
    "min_translated": 0.0,
    "move": "never",
}
"""The paper recomputes one token, keeps no trail behind values, computes no unexpected tokens of answers, and has no
least share."""

_ANCHORED: Mapping[str, Any] = {"move": "unlearned"}


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

    @property
    def learns(self) -> bool:
        """Whether it learns anchors from past questions."""
        store = self.components.anchors
        has_none = isinstance(store, type) and issubclass(store, NoAnchors)
        return self.reuse is ReuseMode.TRANSLATE and not has_none

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
            planner=PlannerSettings(**{"by_cost": False, **self.planner, **planner}),
            **{"guard": GuardSettings(mode=GuardMode.OFF), **engine},
        )


def ablation(*, rotation: bool, values: bool, prefixes: bool) -> Method:
    """Return KVCOMM as published without some of its three steps (Table 5)."""
    steps = Ablation(rotation, values, prefixes)
    return Method(ReuseMode.TRANSLATE, estimator_settings("interpolate"), _PAPER, EngineComponents(assembler=steps))


def cacheblend(*ratios: float) -> Method:
    """Return CacheBlend with these shares of recomputed tokens."""
    components = EngineComponents(NoAnchors, CacheBlend(ratios))
    return Method(ReuseMode.TRANSLATE, planner=_PAPER, components=components, is_timed=False)


def epic(first: int) -> Method:
    """Return EPIC's LegoLink (Hu et al., arXiv 2410.15332): base KV at its new place, with the `first` tokens of every
    moved chunk recomputed.

    A chunk's first tokens attended to nothing before them when its base KV was computed, and later ones attend to them
    as to the beginning of a text. Here every value and every prefix segment behind one is a chunk; a shorter one is
    recomputed as a whole. Raises `ConfigError` for a negative number.
    """
    if first < 0:
        raise ConfigError("epic.first", first, "must be at least 0")
    return Method(
        ReuseMode.TRANSLATE,
        planner={**_PAPER, "recompute_head": first},
        components=EngineComponents(NoAnchors, Ablation(values=False, prefixes=False)),
    )


def relay(share: float | None = None) -> Method:
    """Return RelayCaching, with this share of each answer's tokens corrected; None: as its thresholds choose them."""
    components = EngineComponents(RelayedAnswers, RelayCaching(share), DecodedBases)
    return Method(ReuseMode.TRANSLATE, planner=_PAPER, components=components, is_timed=share == 0)


def seams(last: int, *, inputs: bool = True) -> Method:
    """Return rotation with a trail behind each value and the `last` tokens of every prefix segment computed; without
    `inputs`, questions and tool results are computed as well.

    It has no anchors. Criterion `length` keeps the trail of answers, too.
    """
    components = EngineComponents(NoAnchors, Seams(last, inputs))
    planner = {**_PAPER, "trail": PlannerSettings().trail}
    return Method(ReuseMode.TRANSLATE, {"criterion": "length"}, planner, components)


METHODS: Mapping[str, Method] = {
    "dense": Method(ReuseMode.OFF),
    "exact": Method(ReuseMode.EXACT),
    "role-last": Method(ReuseMode.EXACT, team=role_last),
    "rotation": epic(0),
    "epic": epic(16),
    "cacheblend": cacheblend(*RATIOS),
    "relay": relay(),
    "seams": seams(4),
    "answers": seams(WHOLE, inputs=False),
    "kvcomm": Method(ReuseMode.TRANSLATE, estimator_settings("interpolate"), _PAPER),
    "no-rotation": ablation(rotation=False, values=True, prefixes=True),
    "no-phi": ablation(rotation=True, values=False, prefixes=True),
    "no-prefix": ablation(rotation=True, values=True, prefixes=False),
    "kedge": Method(ReuseMode.TRANSLATE),
    **{name: Method(ReuseMode.TRANSLATE, estimator_settings(name), _ANCHORED) for name in ESTIMATORS},
}
"""`kvcomm`, `epic`, `cacheblend` and `relay` are as published, `seams` and `answers` have no anchors, `kedge` is the
default, and an estimator's name is Kedge with that estimator's anchors wherever they are learned."""


def method_named(name: str) -> Method:
    """Return the method of this name. Raises `ConfigError` for an unknown one."""
    if name not in METHODS:
        raise ConfigError("method", name, f"must be one of {', '.join(METHODS)}")
    return METHODS[name]


def fitting_model(task: str, methods: Iterable[Method]) -> Path | None:
    """Return the bundled model that has learned a task and the prompts of all methods, which share one model:
    `nano-both` for `tools` and for prompts with the role last; None is the default one.
    """
    needs_both = task == TOOLS.name or any(method.team is role_last for method in methods)
    return Path(NANO_BOTH) if needs_both else None


def open_engine(
    method: Method,
    loaded: Loaded,
    anchors: Mapping[str, Any] | None = None,
    planner: Mapping[str, Any] | None = None,
    components: EngineComponents | None = None,
    **engine: Any,
) -> LocalEngine:
    """Open an engine that serves by `method`; `anchors`, `planner` and `engine` override its settings,
    `components` its components.
    """
    runner, tokenizer = loaded
    config = method.config(anchors or {}, planner or {}, **engine)
    return LocalEngine.from_runner(runner, tokenizer, config, components=components or method.components)
