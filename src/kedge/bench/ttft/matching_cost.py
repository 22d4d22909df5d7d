"""The cost of matching a value and blending its offsets, by estimator (KVCOMM, Table A.5).

Random base KV of a model's shape, with pools of `samples` anchors; every repeat matches a new value. The criterion's
thresholds are opened, because random KV has no meaning; its work stays in the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from kedge.anchors.registry import ESTIMATORS
from kedge.anchors.store import AnchorStore
from kedge.anchors.translator import CHUNK
from kedge.bench.shapes import SHAPES
from kedge.errors import ConfigError
from kedge.kv.segment import KVSegment
from kedge.reuse.contracts import PlaceholderSite, PoolKey, SampleView
from kedge.settings import AnchorSettings, estimator_settings
from kedge.types import Namespace, TenantId, WorkflowId

_POOL = PoolKey(Namespace(TenantId("bench")), WorkflowId("matching-cost"), "agent_0_current")
_SLOT = PlaceholderSite("template", 1)
T = TypeVar("T")


@dataclass(frozen=True)
class MatchingSettings:
    """The shape of the KV, the size of the pool and the length of the value (tokens)."""

    model_size: str = "32m"
    samples: int = 20
    tokens: int = 500
    repeats: int = 20


QUICK = MatchingSettings(samples=5, tokens=100, repeats=5)
"""A measurement of a few seconds."""


def measure(settings: MatchingSettings) -> dict[str, dict[str, float]]:
    """Measure matching with its verdict, blending, and both, by estimator.

    Returns milliseconds: medians, and the 90th percentile of the sum. Raises `ConfigError` for an unknown model size.
    """
    if settings.model_size not in SHAPES:
        raise ConfigError("model-size", settings.model_size, f"must be one of {', '.join(SHAPES)}")
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in ESTIMATORS}
    stores = {name: _filled(name, settings) for name in ESTIMATORS}
    for i in range(settings.repeats + 1):  # in turns, so that other load on the machine hits all of them
        for name, store in stores.items():
            rounds[name].append(_once(store, _value(settings, 10_000 + i)))
    return {name: _summary(times[1:]) for name, times in rounds.items()}


def _filled(name: str, settings: MatchingSettings) -> AnchorStore:
    store = AnchorStore(
        AnchorSettings(
            **estimator_settings(name), capacity=settings.samples, min_anchors=1, gamma=2.0, max_error=1e9,
            weak_error=1e9, max_bytes=16 << 30,
        )
    )  # fmt: skip
    for seed in range(settings.samples):
        value = _value(settings, seed)
        store.observe(_SLOT, value, _value(settings, seed + 1000).base)
    return store


def _value(settings: MatchingSettings, seed: int) -> SampleView:
    shape = SHAPES[settings.model_size]
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    size = (shape["num_hidden_layers"], settings.tokens, shape["num_key_value_heads"], head_dim)
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(size, generator=generator) for _ in range(2))
    return SampleView(_POOL, tuple(range(seed, seed + settings.tokens)), KVSegment(keys, values), seed)


def _once(store: AnchorStore, value: SampleView) -> tuple[float, float]:
    match_s, estimate = _timed(lambda: store.estimate(_SLOT, value))
    assert estimate.value is not None and estimate.value_table is not None, estimate.reason
    blend, table = estimate.value, estimate.value_table
    blend_s, _ = _timed(lambda: [table.blend(blend.slice(at, at + CHUNK)) for at in range(0, blend.tokens, CHUNK)])
    return match_s * 1e3, blend_s * 1e3


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def _summary(times: list[tuple[float, float]]) -> dict[str, float]:
    both = sorted(match + blend for match, blend in times)
    return {
        "match_ms": round(statistics.median(match for match, _ in times), 3),
        "blend_ms": round(statistics.median(blend for _, blend in times), 3),
        "both_ms": round(statistics.median(both), 3),
        "both_p90_ms": round(both[int(0.9 * (len(both) - 1))], 3),
    }
