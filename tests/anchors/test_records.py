"""What was saved and restored estimates as what it was saved from, and is nobody else's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from kedge.anchors.anchor import PlaceholderSite, PoolKey
from kedge.anchors.base_store import BaseStore, PrefixKey
from kedge.anchors.saving import Record, Restored, keys, record_of, signature_of
from kedge.anchors.store import AnchorStore
from kedge.kv.segment import KVSegment
from kedge.settings import AnchorSettings
from kedge.types import Namespace, TenantId, WorkflowId
from tests.anchors.helpers import (
    DIM,
    HEADS,
    LAYERS,
    OPEN,
    POOL,
    SLOT,
    each_estimator,
    filled,
    observe,
    random_kv,
    sample,
    translated,
    translated_prefix,
)

OLDER = PoolKey(Namespace(TenantId("tenant")), WorkflowId("flow"), "older")
NO_TOKENS = KVSegment(torch.empty(LAYERS, 0, HEADS, DIM), torch.empty(LAYERS, 0, HEADS, DIM))
OTHER = PlaceholderSite("critic", 3)


def records(anchors: AnchorStore, bases: BaseStore, *, values: bool = False) -> list[Record]:
    return [record_of(anchors, bases, key) for key in keys(anchors, bases, values=values)]


def restored(records: Iterable[Record], anchors: AnchorStore) -> Restored:
    found = Restored(anchors, NO_TOKENS)
    for record in records:
        found.add(record)
    return found


def brought_back(
    anchors: AnchorStore, bases: BaseStore | None = None, **settings: Any
) -> tuple[AnchorStore, BaseStore]:
    new, new_bases = AnchorStore(AnchorSettings(**settings)), BaseStore(1 << 20)
    restored(records(anchors, bases or BaseStore(1)), new).install(new, new_bases)
    new.check_integrity()
    new_bases.check_integrity()
    return new, new_bases


@each_estimator
def test_a_restored_pool_estimates_as_before(settings: dict[str, Any]) -> None:
    store = filled(range(6), **settings)
    for seed in (2, 4):
        observe(store, sample(seed), OTHER)
    new, _ = brought_back(store, **settings)
    for site in (SLOT, OTHER):
        for value in (sample(3), sample(40)):
            one, two = (each.estimate(site, value) for each in (store, new))
            assert one.shareable == two.shareable
            assert one.reason == two.reason
            if one.shareable:
                assert torch.equal(translated(one, value).keys, translated(two, value).keys)
                assert torch.equal(translated_prefix(one).values, translated_prefix(two).values)
                assert torch.equal(one.weak, two.weak)


def test_order_hits_and_numbers_go_on() -> None:
    store = filled(range(3), **OPEN)
    observe(store, sample(1, pool=OLDER))
    store.use(store.estimate(SLOT, sample(2)))
    new, _ = brought_back(store, **OPEN)
    assert list(new.pools) == list(store.pools) == [OLDER, POOL]
    for key, pool in store.pools.items():
        assert [(a.id, a.tokens, a.hits) for a in new.pools[key].anchors.values()] == [
            (a.id, a.tokens, a.hits) for a in pool.anchors.values()
        ]
    observe(new, sample(90))
    assert max(new.pools[POOL].anchors) == 4, "a new anchor gets a number that nobody has"


def test_what_is_restored_keeps_to_the_bounds_of_its_new_home() -> None:
    store = filled(range(8), **OPEN)
    assert brought_back(store, **OPEN, capacity=3)[0].stats().anchors == 3
    bounded, _ = brought_back(store, **OPEN, max_bytes=store.nbytes() // 2)
    assert 0 < bounded.nbytes() <= store.nbytes() // 2


def test_a_tenants_pool_stays_its_own() -> None:
    new, _ = brought_back(filled(range(6), **OPEN), **OPEN)
    assert new.estimate(SLOT, sample(3)).shareable
    foreign = replace(sample(3), pool=PoolKey(Namespace(TenantId("other")), *POOL[1:]))
    assert new.estimate(SLOT, foreign).reason == "no anchor of this agent yet"


def test_base_kv_of_templates() -> None:
    bases, mine = BaseStore(1 << 20), Namespace(TenantId("a"))
    for index in (1, 3):
        bases.put_prefix(mine, "t", index, random_kv(4 + index, index))
    bases.put_content(mine, (1, 2), (), random_kv(2, 9))
    _, new = brought_back(AnchorStore(AnchorSettings()), bases)
    assert new.stats().values == 0
    assert new.prefixes(Namespace(TenantId("b")), "t") is None
    parts = new.prefixes(mine, "t")
    assert {index: kv.tokens for index, kv in parts.items()} == {1: 5, 3: 7}
    assert torch.equal(parts[3].keys, random_kv(7, 3).keys)


def test_installing_replaces_everything() -> None:
    store, bases = filled(range(3), **OPEN), BaseStore(1 << 20)
    bases.put_prefix(Namespace(TenantId("a")), "old", 1, random_kv(2, 1))
    restored([], store).install(store, bases)
    assert (store.stats().pools, bases.stats().templates) == (0, 0)


def test_a_signature_changes_with_what_is_learned() -> None:
    store, bases = filled(range(3), **OPEN), BaseStore(1 << 20)
    before = signature_of(store, bases, POOL)
    store.use(store.estimate(SLOT, sample(2)))
    assert signature_of(store, bases, POOL) == before
    observe(store, sample(7))
    assert signature_of(store, bases, POOL) != before
    store.clear()
    assert signature_of(store, bases, POOL) is None
    key = PrefixKey(Namespace(TenantId("a")), "t")
    assert signature_of(store, bases, key) is None
    bases.put_prefix(*key, 1, random_kv(2, 1))
    one = signature_of(store, bases, key)
    bases.put_prefix(*key, 1, random_kv(2, 2))
    assert one is not None and signature_of(store, bases, key) != one
