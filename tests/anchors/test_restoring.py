"""A record that makes no sense is damage of that record: it is named, and costs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kedge.anchors.anchor import PoolKey
from kedge.anchors.base_store import BaseStore, KnownBase
from kedge.anchors.saving import Record, Restored, keys, name_of
from kedge.anchors.store import AnchorStore
from kedge.errors import StateDamaged
from kedge.settings import AnchorSettings
from kedge.types import Namespace, RunId, RunKey, SampleId, TenantId, ValueKind, WorkflowId
from tests.anchors.helpers import LAYERS, OPEN, filled, observe, random_kv, sample
from tests.anchors.test_records import NO_TOKENS, records

Tensors = dict[str, torch.Tensor]
OTHER_POOL = PoolKey(Namespace(TenantId("tenant")), WorkflowId("flow"), "other")


def pool_record() -> Record:
    return records(filled(range(4), **OPEN), BaseStore(1))[0]


def template_record(layers: int = LAYERS, dtype: torch.dtype = torch.float32) -> Record:
    bases = BaseStore(1 << 20)
    bases.put_prefix(Namespace(TenantId("a")), "t", 1, random_kv(2, 1, dtype, layers))
    return records(AnchorStore(AnchorSettings()), bases)[0]


def refuses(record: Record) -> None:
    """The record is refused by name, and the one after it is restored all the same."""
    store, bases = AnchorStore(AnchorSettings(**OPEN)), BaseStore(1 << 20)
    found = Restored(store, NO_TOKENS)
    with pytest.raises(StateDamaged, match="is malformed"):
        found.add(record)
    other = AnchorStore(AnchorSettings(**OPEN))
    observe(other, sample(1, pool=OTHER_POOL))
    found.add(records(other, BaseStore(1))[0])
    found.install(store, bases)
    assert list(store.pools) == [OTHER_POOL]
    assert bases.stats().templates == 0
    store.check_integrity()


def without(key: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(key)


def changed(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({key: change(tensors[key]).contiguous()})


TENSORS: dict[str, Callable[[Tensors], object]] = {
    "no keys": without("keys"),
    "no prefix": without("0.prefix"),
    "fewer keys": changed("keys", lambda keys: keys[:-1]),
    "keys that are not finite": changed("keys", lambda keys: keys / 0),
    "fewer tokens": changed("tokens", lambda tokens: tokens[:-1]),
    "offsets of another width": changed("0.phi", lambda phi: phi[:, :-1]),
    "fewer offsets": changed("0.phi", lambda phi: phi[:-1]),
    "offsets that are not finite": changed("0.phi", lambda phi: phi / 0),
    "calibration of another prefix": changed("0.calibration.prefix", lambda _: torch.zeros(99)),
}
SLOT: dict[str, dict[str, Any]] = {
    "unknown holder": {"holders": [0, 1, 2, 77]},
    "fewer holders": {"holders": [0, 1]},
    "a holder twice": {"holders": [0, 1, 2, 2]},
    "no holders": {"holders": []},
}


@pytest.mark.parametrize("change", TENSORS.values(), ids=TENSORS)
def test_tensors_that_do_not_fit_are_damage(change: Callable[[Tensors], object]) -> None:
    record = pool_record()
    tensors = dict(record.tensors)
    change(tensors)
    refuses(replace(record, tensors=tensors))


@pytest.mark.parametrize("change", SLOT.values(), ids=SLOT)
def test_a_slot_that_makes_no_sense_is_damage(change: dict[str, Any]) -> None:
    record = pool_record()
    refuses(replace(record, data={**record.data, "slots": [{**record.data["slots"][0], **change}]}))


@pytest.mark.parametrize("name", [(), ("pool", "a"), ("template", "a"), ("poem", "a", "b", "c"), ("pool", *"abcd")])
def test_a_name_of_nothing_is_damage(name: tuple[str, ...]) -> None:
    refuses(replace(pool_record(), name=name))


@pytest.mark.parametrize("data", [{}, {"anchors": [], "slots": 3}, [], None, 5])
def test_data_of_another_shape_is_damage(data: Any) -> None:
    refuses(replace(pool_record(), data=data))


VALUE = tuple(range(5))
SPACE = Namespace(TenantId("a"), "part")


def value_record() -> Record:
    bases = BaseStore(1 << 20)
    bases.put_content(SPACE, VALUE, (7, 8), random_kv(5, 1))
    return records(AnchorStore(AnchorSettings()), bases, values=True)[0]


def test_a_value_comes_back_for_its_namespace_and_context_alone() -> None:
    found, bases = Restored(AnchorStore(AnchorSettings()), NO_TOKENS), BaseStore(1 << 20)
    found.add(value_record())
    found.install(AnchorStore(AnchorSettings()), bases)

    def known(namespace: Namespace, context: tuple[int, ...]) -> KnownBase | None:
        return bases.find(RunKey(namespace, "", RunId("new")), SampleId(ValueKind.INPUT, "q"), VALUE, context)

    restored = known(SPACE, (7, 8))
    assert restored is not None
    assert torch.equal(restored.kv.keys, random_kv(5, 1).keys)
    assert torch.equal(restored.kv.values, random_kv(5, 1).values)
    assert known(Namespace(TenantId("a")), (7, 8)) is None and known(SPACE, ()) is None


def test_values_are_saved_only_where_that_is_asked_for() -> None:
    bases = BaseStore(1 << 20)
    bases.put_content(SPACE, VALUE, (), random_kv(5, 1))
    bases.put_prefix(SPACE, "t", 1, random_kv(2, 1))
    anchors = AnchorStore(AnchorSettings())
    assert [name_of(key)[0] for key in keys(anchors, bases)] == ["template"]
    assert [name_of(key)[0] for key in keys(anchors, bases, values=True)] == ["value", "template"]
