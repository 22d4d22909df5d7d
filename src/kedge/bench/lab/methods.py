"""The ways to serve a workflow that the papers' tables compare, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.anchors.registry import ESTIMATORS
from kedge.bench.lab.baselines import Ablation, NoAnchors
from kedge.bench.lab.cacheblend import CacheBlend
from kedge.bench.lab.seams import WHOLE, Seams
from kedge.engine.common.model_folder import model_path
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local import build
from kedge.engine.local.components import EngineComponents
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.runner import ModelRunner
from kedge.errors import ConfigError
from kedge.settings import AnchorSettings, EngineSettings, PlannerSettings, estimator_settings
from kedge.types import ReuseMode

_PAPER: Mapping[str, Any] = {
    "recompute_head": 0,
    "recompute_short": 0,
    "trail": 0,
    "min_translated": 0.0,
    "unknown": "dense",
}
"""The paper recomputes one token, keeps no trail behind values, and has no least share."""


@dataclass(frozen=True)
class Method:
    """A way to serve requests: the mode, settings that differ from the engine's defaults, and replaced components."""

    reuse: ReuseMode
    anchors: Mapping[str, Any] = field(default_factory=dict)
    planner: Mapping[str, Any] = field(default_factory=dict)
    components: EngineComponents = EngineComponents()

    def config(self, anchors: Mapping[str, Any], planner: Mapping[str, Any], **engine: Any) -> EngineSettings:
        """Return the settings of an engine that serves this way; the arguments override the method's own.

        Cost-based choices are off: methods are compared by what they translate.
        """
        return EngineSettings(
            anchors=AnchorSettings(**{**self.anchors, **anchors}),
            planner=PlannerSettings(**{"by_cost": False, **self.planner, **planner}),
            **engine,
        )


def ablation(*, rotation: bool, values: bool, prefixes: bool) -> Method:
    """Return KVCOMM as published without some of its three steps (Table 5)."""
    steps = Ablation(rotation, values, prefixes)
    return Method(ReuseMode.TRANSLATE, estimator_settings("interpolate"), _PAPER, EngineComponents(assembler=steps))


def cacheblend(*ratios: float) -> Method:
    """Return CacheBlend with these shares of recomputed tokens."""
    return Method(ReuseMode.TRANSLATE, planner=_PAPER, components=EngineComponents(NoAnchors, CacheBlend(ratios)))


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
    "rotation": Method(
        ReuseMode.TRANSLATE,
        planner=_PAPER,
        components=EngineComponents(NoAnchors, Ablation(values=False, prefixes=False)),
    ),
    "cacheblend": cacheblend(0.3, 0.25, 0.2),
    "seams": seams(4),
    "answers": seams(WHOLE, inputs=False),
    "kvcomm": Method(ReuseMode.TRANSLATE, estimator_settings("interpolate"), _PAPER),
    "no-rotation": ablation(rotation=False, values=True, prefixes=True),
    "no-phi": ablation(rotation=True, values=False, prefixes=True),
    "no-prefix": ablation(rotation=True, values=True, prefixes=False),
    **{name: Method(ReuseMode.TRANSLATE, estimator_settings(name)) for name in ESTIMATORS},
}
"""`kvcomm` is the paper's design as published, `seams` and `answers` have no anchors (Kedge serves as `answers`
what no anchor knows), and an estimator's name is that estimator with Kedge's defaults."""


def method_named(name: str) -> Method:
    """Return the method of this name. Raises `ConfigError` for an unknown one."""
    if name not in METHODS:
        raise ConfigError("method", name, f"must be one of {', '.join(METHODS)}")
    return METHODS[name]


Loaded = tuple[ModelRunner, HFTokenizer]


def load_model(model: Path | None, config: EngineSettings) -> Loaded:
    """Load a model (None: the bundled one) for several engines, of which only one may work at a time."""
    path = model_path(model)
    return build.load_runner(path, config), HFTokenizer.load(path)


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
