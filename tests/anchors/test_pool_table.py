"""Bounds of all pools together: memory, and what each tenant may have."""

from __future__ import annotations

from typing import Any

import torch

from kedge.anchors.anchor import PlaceholderSite, PoolKey, SampleView
from kedge.anchors.store import AnchorStore
from kedge.kv.segment import KVSegment
from kedge.settings import AnchorSettings
from kedge.types import Namespace, TenantId, WorkflowId
from tests.anchors.helpers import (
    OPEN,
    POOL,
    SLOT,
    TOKEN,
    each_estimator,
    filled,
    in_context,
    observe,
    sample,
)

SOME_POOL = PoolKey(Namespace(TenantId("t")), WorkflowId("w"), "p")


def test_a_message_with_four_consumers_costs_less_than_twice_its_kv() -> None:
    """float16 x 7/8 of the layers x 4 agents, and key vectors; base KV is not kept."""
    store = AnchorStore(AnchorSettings())
    tokens, shape = 500, (8, 500, 4, 16)
    message = 0
    for number in range(6):
        keys, values = torch.randn(2, *shape)
        value = SampleView(POOL, (number,) * tokens, KVSegment(keys, values), number)
        message += value.base.nbytes
        for agent in "abcd":
            store.observe(PlaceholderSite(agent, 1), value, in_context_like(value.base))
        store.check_integrity()
        assert store.nbytes() < 2.1 * message  # key vectors weigh four times as much as with 4 heads of 64
    assert store.nbytes() > 1.7 * message


def in_context_like(base: KVSegment) -> KVSegment:
    keys, values = base.keys.clone(), base.values.clone()
    keys[1:], values[1:] = keys[1:] * 1.1, values[1:] * 0.9
    return KVSegment(keys, values)


@each_estimator
def test_2000_observations_do_not_grow(settings: dict[str, Any]) -> None:
    store = AnchorStore(AnchorSettings(**{**settings, "capacity": 6}))
    store._max_pools = 4
    sizes = []
    for number in range(2000):
        pool = POOL._replace(placeholder=f"p{number % 7}")
        value = sample(number, 1 + number * 7 % 13, pool=pool)
        site = PlaceholderSite(f"agent{number % 5}", number % 2)
        base = value.base
        store.observe(site, value, in_context(base, 3))
        store.estimate(site, value)
        if number % 100 == 99:
            store.check_integrity()
            sizes.append(store.nbytes())
    stats = store.stats()
    assert (stats.pools, stats.observed) == (4, 2000)
    assert stats.anchors <= 24
    assert max(sizes[5:]) < 1.5 * max(sizes[:5])


def test_memory_is_bounded_and_the_least_used_go_first() -> None:
    store = filled(range(4), **OPEN)
    limit = store.nbytes()
    store = AnchorStore(AnchorSettings(**OPEN, max_bytes=limit))
    for seed in range(4):
        observe(store, sample(seed))
    for seed in (0, 1, 3):
        store.use(store.estimate(SLOT, sample(seed)))
    observe(store, sample(9))
    store.check_integrity()
    assert store.nbytes() <= limit
    kept = [a.tokens[0] for pool in store.pools.values() for a in pool.anchors.values()]
    assert 2 not in kept
    assert kept[-1] == 9
    assert len(kept) >= 3


def test_a_value_that_is_larger_than_all_memory_is_not_kept() -> None:
    store = AnchorStore(AnchorSettings(max_bytes=100))
    observe(store, sample(0))
    assert store.stats().pools == store.nbytes() == 0


def test_pools_are_dropped_in_order_of_use() -> None:
    store = AnchorStore(AnchorSettings(**TOKEN))
    store._max_pools = 2
    pools = [SOME_POOL._replace(placeholder=name) for name in "abc"]
    for seed in range(3):
        observe(store, sample(seed, pool=pools[0]))
    observe(store, sample(9, pool=pools[1]))
    store.use(store.estimate(SLOT, sample(2, pool=pools[0])))
    observe(store, sample(9, pool=pools[2]))
    assert list(store.pools) == [pools[0], pools[2]]


# limits of tenants ----------------------------------------------------------------------------------------------------


def in_tenant(tenant: str, seed: int, placeholder: str = "p") -> SampleView:
    return sample(seed, pool=PoolKey(Namespace.parse(tenant), WorkflowId("flow"), placeholder))


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
    store.limit(TenantId("a"), most)
    for seed, space in enumerate(("a", "a/salt", "a", "a/salt", "a")):
        observe(store, in_tenant(space, seed, f"p{seed % 2}"))
        store.check_integrity()
        assert held(store, "a") <= most
    left = seeds_of(store, "a")
    assert 0 < len(left) < 5 and 4 in left
    assert seeds_of(store, "b") == list(range(6))
    assert store.stats().over_limit == 5 - len(left)


def test_tenants_without_a_limit_of_their_own_have_that_of_the_others() -> None:
    store = AnchorStore(AnchorSettings(**OPEN))
    for seed in range(4):
        observe(store, in_tenant("b", seed))
    most = held(store, "b")
    store.limit(TenantId("a"), most)
    store.limit_others(most // 2)
    assert 0 < held(store, "b") <= most // 2, "from then on"
    for seed in range(4, 9):
        for tenant in ("a", "b", "c/part"):
            observe(store, in_tenant(tenant, seed))
    assert most // 2 < held(store, "a") <= most
    assert all(0 < held(store, tenant) <= most // 2 for tenant in ("b", "c"))


def test_slack_goes_before_anchors() -> None:
    store = AnchorStore(AnchorSettings(**OPEN))
    for seed in range(8):
        observe(store, in_tenant("a", seed))
    slack = sum(table.slack_bytes for pool in store.pools.values() for table in pool.tables)
    assert slack > 0
    store.limit(TenantId("a"), store.nbytes() - slack)
    assert (store.stats().anchors, store.stats().over_limit) == (8, 0)
