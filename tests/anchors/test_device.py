"""What of anchors is on a device, and what on the CPU: a pretended one, "meta", which counts what it is given to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from kedge.anchors.anchor import PlaceholderSite, SampleView
from kedge.anchors.store import AnchorStore
from kedge.anchors.translator import Translation, in_one_pass
from kedge.kv.segment import KVSegment
from kedge.kv.storage import SlotTable
from kedge.settings import AnchorSettings
from tests.anchors.helpers import PREFIX_BASE, SLOT, TOKEN, each_estimator, in_context, sample

aten = torch.ops.aten
OTHER = PlaceholderSite("judge", 1)


class Far(Tensor):
    """A tensor on the device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Far:
        size, stride = inner.shape, inner.stride()
        far = Tensor._make_wrapper_subclass(cls, size, stride, dtype=inner.dtype, device="meta")
        far.inner = inner
        return far

    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Machine.run(function, args, kwargs or {})


class Machine(TorchDispatchMode):
    """A machine with the device. It counts the operations that the device is given, and how often it is waited for."""

    ops = waits = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(function, args, kwargs or {})

    @staticmethod
    def run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given, target = tree_flatten((args, kwargs))[0], kwargs.get("device")
        was_far = is_far = any(isinstance(one, Far) for one in given)
        if target is not None:  # made there, or copied
            is_far, kwargs = torch.device(target).type == "meta", {**kwargs, "device": "cpu"}
        elif is_far and function not in (aten.copy_.default, aten.index.Tensor):
            near = [one for one in given if isinstance(one, Tensor) and not isinstance(one, Far) and one.dim()]
            assert not near, f"{function} takes a tensor of the CPU beside those of the device"
        is_view = any(one.alias_info and not one.alias_info.is_write for one in function._schema.arguments)
        is_read = was_far and (not is_far or function is aten._local_scalar_dense.default)
        Machine.ops += is_far and not is_view
        Machine.waits += is_read
        args, kwargs = tree_map(lambda one: one.inner if isinstance(one, Far) else one, (args, kwargs))
        result = function(*args, **kwargs)
        return tree_map(lambda one: Far(one) if is_far and isinstance(one, Tensor) else one, result)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tensor = torch.tensor  # no mode sees it
    monkeypatch.setattr(torch, "tensor", lambda data, device=None, **more: tensor(data, **more).to(device or "cpu"))
    with Machine():
        yield


Place = Callable[[KVSegment], KVSegment]


def far(kv: KVSegment) -> KVSegment:
    return KVSegment(Far(kv.keys), Far(kv.values))


def value(seed: int, place: Place = far) -> SampleView:
    found = sample(seed)
    return replace(found, base=place(found.base))


def learned(settings: dict[str, Any], place: Place = far) -> AnchorStore:
    """A store of what two agents have read of four values."""
    store = AnchorStore(AnchorSettings(**settings))
    for seed in range(4):
        for site in (SLOT, OTHER):
            parts = in_context(sample(seed).base, 10 * seed), PREFIX_BASE, in_context(PREFIX_BASE, 10 * seed + 1)
            store.observe(site, value(seed, place), *map(place, parts))
    return store


@each_estimator
@pytest.mark.parametrize("seed", [2, 30], ids=["known", "new"])
def test_on_a_device_offsets_are_those_of_the_cpu(settings: dict[str, Any], seed: int) -> None:
    there = learned(settings).estimate(SLOT, value(seed))
    here = learned(settings, lambda kv: kv).estimate(SLOT, value(seed, lambda kv: kv))
    assert there.shareable and there.used == here.used
    for name in ("value", "prefix"):
        (one, table), (two, twin) = ((getattr(found, name), getattr(found, f"{name}_table")) for found in (there, here))
        assert not isinstance(one.rows, Far) and not isinstance(one.weights, Far)
        assert torch.equal(table.blend(one).cpu(), twin.blend(two))


def test_a_value_is_matched_with_few_waits_and_judged_without_the_device() -> None:
    """A launch takes a GPU's host longer than one of these operations takes a CPU, and a wait longer still."""
    store = learned(TOKEN)
    store.prepare(value(31))
    ops, waits = Machine.ops, Machine.waits
    store.prepare(value(30))
    assert Machine.ops - ops < 80 and Machine.waits - waits == 5, "the five parts of a proposal"
    ops, waits = Machine.ops, Machine.waits
    for site in (SLOT, OTHER):
        estimate = store.estimate(site, value(30))
        assert estimate.shareable and estimate.weak == []
    assert (Machine.ops, Machine.waits) == (ops, waits)


def test_what_a_device_is_waited_for_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass may be under way there, which is no time of the translation's."""
    now, run = [0.0], Machine.run

    def slow(*given: Any) -> Any:
        before, result = Machine.waits, run(*given)
        now[0] += Machine.waits - before
        return result

    monkeypatch.setattr(Machine, "run", staticmethod(slow))
    monkeypatch.setattr("kedge.anchors.store.time.monotonic", lambda: now[0])
    for seed in (2, 30):
        store = learned(TOKEN)
        began, waited = now[0], store.waited
        assert store.estimate(SLOT, value(seed)).shareable
        assert store.waited - waited == now[0] - began > 0


def test_a_kernel_is_given_nothing_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads of all segments is sent at once."""
    given: list[tuple[Tensor, Tensor, Tensor]] = []
    kernel: Any = SimpleNamespace(translate=lambda _, slots, *rest: given.append((slots, *rest[-2:])))
    monkeypatch.setitem(sys.modules, "kedge.kv.translate_kernel", kernel)  # without Triton
    store, values = learned(TOKEN), [value(30), value(31), value(31)]
    found = store.estimate(SLOT, values[0]), store.without_offsets(values[1]), store.estimate(OTHER, values[2])
    items = [
        Translation(start, one.base, its.value, its.value_table)
        for start, one, its in zip((2, 20, 40), values, found, strict=True)
    ]
    pages, ops = SimpleNamespace(addresses=Far(torch.zeros(1))), Machine.ops
    in_one_pass(pages, SlotTable(torch.arange(60)), items)  # type: ignore[arg-type]
    assert Machine.ops - ops == 3, "slots, rows and weights"
    for item, (slots, rows, weights) in zip(items, given, strict=True):
        assert slots.cpu().tolist() == [*range(item.start, item.start + item.tokens)]
        assert torch.equal(rows.cpu(), item.blend.rows) and torch.equal(weights.cpu(), item.blend.weights)
