"""`linear` and `linear+token` as the store serves them, on offsets whose law is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kedge.anchors.anchor import AnchorId
from kedge.anchors.offsets import rows_of
from kedge.anchors.sites import CorrectedOffsets, LinearOffsets, Observation, Ridge
from kedge.anchors.store import AnchorStore
from kedge.errors import PlanError, TranslationRefused
from kedge.kv.segment import KVSegment
from kedge.reuse.contracts import SampleView
from kedge.settings import AnchorSettings
from tests.anchors.helpers import (
    DIM,
    HEADS,
    LAYERS,
    OPEN,
    PREFIX,
    PREFIX_BASE,
    SLOT,
    filled,
    generator,
    in_context,
    observe,
    plus,
    random_kv,
    relative_error,
    sample,
    translated,
    translated_prefix,
)

WEIGHTS = 0.3 * torch.randn((LAYERS - 1) * 2 * HEADS, DIM, DIM, generator=generator(5))
SHAPE = (LAYERS - 1, 2, HEADS, DIM)


def lawful(base: KVSegment) -> KVSegment:
    """Real KV whose offset is linear in the base KV of its head."""
    rows = rows_of(base).view(base.tokens, -1, DIM)
    return plus(base, torch.einsum("tgd,gde->tge", rows, WEIGHTS).flatten(1))


def learned(estimator: str, samples: int) -> AnchorStore:
    store = AnchorStore(AnchorSettings(estimator=estimator, **OPEN))
    for seed in range(samples):
        value = sample(seed)
        store.observe(SLOT, value, lawful(value.base), PREFIX_BASE, in_context(PREFIX_BASE, seed))
    return store


@pytest.mark.parametrize(("estimator", "wrong"), [("linear", 0.02), ("linear+token", 0.02), ("token", 0.2)])
def test_a_linear_law_is_learned_by_the_regressions_only(estimator: str, wrong: float) -> None:
    store, value = learned(estimator, 8), sample(100, tokens=20)
    error = relative_error(translated(store.estimate(SLOT, value), value), lawful(value.base))
    assert error > wrong if estimator == "token" else error < wrong


def test_linear_is_the_regression_over_all_tokens_seen() -> None:
    store, value = filled(range(6), estimator="linear", **OPEN), sample(50)
    twin = Ridge(SHAPE, 0.005, torch.device("cpu"))
    again = AnchorStore(AnchorSettings(**OPEN))
    for seed in range(6):
        known = sample(seed)
        real = observe(again, known)
        twin.add(rows_of(known.base), rows_of(real) - rows_of(known.base))
    wanted = plus(value.base, twin.predict(rows_of(value.base)))
    assert relative_error(translated(store.estimate(SLOT, value), value), wanted) < 1e-5


def test_linear_gives_the_prefix_its_mean_offset() -> None:
    store = AnchorStore(AnchorSettings(estimator="linear", **OPEN))
    reals = [in_context(PREFIX_BASE, seed) for seed in range(5)]
    for seed, real in enumerate(reals):
        store.observe(SLOT, sample(seed), in_context(sample(seed).base, seed), PREFIX_BASE, real)
    mean = KVSegment(*(torch.stack([getattr(r, part) for r in reals]).mean(0) for part in ("keys", "values")))
    assert relative_error(translated_prefix(store.estimate(SLOT, sample(70))), mean) < 1e-5


def test_linear_keeps_no_rows_and_forgets_nothing() -> None:
    strict = {**OPEN, "max_error": 1e-9}  # nothing is shareable, so everything is learned
    small, large = (filled(range(n), estimator="linear", capacity=4, **strict) for n in (4, 12))
    assert small.stats().anchors == large.stats().anchors == 4
    few, many = (next(iter(store.pools.values())).sites[SLOT] for store in (small, large))
    assert few.nbytes == many.nbytes == few.ridge.nbytes + PREFIX * (LAYERS - 1) * 2 * HEADS * DIM * 4
    assert few.tables == many.tables == ()
    rows = rows_of(sample(90).base)
    assert float((few.ridge.predict(rows) - many.ridge.predict(rows)).norm()) > 1e-2
    large.check_integrity()


def test_linear_token_recovers_a_repeat_and_linear_does_not() -> None:
    for estimator, exact in (("linear+token", True), ("linear", False)):
        store, value = filled(range(5), estimator=estimator, **OPEN), sample(7)
        real = observe(store, value)
        again = SampleView(value.pool, value.tokens, value.base, "another run")
        estimate = store.estimate(SLOT, again)
        assert not estimate.learnable
        assert (relative_error(translated(estimate, value), real) < 2e-3) is exact


def test_linear_token_is_the_lookup_of_what_the_regression_leaves_over() -> None:
    """The residuals written out: W x₀ + Σ w (Δ - W x), over all anchor tokens."""
    store, value = filled(range(6), estimator="linear+token", **OPEN), sample(50)
    lookup = filled(range(6), estimator="token", **OPEN).estimate(SLOT, value)
    ridge, bases, offsets = Ridge(SHAPE, 0.005, torch.device("cpu")), [], []
    again = AnchorStore(AnchorSettings(**OPEN))
    for seed in range(6):
        known = sample(seed)
        bases.append(rows_of(known.base))
        offsets.append(rows_of(observe(again, known)) - bases[-1])
        ridge.add(bases[-1], offsets[-1])
    residual = torch.cat(offsets) - ridge.predict(torch.cat(bases))
    blend = lookup.value  # a fresh table holds its anchors one after the other, so its rows are those of `residual`
    wanted = ridge.predict(rows_of(value.base)) + (residual[blend.rows] * blend.weights[..., None]).sum(1)
    got = store.estimate(SLOT, value)
    assert relative_error(translated(got, value), plus(value.base, wanted)) < 1e-3


@pytest.mark.parametrize("estimator", ["linear", "linear+token"])
def test_a_known_value_does_not_calibrate_with_what_was_learned_from_it(estimator: str) -> None:
    store = filled(range(5), estimator=estimator, **OPEN)
    pool = next(iter(store.pools.values()))
    before = pool.sites[SLOT].calibration.observations
    observe(store, SampleView(sample(0).pool, sample(0).tokens, sample(0).base, "again"))
    assert pool.sites[SLOT].calibration.observations == before
    observe(store, sample(30))
    assert pool.sites[SLOT].calibration.observations == before + 1


@pytest.mark.parametrize("kind", [LinearOffsets, CorrectedOffsets])
def test_what_cannot_be_kept_changes_nothing(kind: type) -> None:
    base = random_kv(6, 0)
    site = kind(base, PREFIX, 0.005)
    good = Observation.measure(base, in_context(base, 1), PREFIX_BASE, in_context(PREFIX_BASE, 2))
    site.put(AnchorId(0), good)
    before = (list(site.holders), [table.anchors for table in site.tables], site.ridge.predict(rows_of(base)))
    bad = in_context(base, 3)
    bad.values[2, 1] = float("nan")
    broken = Observation.measure(base, bad, PREFIX_BASE, in_context(PREFIX_BASE, 2))
    huge = replace(good, value=1e6 * good.value)
    short = replace(good, prefix=good.prefix[:1])
    wrong = [(AnchorId(1), broken, TranslationRefused), (AnchorId(1), short, PlanError), (AnchorId(0), good, PlanError)]
    if kind is CorrectedOffsets:
        wrong.append((AnchorId(1), huge, TranslationRefused))
    for anchor, observed, error in wrong:
        with pytest.raises(error):
            site.put(anchor, observed)
        site.check_integrity()
        assert site.holders == before[0]
        assert [table.anchors for table in site.tables] == before[1]
        assert torch.equal(site.ridge.predict(rows_of(base)), before[2])


@pytest.mark.parametrize("estimator", ["linear", "linear+token"])
def test_half_models_and_bounds_of_memory(estimator: str) -> None:
    value = sample(0, dtype=torch.bfloat16)
    store = AnchorStore(AnchorSettings(estimator=estimator, **OPEN))
    for seed in range(3):
        known = sample(seed, dtype=torch.bfloat16)
        store.observe(SLOT, known, in_context(known.base, seed))
    estimate = store.estimate(SLOT, value)
    assert estimate.value_table.blend(estimate.value).dtype == torch.bfloat16
    tight = AnchorStore(AnchorSettings(estimator=estimator, max_bytes=10_000, **OPEN))
    for seed in range(10):
        observe(tight, sample(seed))
        assert tight.table.nbytes() <= 10_000
        tight.check_integrity()
