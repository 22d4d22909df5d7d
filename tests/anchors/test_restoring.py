"""A record that makes no sense is damage of that record: it is named, and costs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.anchors.anchor import PoolKey
from kedge.anchors.base_store import BaseStore, KnownBase
from kedge.anchors.saving import Record, Restored, keys, name_of
from kedge.anchors.store import AnchorStore
from kedge.errors import StateDamaged
from kedge.kv.segment import KVSegment
from kedge.settings import AnchorSettings
from kedge.types import Namespace, RunId, RunKey, SampleId, TenantId, ValueKind, WorkflowId
from tests.anchors.helpers import DIM, HEADS, LAYERS, OPEN, filled, observe, random_kv, sample
from tests.anchors.test_records import NO_TOKENS, OTHER, records

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
    with pytest.raises(StateDamaged, match="makes no sense"):
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
    "keys of another width": changed("keys", lambda keys: keys[:, :-1]),
    "fewer keys": changed("keys", lambda keys: keys[:-1]),
    "keys in double": changed("keys", torch.Tensor.double),
    "keys that are not finite": changed("keys", lambda keys: keys / 0),
    "fewer tokens": changed("tokens", lambda tokens: tokens[:-1]),
    "tokens in float": changed("tokens", torch.Tensor.float),
    "negative tokens": changed("tokens", torch.Tensor.neg),
    "offsets of another width": changed("0.phi", lambda phi: phi[:, :-1]),
    "fewer offsets": changed("0.phi", lambda phi: phi[:-1]),
    "offsets in float": changed("0.phi", torch.Tensor.float),
    "offsets that are not finite": changed("0.phi", lambda phi: phi / 0),
    "offsets of one dimension": changed("0.phi", torch.Tensor.flatten),
    "calibration of other bins": changed("0.calibration.bins", lambda bins: bins[:, :3]),
    "calibration in half": changed("0.calibration.bins", torch.Tensor.half),
    "calibration of another prefix": changed("0.calibration.prefix", lambda _: torch.zeros(99)),
    "calibration of token ids in float": changed("0.calibration.token_ids", torch.Tensor.float),
}
SLOT: dict[str, dict[str, Any]] = {
    "unknown holder": {"holders": [0, 1, 2, 77]},
    "fewer holders": {"holders": [0, 1]},
    "a holder twice": {"holders": [0, 1, 2, 2]},
    "no holders": {"holders": []},
    "holders that are no list": {"holders": 4},
    "a negative index": {"index": -1},
    "an agent without a name": {"agent_key": None},
    "observations in part": {"observations": 0.5},
}
ANCHORS: dict[str, list[Any]] = {
    "no anchors": [],
    "one anchor twice": [(0, 0, 12)] * 4,
    "an anchor without tokens": [(0, 0, 24), (1, 0, 0), (2, 0, 12), (3, 0, 12)],
    "a negative number": [(-1, 0, 12), (1, 0, 12), (2, 0, 12), (3, 0, 12)],
    "a number that is text": [("0", 0, 12), (1, 0, 12), (2, 0, 12), (3, 0, 12)],
    "hits that are none": [(0, None, 12), (1, 0, 12), (2, 0, 12), (3, 0, 12)],
    "other lengths": [(0, 0, 13), (1, 0, 12), (2, 0, 12), (3, 0, 12)],
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


@pytest.mark.parametrize("anchors", ANCHORS.values(), ids=ANCHORS)
def test_anchors_that_make_no_sense_are_damage(anchors: list[Any]) -> None:
    record = pool_record()
    refuses(replace(record, data={**record.data, "anchors": anchors}))


@pytest.mark.parametrize("name", [(), ("pool", "a"), ("template", "a"), ("poem", "a", "b", "c"), ("pool", *"abcd")])
def test_a_name_of_nothing_is_damage(name: tuple[str, ...]) -> None:
    refuses(replace(pool_record(), name=name))


@pytest.mark.parametrize("data", [{}, {"anchors": [], "slots": 3}, [], None, 5])
def test_data_of_another_shape_is_damage(data: Any) -> None:
    refuses(replace(pool_record(), data=data))


def test_base_kv_of_another_model_is_damage() -> None:
    refuses(template_record(layers=LAYERS + 1))
    refuses(template_record(dtype=torch.bfloat16))
    refuses(replace(template_record(), data={"segments": [-1]}))
    refuses(replace(template_record(), data={"segments": [2]}))


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


VALUES_OF_NO_USE: dict[str, Callable[[Tensors], object]] = {
    "no keys": without("keys"),
    "no tokens": without("tokens"),
    "no context": without("context"),
    "other tokens": changed("tokens", lambda tokens: tokens + 1),
    "another context": changed("context", lambda tokens: tokens[:1]),
    "fewer tokens": changed("tokens", lambda tokens: tokens[:-1]),
    "tokens in rows": changed("tokens", lambda tokens: tokens[None]),
    "fewer layers": changed("keys", lambda keys: keys[1:]),
    "KV of fewer tokens": lambda tensors: [changed(half, lambda kv: kv[:, 1:])(tensors) for half in ("keys", "values")],
}


@pytest.mark.parametrize("change", VALUES_OF_NO_USE.values(), ids=VALUES_OF_NO_USE)
def test_a_value_that_does_not_fit_is_damage(change: Callable[[Tensors], object]) -> None:
    record = value_record()
    tensors = dict(record.tensors)
    change(tensors)
    refuses(replace(record, tensors=tensors))
    refuses(replace(record, name=(*record.name[:2], "another digest")))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["anchors", "sites"]), inner),
    max_leaves=8,
)


@given(anchors=JSON, sites=JSON, holders=JSON, observations=JSON)
@settings(max_examples=60)
def test_whatever_a_record_says_it_is_restored_or_refused(
    anchors: Any, sites: Any, holders: Any, observations: Any
) -> None:
    record = pool_record()
    site = {**record.data["slots"][0], "holders": holders}
    for data in (
        {"anchors": anchors, "slots": record.data["slots"]},
        {"anchors": record.data["anchors"], "slots": sites},
        {"anchors": record.data["anchors"], "slots": [site]},
        {**record.data, "slots": [{**record.data["slots"][0], "observations": observations}]},
    ):
        store = AnchorStore(AnchorSettings(**OPEN))
        found = Restored(store, NO_TOKENS)
        try:
            found.add(replace(record, data=data))
        except StateDamaged:
            continue
        found.install(store, BaseStore(1))
        store.check_integrity()
        observe(store, sample(3), OTHER)


def test_the_shape_of_the_model_decides() -> None:
    wide = KVSegment(torch.empty(LAYERS, 0, HEADS, 2 * DIM), torch.empty(LAYERS, 0, HEADS, 2 * DIM))
    with pytest.raises(StateDamaged):
        Restored(AnchorStore(AnchorSettings()), wide).add(pool_record())
