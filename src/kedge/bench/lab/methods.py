"""The ways to serve a workflow that the papers' tables compare, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.anchors.registry import ESTIMATORS
from kedge.bench.lab.baselines import Ablation, NoAnchors
from kedge.bench.lab.cacheblend import CacheBlend
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local import build
from kedge.engine.local.components import Parts
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.runner import ModelRunner
from kedge.errors import ConfigError
from kedge.settings import AnchorSettings, EngineSettings, PlannerSettings, estimator_settings
from kedge.types import ReuseMode

_PAPER: Mapping[str, Any] = {"recompute_head": 0, "recompute_short": 0, "trail": 0, "min_translated": 0.0}
"""The paper recomputes one token, keeps values without what follows them, and knows no least share"""


@dataclass(frozen=True)
class Method:
    """How requests are served: the mode, settings that differ from the engine's own, and replaced parts."""

    reuse: ReuseMode
    anchors: Mapping[str, Any] = field(default_factory=dict)
    planner: Mapping[str, Any] = field(default_factory=dict)
    parts: Parts = Parts()

    def config(self, anchors: Mapping[str, Any], planner: Mapping[str, Any], **engine: Any) -> EngineSettings:
        """Settings of an engine that serves like this; what is given here wins.

        Methods are compared at what they translate, so that nothing is computed because that would cost less.
        """
        return EngineSettings(
            anchors=AnchorSettings(**{**self.anchors, **anchors}),
            planner=PlannerSettings(**{"by_cost": False, **self.planner, **planner}),
            **engine,
        )


def ablation(*, rotation: bool, values: bool, prefixes: bool) -> Method:
    """KVCOMM as published, with some of its three steps left out (Table 5)."""
    steps = Ablation(rotation, values, prefixes)
    return Method(ReuseMode.TRANSLATE, estimator_settings("interpolate"), _PAPER, Parts(assembler=steps))


def cacheblend(*ratios: float) -> Method:
    """CacheBlend with these shares of recomputed tokens."""
    return Method(ReuseMode.TRANSLATE, planner=_PAPER, parts=Parts(NoAnchors, CacheBlend(ratios)))


METHODS: Mapping[str, Method] = {
    "dense": Method(ReuseMode.OFF),
    "exact": Method(ReuseMode.EXACT),
    "rotation": Method(
        ReuseMode.TRANSLATE, planner=_PAPER, parts=Parts(NoAnchors, Ablation(values=False, prefixes=False))
    ),
    "cacheblend": cacheblend(0.3, 0.25, 0.2),
    "kvcomm": Method(ReuseMode.TRANSLATE, estimator_settings("interpolate"), _PAPER),
    "no-rotation": ablation(rotation=False, values=True, prefixes=True),
    "no-phi": ablation(rotation=True, values=False, prefixes=True),
    "no-prefix": ablation(rotation=True, values=True, prefixes=False),
    **{name: Method(ReuseMode.TRANSLATE, estimator_settings(name)) for name in ESTIMATORS},
}
"""`kvcomm` is the paper's design as published; an estimator's own name is that estimator in Kedge as it is set up"""


def method_named(name: str) -> Method:
    """Raises `ConfigError` for a name that no method has."""
    if name not in METHODS:
        raise ConfigError("method", name, f"is none of {', '.join(METHODS)}")
    return METHODS[name]


Loaded = tuple[ModelRunner, HFTokenizer]


def load_model(model: Path | None, config: EngineSettings) -> Loaded:
    """A model (None: the bundled one) that several engines can share, as long as only one of them works at a time."""
    path = build.model_path(model)
    return build.load_runner(path, config), HFTokenizer.load(path)


def open_engine(
    method: Method,
    loaded: Loaded,
    anchors: Mapping[str, Any] | None = None,
    planner: Mapping[str, Any] | None = None,
    parts: Parts | None = None,
    **engine: Any,
) -> LocalEngine:
    """An engine that serves by `method`; `anchors`, `planner` and `engine` are settings that win over the method's, and
    `parts` replace its parts."""
    runner, tokenizer = loaded
    config = method.config(anchors or {}, planner or {}, **engine)
    return LocalEngine.from_runner(runner, tokenizer, config, parts=parts or method.parts)
