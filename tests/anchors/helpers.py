"""Synthetic KV: random base KV, and offsets that depend on it in a fixed way for each agent."""

import pytest
import torch

from kedge.anchors.anchor import PlaceholderSite, PoolKey, SampleView
from kedge.anchors.estimators import ESTIMATORS
from kedge.anchors.offsets import split_rows
from kedge.anchors.sites import OffsetEstimate
from kedge.anchors.store import AnchorStore
from kedge.kv.segment import KVSegment
from kedge.settings import AnchorSettings
from kedge.types import Namespace

LAYERS, HEADS, DIM = 4, 2, 8
POOL = PoolKey(Namespace("tenant"), "flow", "agent_a_current")
SLOT = PlaceholderSite("solver", 1)
PREFIX = 5


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_kv(tokens: int, seed: int, dtype: torch.dtype = torch.float32, layers: int = LAYERS) -> KVSegment:
    keys, values = torch.randn(2, layers, tokens, HEADS, DIM, generator=generator(seed))
    return KVSegment(keys.to(dtype), values.to(dtype))


def in_context(base: KVSegment, seed: int, size: float = 0.5) -> KVSegment:
    """Real KV: base KV plus a random offset in every layer but the first."""
    offset = random_kv(base.tokens, seed, layers=base.layers)
    keys, values = base.keys.clone(), base.values.clone()
    keys[1:] += (size * offset.keys[1:]).to(base.dtype)
    values[1:] += (size * offset.values[1:]).to(base.dtype)
    return KVSegment(keys, values)


def sample(seed: int, tokens: int = 12, dtype: torch.dtype = torch.float32, pool: PoolKey = POOL) -> SampleView:
    return SampleView(pool, tuple(range(seed, seed + tokens)), random_kv(tokens, seed, dtype), ("sample", seed, tokens))


PREFIX_BASE = random_kv(PREFIX, 999)


def observe(store: AnchorStore, value: SampleView, site: PlaceholderSite = SLOT, seed: int | None = None) -> KVSegment:
    """One dense prefill of `value` in `site`; returns its real KV."""
    seed = 10_000 + 100 * sum(value.tokens) + site.index if seed is None else seed
    real = in_context(value.base, seed)
    store.observe(site, value, real, PREFIX_BASE, in_context(PREFIX_BASE, seed + 1))
    return real


def filled(seeds: range, site: PlaceholderSite = SLOT, **settings: object) -> AnchorStore:
    store = AnchorStore(AnchorSettings(**settings))
    for seed in seeds:
        observe(store, sample(seed), site)
    return store


def plus(base: KVSegment, rows: torch.Tensor) -> KVSegment:
    """Base KV with offsets added to all layers but the first."""
    offsets = split_rows(rows, base)
    return KVSegment(
        torch.cat([base.keys[:1], base.keys[1:] + offsets.keys]),
        torch.cat([base.values[:1], base.values[1:] + offsets.values]),
    )


def translated(estimate: OffsetEstimate, value: SampleView) -> KVSegment:
    return plus(value.base, estimate.value_table.blend(estimate.value))


def translated_prefix(estimate: OffsetEstimate) -> KVSegment:
    return plus(PREFIX_BASE, estimate.prefix_table.blend(estimate.prefix))


def relative_error(got: KVSegment, wanted: KVSegment) -> float:
    return max(
        float((got.keys - wanted.keys).norm() / wanted.keys.norm()),
        float((got.values - wanted.values).norm() / wanted.values.norm()),
    )


OPEN = {"max_error": 1e9, "weak_error": 1e9, "min_anchors": 2}
"""Thresholds that let everything pass"""
TOKEN, INTERPOLATE = ({"estimator": name, **OPEN} for name in ("token", "interpolate"))
each_estimator = pytest.mark.parametrize(
    "settings", [pytest.param({"estimator": name, **OPEN}, id=name) for name in ESTIMATORS]
)
