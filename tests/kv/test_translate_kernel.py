"""The translate kernel, on a GPU or in Triton's interpreter, against float64 and against its twin in PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from kedge.anchors.offsets import Blend, OffsetTable
from kedge.anchors.translator import Translation, in_chunks, in_one_pass, translate_into
from kedge.errors import PlanError
from kedge.kv.rotary import Rotary
from kedge.kv.segment import KVSegment
from kedge.kv.spec import KVSpec
from kedge.kv.storage import PagedStorage, SlotTable
from tests.kv.triton_device import DEVICE, Turns, error, on_gpu, seconds, slots_of

BLOCK, BLOCKS = 4, 16
ULPS = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
"""Largest error over the largest number: the interpreter cuts bfloat16 off"""


@dataclass
class Case:
    storage: PagedStorage
    table: SlotTable
    item: Translation


def case(
    dtype: torch.dtype = torch.float32,
    *,
    tokens: int = 21,
    start: int = 3,
    layers: int = 3,
    kv_heads: int = 2,
    head_dim: int = 16,
    rotary_dim: int = 16,
    k: int = 4,
    anchors: int = 3,
    length: int = 10,
    blocks: int = BLOCKS,
    seed: int = 0,
) -> Case:
    """A translation over scattered blocks, from a table of some anchors of so many tokens."""
    random = torch.Generator().manual_seed(seed)
    spec = KVSpec(layers, kv_heads, head_dim, rotary_dim, dtype)
    storage = PagedStorage(spec, blocks, BLOCK, DEVICE, Rotary(Turns(rotary_dim), blocks * BLOCK, DEVICE))
    storage.keys.fill_(-7)
    storage.values.fill_(-7)
    # A part of longer base KV: its layers are further apart than its tokens say.
    whole = torch.randn(2, layers, tokens + 5, kv_heads, head_dim, generator=random).to(dtype)
    base = KVSegment(*whole.to(DEVICE)).slice(2, 2 + tokens)
    width = (layers - 1) * 2 * kv_heads * head_dim
    half = torch.float16 if dtype == torch.float32 else dtype
    table = OffsetTable(width, half, DEVICE)
    for anchor in range(anchors):
        table.put(anchor, torch.randn(length, width, generator=random).to(DEVICE))
    rows = torch.randint(0, max(1, length * anchors), (tokens, k), generator=random)
    weights = torch.rand(tokens, k, generator=random).softmax(1)
    item = Translation(start, base, Blend(rows, weights, table.version), table)
    return Case(storage, SlotTable.of(torch.randperm(blocks, generator=random).tolist(), BLOCK), item)


def expected(one: Case) -> tuple[Tensor, Tensor]:
    """Keys and values [layers, tokens, kv_heads, head_dim], token by token in float64 on the CPU."""
    base, blend, arena = one.item.base, one.item.blend, one.item.table.arena.double().cpu()
    layers, tokens, heads, dim = base.keys.shape
    keys, values = base.keys.cpu().double().clone(), base.values.cpu().double().clone()
    cos, sin = (table.double().cpu() for table in one.storage.rotary.tables)
    half = cos.shape[1]
    for t in range(tokens):
        for row, weight in zip(blend.rows[t].tolist(), blend.weights[t].tolist(), strict=True):
            offset = arena[row].view(layers - 1, 2, heads, dim)
            keys[1:, t] += weight * offset[:, 0]
            values[1:, t] += weight * offset[:, 1]
        c, s = cos[one.item.start + t], sin[one.item.start + t]
        first, second = keys[:, t, :, :half].clone(), keys[:, t, :, half : 2 * half].clone()
        keys[:, t, :, :half], keys[:, t, :, half : 2 * half] = first * c - second * s, second * c + first * s
    return keys, values


def written(one: Case) -> tuple[Tensor, Tensor]:
    slots = one.table.slots[one.item.start : one.item.start + one.item.base.tokens]
    return one.storage.keys[:, slots].cpu(), one.storage.values[:, slots].cpu()


SHAPES = {
    "as it is": {},
    "one token": {"tokens": 1},
    "exactly a tile": {"tokens": 16, "start": 0},
    "more than two tiles": {"tokens": 37, "start": 11},
    "whole blocks": {"tokens": 8, "start": 8},
    "one anchor token": {"k": 1},
    "eight of many": {"k": 8, "anchors": 7},
    "no offsets": {"k": 0},
    "an empty table": {"k": 0, "anchors": 0},
    "one layer": {"layers": 1, "k": 0},
    "one head": {"kv_heads": 1},
    "part of a head turns": {"head_dim": 24, "rotary_dim": 8},
    "odd sizes, two tiles": {"kv_heads": 1, "head_dim": 20, "rotary_dim": 12, "tokens": 19},
    "a head of 64": {"head_dim": 64, "rotary_dim": 64, "tokens": 18},
    "a head of 128, half of which turns": {"head_dim": 128, "rotary_dim": 64, "kv_heads": 1, "tokens": 5},
    "a head of 128": {"head_dim": 128, "rotary_dim": 128, "kv_heads": 1, "tokens": 3},
    "odd sizes": {"kv_heads": 3, "head_dim": 20, "rotary_dim": 12, "tokens": 5},
}


@pytest.mark.parametrize("dtype", ULPS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_writes_what_the_equations_say(shape: dict[str, int], dtype: torch.dtype) -> None:
    one = case(dtype, **shape)
    in_one_pass(slots_of(one.storage), one.table, [one.item])
    for got, wanted in zip(written(one), expected(one), strict=True):
        assert error(got, wanted) < ULPS[dtype]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 3e-2)], ids=str)
def test_the_twin_writes_the_same_up_to_its_rounding(dtype: torch.dtype, tolerance: float) -> None:
    one, other = case(dtype, tokens=30), case(dtype, tokens=30)
    in_one_pass(slots_of(one.storage), one.table, [one.item])
    in_chunks(other.storage, other.table, [other.item])
    for got, wanted in zip(written(one), written(other), strict=True):
        assert error(got, wanted) < tolerance


def test_no_other_slot_is_touched() -> None:
    one = case(tokens=9, start=6)
    in_one_pass(slots_of(one.storage), one.table, [one.item])
    others = torch.ones(BLOCK * BLOCKS, dtype=torch.bool)
    others[one.table.slots[6:15]] = False
    assert (one.storage.keys[:, others] == -7).all()
    assert (one.storage.values[:, others] == -7).all()


def test_a_blend_out_of_date_is_refused() -> None:
    one = case()
    one.item.table.drop(0)
    with pytest.raises(PlanError, match="version"):
        in_one_pass(slots_of(one.storage), one.table, [one.item])


def test_a_gpu_translates_in_one_pass_and_a_cpu_in_chunks() -> None:
    chosen = in_one_pass if DEVICE.type == "cuda" else in_chunks
    assert translate_into(case().storage).func is chosen  # type: ignore[attr-defined]


@on_gpu
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)])
def test_translation_of_a_long_segment(dtype: torch.dtype, most: float, record_property: Callable[..., None]) -> None:
    shape = {"layers": 32, "kv_heads": 8, "head_dim": 128, "rotary_dim": 128, "k": 8}
    one = case(dtype, tokens=700, start=1234, anchors=10, length=700, blocks=520, **shape)
    in_one_pass(slots_of(one.storage), one.table, [one.item])
    for got, wanted in zip(written(one), expected(one), strict=True):
        assert error(got, wanted) < most

    offsets = one.item.blend.rows.unique().numel() * one.item.table.arena[0].nbytes
    moved, kernel = 2 * one.item.base.nbytes + offsets, partial(in_one_pass, slots_of(one.storage))
    for name, translate in (("kernel", kernel), ("twin", partial(in_chunks, one.storage))):
        spent = seconds(lambda translate=translate: translate(one.table, [one.item]))  # type: ignore[misc]
        record_property(f"{name}_{dtype}_gb_per_s", round(moved / spent / 1e9, 1))
