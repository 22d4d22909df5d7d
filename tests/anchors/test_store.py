"""Anchors of placeholders: what is recovered, what is shareable, and what is learned from an observation."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kedge.anchors.anchor import PlaceholderSite, PoolKey, SampleView
from kedge.anchors.criteria import Entropy, Error
from kedge.anchors.store import AnchorStore, methods
from kedge.errors import TranslationRefused
from kedge.kv.segment import KVSegment
from kedge.settings import AnchorSettings
from kedge.types import Namespace
from tests.anchors.helpers import (
    INTERPOLATE,
    OPEN,
    POOL,
    PREFIX_BASE,
    SLOT,
    TOKEN,
    each_estimator,
    filled,
    in_context,
    observe,
    random_kv,
    relative_error,
    sample,
    translated,
    translated_prefix,
)


def near(center: KVSegment, seed: int, spread: float) -> SampleView:
    """A value whose base KV differs little from that of the others around this center."""
    noise = random_kv(center.tokens, seed)
    base = KVSegment(center.keys + spread * noise.keys, center.values + spread * noise.values)
    return SampleView(POOL, (seed,) * center.tokens, base, seed)


def test_the_papers_estimator_has_the_papers_criterion_and_each_its_own_limit() -> None:
    assert methods(AnchorSettings(estimator="interpolate"))[1] == Entropy(0.3)
    assert methods(AnchorSettings(estimator="interpolate", max_error=0.5))[1] == Entropy(0.5)
    assert methods(AnchorSettings())[1] == Error(4, 0.35, 0.1)
    assert methods(AnchorSettings(max_error=9, weak_error=2, min_anchors=1))[1] == Error(1, 9, 2)


@each_estimator
@pytest.mark.parametrize("tokens", [1, 12])
def test_an_exact_repeat_of_an_anchor_is_recovered(settings: dict[str, Any], tokens: int) -> None:
    store = filled(range(5), **settings)
    value = sample(7, tokens)
    real = in_context(value.base, 1)
    real_prefix = in_context(PREFIX_BASE, 2)
    store.observe(SLOT, value, real, PREFIX_BASE, real_prefix)
    for seed in range(20, 24):
        observe(store, sample(seed))
    again = SampleView(value.pool, value.tokens, value.base, "another run")
    estimate = store.estimate(SLOT, again)
    assert estimate.shareable
    assert not estimate.learnable
    assert relative_error(translated(estimate, value), real) < 1e-3
    assert relative_error(translated_prefix(estimate), real_prefix) < 1e-3
    assert torch.equal(translated(estimate, value).keys[0], value.base.keys[0])


@each_estimator
def test_a_check_leaves_out_what_was_learned_from_the_value_itself(settings: dict[str, Any]) -> None:
    """With it any estimate would be right."""
    store = filled(range(5), **settings)
    before = store.estimate(SLOT, sample(30))
    expected = translated(before, sample(30))
    real = observe(store, sample(30))
    with_own = store.estimate(SLOT, sample(30))
    assert relative_error(translated(with_own, sample(30)), real) < 1e-3
    without = store.estimate(SLOT, sample(30), leave_out=True)
    assert without.shareable and relative_error(translated(without, sample(30)), expected) < 1e-3
    assert relative_error(translated(store.estimate(SLOT, sample(30)), sample(30)), real) < 1e-3, "of that one only"
    other, same = (store.estimate(SLOT, sample(31), leave_out=leave_out) for leave_out in (True, False))
    assert relative_error(translated(other, sample(31)), translated(same, sample(31))) < 1e-6
    store = filled(range(2), **TOKEN)
    assert store.estimate(SLOT, sample(1)).shareable, "without its own anchor too few may be left"
    refused = store.estimate(SLOT, sample(1), leave_out=True)
    assert not refused.shareable and not refused.learnable


def test_a_weak_error_of_its_own_replaces_that_of_the_settings() -> None:
    store = filled(range(5), **{**TOKEN, "weak_error": 1e9})
    assert store.estimate(SLOT, sample(30)).weak == []
    strict = store.estimate(SLOT, sample(30), 1e-6)
    assert not strict.shareable or len(strict.weak) > 0
    assert store.estimate(SLOT, sample(30)).weak == [], "only for that call"


@each_estimator
def test_similar_values_are_estimated_from_similar_ones(settings: dict[str, Any]) -> None:
    """Offsets that are a smooth function of base KV are predicted far better than by no offset at all."""

    def real(base: KVSegment) -> KVSegment:
        keys, values = base.keys.clone(), base.values.clone()
        keys[1:], values[1:] = keys[1:] * 1.5, values[1:] * 0.5
        return KVSegment(keys, values)

    store, center = AnchorStore(AnchorSettings(**settings)), random_kv(12, 0)
    for seed in range(1, 9):
        value = near(center, seed, 0.2)
        store.observe(SLOT, value, real(value.base))
    value = near(center, 50, 0.2)
    estimate = store.estimate(SLOT, value)
    assert relative_error(translated(estimate, value), real(value.base)) < 0.3 * relative_error(
        value.base, real(value.base)
    )


def test_a_value_longer_than_every_anchor_is_not_shareable_with_interpolate() -> None:
    store = filled(range(5), **INTERPOLATE)
    estimate = store.estimate(SLOT, sample(9, 13))
    assert (estimate.shareable, estimate.reason) == (False, "longer than every anchor")
    assert store.estimate(SLOT, sample(9, 12)).shareable


def test_token_is_not_shareable_before_it_is_calibrated() -> None:
    store = AnchorStore(AnchorSettings())
    reasons = []
    for seed in range(5):
        reasons.append(store.estimate(SLOT, sample(99)).reason)
        observe(store, sample(seed))
    assert reasons == ["no anchor of this agent yet", "1 anchors of 4", "2 anchors of 4", "3 anchors of 4", reasons[-1]]
    assert reasons[-1].startswith("predicted error is")
    alone = filled(range(1), **{**TOKEN, "min_anchors": 1})
    assert alone.estimate(SLOT, sample(99)).reason == "not calibrated yet"


def test_weak_tokens_are_those_that_resemble_nothing() -> None:
    store = AnchorStore(AnchorSettings(max_error=1e9, weak_error=0.5))
    known = random_kv(30, 0)
    shift = in_context(known, 5)
    for seed in range(1, 8):
        value = near(known, seed, 0.05)
        real = KVSegment(value.base.keys + shift.keys - known.keys, value.base.values + shift.values - known.values)
        store.observe(SLOT, value, real)
    value = near(known, 50, 0.05)
    value.base.keys[:, 11:13] = 3 * random_kv(2, 77).keys
    estimate = store.estimate(SLOT, value)
    assert estimate.weak == [11, 12]


def test_weak_tokens_of_the_template_are_those_that_listen_to_the_value() -> None:
    store = AnchorStore(AnchorSettings(max_error=1e9, weak_error=0.5))
    same = in_context(PREFIX_BASE, 1)
    for seed in range(6):
        real = KVSegment(same.keys.clone(), same.values.clone())
        other = random_kv(1, seed + 30)
        real.keys[:, 2], real.values[:, 2] = 3 * other.keys[:, 0], 3 * other.values[:, 0]
        value = sample(seed)
        store.observe(SLOT, value, in_context(value.base, 1), PREFIX_BASE, real)
    estimate = store.estimate(SLOT, sample(99))
    assert estimate.shareable
    assert estimate.weak_prefix == [2]


def test_hits_count_only_anchors_that_are_used() -> None:
    store = filled(range(4), **TOKEN)
    repeat = store.estimate(SLOT, sample(2))
    assert repeat.used == (2,)
    store.use(repeat)
    store.use(repeat)
    pool = next(iter(store.pools.values()))
    assert [a.hits for a in pool.anchors.values()] == [0, 0, 2, 0]
    assert store.stats().used == 2
    store.use(store.estimate(PlaceholderSite("nobody", 0), sample(2)))
    assert store.stats().used == 2
    pool.drop(pool.victim())
    store.use(replace(repeat, used=(0, 3)))
    assert [a.hits for a in pool.anchors.values()] == [0, 2, 1], "what has gone is passed over"


@each_estimator
def test_an_anchor_without_this_agents_offsets_is_skipped(settings: dict[str, Any]) -> None:
    other = PlaceholderSite("critic", 2)
    store = filled(range(6), **settings)
    for seed in (0, 2, 4):
        observe(store, sample(seed), other)
    pool = next(iter(store.pools.values()))
    assert len(pool.anchors) == 6
    held = set(pool.sites[other].value.rows_of_anchors(pool.sites[other].anchors).tolist())
    for value in (sample(1), sample(3), sample(77)):
        estimate = store.estimate(other, value)
        assert set(estimate.value.rows.flatten().tolist()) <= held
        assert set(estimate.used) <= {0, 2, 4}
    assert store.estimate(other, sample(1)).learnable
    assert not store.estimate(other, sample(2)).learnable
    assert store.estimate(PlaceholderSite("third", 0), sample(1)).reason == "no anchor of this agent yet"


def test_a_value_that_is_not_finite_leaves_nothing() -> None:
    """Nor one behind which the text is not: no table is written, and a full pool drops nothing."""
    store = filled(range(3), **{**TOKEN, "capacity": 3})
    bad, bad_text = (KVSegment(one.keys * float("nan"), one.values) for one in (sample(9).base, PREFIX_BASE))
    for value in (sample(9), sample(1)):  # of a known one only the calibration would learn
        for site in (SLOT, PlaceholderSite("new", 7)):
            for real, text in ((bad, PREFIX_BASE), (value.base, bad_text)):
                with pytest.raises(TranslationRefused):
                    store.observe(site, value, real, PREFIX_BASE, text)
                store.check_integrity()
    assert (store.stats().anchors, store.stats().sites, store.stats().observed) == (3, 1, 3)
    assert store.estimate(SLOT, sample(2)).shareable


@each_estimator
def test_an_empty_placeholder_is_neither_learned_nor_shared(settings: dict[str, Any]) -> None:
    store = filled(range(3), **settings)
    empty = sample(0, 0)
    observe(store, empty)
    estimate = store.estimate(SLOT, empty)
    assert (estimate.shareable, estimate.learnable, estimate.reason) == (False, False, "the value is empty")
    assert store.stats().anchors == 3


@each_estimator
def test_agents_that_learned_in_another_order_share_a_match(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    critic = PlaceholderSite("critic", 1)
    values = [sample(seed) for seed in range(6)]
    alone, store = (filled(range(6), **settings) for _ in range(2))
    for value in reversed(values):
        observe(store, value, critic)
    calls, estimator = [], type(store._estimator)
    propose = estimator.propose
    monkeypatch.setattr(estimator, "propose", lambda *args: calls.append(args) or propose(*args))
    value = sample(77)
    one, two = store.estimate(SLOT, value), store.estimate(critic, value)
    assert one.shareable and two.shareable and len(calls) == 1
    assert relative_error(translated(one, value), translated(alone.estimate(SLOT, value), value)) < 1e-6
    for anchor in values:
        real = observe(AnchorStore(AnchorSettings(**settings)), anchor, critic)
        assert relative_error(translated(store.estimate(critic, anchor), anchor), real) < 2e-3, "its own offsets"


def test_tenants_workflows_and_placeholders_share_nothing() -> None:
    store = filled(range(5), **TOKEN)
    for other in ({"namespace": Namespace("other")}, {"workflow": "other"}, {"placeholder": "x"}):
        assert store.estimate(SLOT, sample(0, pool=POOL._replace(**other))).reason == "no anchor of this agent yet"


def test_a_full_pool_takes_a_value_only_if_it_is_not_shareable_anyway() -> None:
    """An agent that prefills densely for another reason does not push out what other agents live on."""
    store = filled(range(3), capacity=3, **OPEN)
    for seed in range(3):
        observe(store, sample(seed), PlaceholderSite("critic", 1))
    for seed in range(10, 20):
        observe(store, sample(seed), PlaceholderSite("critic", 1))
    assert store.estimate(SLOT, sample(0)).shareable
    assert store.stats().anchors == 3
    store = filled(range(3), capacity=3, **{**OPEN, "max_error": 1e-9})
    observe(store, sample(10))
    assert store.stats().anchors == 3
    assert not store.estimate(SLOT, sample(10)).learnable


def test_what_stays_unshareable_goes_on_teaching_only_now_and_then() -> None:
    store, others = filled(range(3), capacity=5, **{**OPEN, "max_error": 1e-9}), range(100, 740)
    assert all(store.estimate(SLOT, sample(seed)).learnable for seed in others), "little was observed"
    for seed in range(3, 9):
        observe(store, sample(seed))
    estimates = [store.estimate(SLOT, sample(seed)) for seed in others]
    assert not any(estimate.shareable for estimate in estimates)
    assert 1 <= sum(estimate.learnable for estimate in estimates) <= 25, "one in sixty-four, more or less"
    again = [store.estimate(SLOT, sample(seed)).learnable for seed in others]
    assert again == [estimate.learnable for estimate in estimates], "the value decides"


# bounds of all pools together -----------------------------------------------------------------------------------------


@each_estimator
def test_2000_observations_do_not_grow(settings: dict[str, Any]) -> None:
    store = AnchorStore(AnchorSettings(**{**settings, "capacity": 6}))
    store.pools._limit = 4
    sizes = []
    for number in range(2000):
        pool = POOL._replace(placeholder=f"p{number % 7}")
        value = sample(number, 1 + number * 7 % 13, pool=pool)
        site = PlaceholderSite(f"agent{number % 5}", number % 2)
        store.observe(site, value, in_context(value.base, 3))
        store.estimate(site, value)
        if number % 100 == 99:
            store.check_integrity()
            sizes.append(store.stats().nbytes)
    stats = store.stats()
    assert (stats.pools, stats.observed) == (4, 2000)
    assert stats.anchors <= 24
    assert max(sizes[5:]) < 1.5 * max(sizes[:5])


def test_memory_is_bounded_and_the_least_used_go_first() -> None:
    limit = filled(range(4), **OPEN).stats().nbytes
    store = filled(range(4), **OPEN, max_bytes=limit)
    for seed in (0, 1, 3):
        store.use(store.estimate(SLOT, sample(seed)))
    observe(store, sample(9))
    store.check_integrity()
    assert store.stats().nbytes <= limit
    kept = [a.tokens[0] for pool in store.pools.values() for a in pool.anchors.values()]
    assert 2 not in kept and kept[-1] == 9 and len(kept) >= 3
    store = AnchorStore(AnchorSettings(max_bytes=100))
    observe(store, sample(0))
    assert store.stats().pools == store.stats().nbytes == 0, "a value that is larger than all memory"


def test_pools_are_dropped_in_order_of_use() -> None:
    store = AnchorStore(AnchorSettings(**TOKEN))
    store.pools._limit = 2
    pools = [POOL._replace(placeholder=name) for name in "abc"]
    for seed in range(3):
        observe(store, sample(seed, pool=pools[0]))
    observe(store, sample(9, pool=pools[1]))
    store.use(store.estimate(SLOT, sample(2, pool=pools[0])))
    observe(store, sample(9, pool=pools[2]))
    assert list(store.pools) == [pools[0], pools[2]]
    for number in range(5):
        observe(store, in_tenant(f"other/salt-{number}", number))
    assert [*store.pools][0] == pools[2], "another tenant pushes out its own"


# limits of tenants ----------------------------------------------------------------------------------------------------


def in_tenant(tenant: str, seed: int, placeholder: str = "p") -> SampleView:
    return sample(seed, pool=PoolKey(Namespace.parse(tenant), "flow", placeholder))


def seeds_of(store: AnchorStore, tenant: str) -> list[int]:
    """First tokens of what a tenant's pools hold; `sample` makes them the seed."""
    pools = (pool for key, pool in store.pools.items() if key.namespace.tenant == tenant)
    return sorted(anchor.tokens[0] for pool in pools for anchor in pool.anchors.values())


def held(store: AnchorStore, tenant: str) -> int:
    return sum(pool.nbytes for key, pool in store.pools.items() if key.namespace.tenant == tenant)


def test_a_tenant_with_too_much_loses_its_own() -> None:
    store = AnchorStore(AnchorSettings(**OPEN))
    for seed in range(6):
        observe(store, in_tenant("b", seed))
    most = held(store, "b") // 2
    store.limit("a", most)
    for seed, space in enumerate(("a", "a/salt", "a", "a/salt", "a")):
        observe(store, in_tenant(space, seed, f"p{seed % 2}"))
        store.check_integrity()
        assert held(store, "a") <= most
    left = seeds_of(store, "a")
    assert 0 < len(left) < 5 and 4 in left
    assert seeds_of(store, "b") == list(range(6))


def test_tenants_without_a_limit_of_their_own_have_that_of_the_others() -> None:
    store = AnchorStore(AnchorSettings(**OPEN))
    for seed in range(4):
        observe(store, in_tenant("b", seed))
    most = held(store, "b")
    store.limit("a", most)
    store.limit(None, most // 2)
    assert 0 < held(store, "b") <= most // 2, "from then on"
    for seed in range(4, 9):
        for tenant in ("a", "b", "c/part"):
            observe(store, in_tenant(tenant, seed))
    assert held(store, "a") <= most and len(seeds_of(store, "a")) > len(seeds_of(store, "b"))
    assert all(0 < held(store, tenant) <= most // 2 for tenant in ("b", "c"))


def test_what_was_dropped_goes_before_anchors() -> None:
    store = AnchorStore(AnchorSettings(**OPEN))
    for seed in range(8):
        observe(store, in_tenant("a", seed))
    full = store.stats().nbytes
    [pool] = store.pools.values()
    pool.drop(pool.victim())
    store.limit("a", full * 7 // 8)
    store.check_integrity()
    assert (store.stats().anchors, store.stats().nbytes <= full * 7 // 8) == (7, True)
