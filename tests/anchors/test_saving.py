"""What was saved and restored estimates as what it was saved from, and is nobody else's.

A record that makes no sense is damage of that record: it is named, and costs nothing else.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kedge.anchors.anchor import PlaceholderSite
from kedge.anchors.base_store import BaseStore, KnownBase, PrefixKey
from kedge.anchors.saving import Record, Restored, keys, record_of, signature_of
from kedge.anchors.store import AnchorStore
from kedge.errors import StateDamaged
from kedge.kv.segment import KVSegment
from kedge.settings import AnchorSettings
from kedge.types import Namespace, RunKey, SampleId, ValueKind
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

OLDER = POOL._replace(placeholder="older")
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
    anchors: AnchorStore, bases: BaseStore | None = None, room: int = 1 << 20, **settings: Any
) -> tuple[AnchorStore, BaseStore]:
    new, new_bases = AnchorStore(AnchorSettings(**settings)), BaseStore(room)
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
                assert one.weak == two.weak


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
    bounded, _ = brought_back(store, **OPEN, max_bytes=store.stats().nbytes // 2)
    assert 0 < bounded.stats().nbytes <= store.stats().nbytes // 2


def test_base_kv_of_templates() -> None:
    bases, mine = BaseStore(1 << 20), Namespace("a")
    bases.put_prefix(mine, "t", {index: random_kv(4 + index, index) for index in (1, 3)})
    bases.put_content(mine, (1, 2), (), random_kv(2, 9))
    _, new = brought_back(AnchorStore(AnchorSettings()), bases)
    assert new.stats().values == 0
    assert new.prefixes(Namespace("b"), "t") is None
    parts = new.prefixes(mine, "t")
    assert {index: kv.tokens for index, kv in parts.items()} == {1: 5, 3: 7}
    assert torch.equal(parts[3].keys, random_kv(7, 3).keys)
    _, small = brought_back(AnchorStore(AnchorSettings()), bases, room=random_kv(11, 1).nbytes)
    assert small.prefixes(mine, "t") is None, "a part of it would count as all, and the rest never be asked for"


def test_a_signature_changes_with_what_is_learned() -> None:
    store, bases = filled(range(3), **OPEN), BaseStore(1 << 20)
    before = signature_of(store, bases, POOL)
    store.use(store.estimate(SLOT, sample(2)))
    assert signature_of(store, bases, POOL) == before
    observe(store, sample(7))
    assert signature_of(store, bases, POOL) != before
    store.clear()
    assert signature_of(store, bases, POOL) is None
    key = PrefixKey(Namespace("a"), "t")
    assert signature_of(store, bases, key) is None
    bases.put_prefix(*key, {1: random_kv(2, 1)})
    one = signature_of(store, bases, key)
    bases.put_prefix(*key, {1: random_kv(2, 2)})
    assert one is not None and signature_of(store, bases, key) != one


# damage ---------------------------------------------------------------------------------------------------------------

OTHER_POOL = POOL._replace(placeholder="other")
Change = Callable[[torch.Tensor], torch.Tensor]


def with_tensor(key: str, change: Change | None = None) -> Callable[[Record], Record]:
    """Change a tensor of a record, or take it out."""

    def damaged(record: Record) -> Record:
        tensors = dict(record.tensors)
        tensor = tensors.pop(key)
        return replace(record, tensors=tensors if change is None else {**tensors, key: change(tensor).contiguous()})

    return damaged


def with_site(**change: Any) -> Callable[[Record], Record]:
    return lambda record: replace(record, data={**record.data, "slots": [{**record.data["slots"][0], **change}]})


def with_part(**change: Any) -> Callable[[Record], Record]:
    return lambda record: replace(record, **change)


DAMAGE: dict[str, Callable[[Record], Record]] = {
    "no keys": with_tensor("keys"),
    "no prefix": with_tensor("0.prefix"),
    "fewer keys": with_tensor("keys", lambda keys: keys[:-1]),
    "keys that are not finite": with_tensor("keys", lambda keys: keys / 0),
    "fewer tokens": with_tensor("tokens", lambda tokens: tokens[:-1]),
    "offsets of another width": with_tensor("0.phi", lambda phi: phi[:, :-1]),
    "fewer offsets": with_tensor("0.phi", lambda phi: phi[:-1]),
    "offsets that are not finite": with_tensor("0.phi", lambda phi: phi / 0),
    "calibration of another prefix": with_tensor("0.calibration.prefix", lambda _: torch.zeros(99)),
    "unknown holder": with_site(holders=[0, 1, 2, 77]),
    "fewer holders": with_site(holders=[0, 1]),
    "a holder twice": with_site(holders=[0, 1, 2, 2]),
    "no holders": with_site(holders=[]),
    **{
        f"name {name}": with_part(name=name) for name in ((), ("pool", "a"), ("poem", "a", "b", "c"), ("pool", *"abcd"))
    },
    **{f"data {data}": with_part(data=data) for data in ({}, {"anchors": [], "slots": 3}, [], None)},
}


@pytest.mark.parametrize("damaged", DAMAGE.values(), ids=DAMAGE)
def test_a_record_that_makes_no_sense_is_refused_and_the_next_one_restored(damaged: Callable[[Record], Record]) -> None:
    store, bases = AnchorStore(AnchorSettings(**OPEN)), BaseStore(1 << 20)
    found = Restored(store, NO_TOKENS)
    with pytest.raises(StateDamaged, match="is malformed"):
        found.add(damaged(records(filled(range(4), **OPEN), BaseStore(1))[0]))
    other = AnchorStore(AnchorSettings(**OPEN))
    observe(other, sample(1, pool=OTHER_POOL))
    found.add(records(other, BaseStore(1))[0])
    found.install(store, bases)
    assert list(store.pools) == [OTHER_POOL]
    assert bases.stats().templates == 0
    store.check_integrity()


VALUE = tuple(range(5))
SPACE = Namespace("a", "part")


def test_a_value_comes_back_for_its_namespace_and_context_alone() -> None:
    found, before, bases = Restored(AnchorStore(AnchorSettings()), NO_TOKENS), BaseStore(1 << 20), BaseStore(1 << 20)
    before.put_content(SPACE, VALUE, (7, 8), random_kv(5, 1))
    found.add(*records(AnchorStore(AnchorSettings()), before, values=True))
    found.install(AnchorStore(AnchorSettings()), bases)

    def known(namespace: Namespace, context: tuple[int, ...]) -> KnownBase | None:
        return bases.find(RunKey(namespace, "", "new"), SampleId(ValueKind.INPUT, "q"), VALUE, context)

    restored = known(SPACE, (7, 8))
    assert torch.equal(restored.kv.keys, random_kv(5, 1).keys)
    assert torch.equal(restored.kv.values, random_kv(5, 1).values)
    assert known(Namespace("a"), (7, 8)) is None and known(SPACE, ()) is None
