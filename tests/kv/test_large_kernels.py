"""The kernels at the sizes of an 8B model, on a GPU alone: against PyTorch, and how fast they move their bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from kedge.anchors.anchor import AnchorId
from kedge.anchors.offsets import Blend, OffsetTable, rows_of, split_rows
from kedge.anchors.translator import Translation, in_chunks, in_one_pass
from kedge.kv.rotary import Rotary
from kedge.kv.segment import KVSegment
from kedge.kv.spec import KVSpec
from kedge.kv.storage import PagedStorage, SlotTable
from tests.kv.triton_device import DEVICE, Turns, error, slots_of

if DEVICE.type != "cuda":
    pytest.skip("there is no GPU", allow_module_level=True)

BLOCK = 16
SHAPES = {"8B": (32, 8, 128), "seven in a group": (28, 4, 128), "each its own": (16, 16, 64), "of 64": (32, 8, 64)}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
TRIES = 20


def seconds(work: Callable[[], object]) -> float:
    """The best of some runs, by the GPU's clock."""
    times = []
    for _ in range(TRIES):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return min(times)


# attention --------------------------------------------------------------------------------------------------------


def contexts(rows: int, sequences: int, longest: int, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scattered blocks [sequences, width], and each row's sequence and length, the longest and a single token among
    them.
    """
    width = -(-longest // BLOCK)
    table = torch.stack([torch.randperm(blocks, device=DEVICE)[:width] for _ in range(sequences)]).int()
    lengths = torch.randint(1, longest + 1, (rows,), device=DEVICE).int()
    lengths[0], lengths[-1] = longest, 1 if rows > 1 else longest
    return table, (torch.arange(rows, device=DEVICE) * sequences // rows).int(), lengths


def attended(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, owners: Tensor, lengths: Tensor, window: int | None
) -> Tensor:
    """[rows, heads, dim] in float64, row by row."""
    group, rows = query.shape[1] // keys.shape[1], []
    for one, blocks, length in zip(query, table[owners].long(), lengths.tolist(), strict=True):
        slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK, device=DEVICE)).flatten()[:length]
        slots = slots[-window:] if window else slots
        key, value = (pool[slots].double().repeat_interleave(group, dim=1) for pool in (keys, values))
        weights = (torch.einsum("hd,khd->hk", one.double(), key) * query.shape[2] ** -0.5).softmax(-1)
        rows.append(torch.einsum("hk,khd->hd", weights, value))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize(("rows", "sequences"), [(1, 1), (7, 7), (64, 64), (64, 3), (200, 2)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_over_long_contexts(
    shape: tuple[int, int, int], rows: int, sequences: int, window: int | None, dtype: torch.dtype
) -> None:
    from kedge.kv.attention_kernel import attend

    torch.manual_seed(0)
    heads, kv_heads, dim = shape
    keys, values = torch.randn(2, 600 * BLOCK, kv_heads, dim, device=DEVICE).to(dtype)
    query = torch.randn(heads, rows, dim, device=DEVICE).to(dtype).transpose(0, 1)
    where = contexts(rows, sequences, 8192, 600)
    together = sequences < rows
    got = attend(query, keys, values, *where, BLOCK, dim**-0.5, window, None, None, together=together)
    wanted = attended(query, keys, values, *where, window)
    torch.testing.assert_close(got.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_attention_in_a_pool_of_more_numbers_than_31_bits_count(record_property: Callable[..., None]) -> None:
    from kedge.kv.attention_kernel import attend

    torch.manual_seed(0)
    blocks = 2**31 // (BLOCK * 8 * 128) + 600
    keys, values = (torch.randn(blocks * BLOCK, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    query = torch.randn(64, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    table, owners, lengths = contexts(64, 64, 8192, 600)
    table += blocks - 600
    got = attend(query, keys, values, table, owners, lengths, BLOCK, 128**-0.5, None, None, None)
    wanted = attended(query, keys, values, table, owners, lengths, None)
    torch.testing.assert_close(got.double(), wanted, atol=2e-2, rtol=2e-2)

    lengths.fill_(8192)
    spent = seconds(lambda: attend(query, keys, values, table, owners, lengths, BLOCK, 128**-0.5, None, None, None))
    record_property("attention_gb_per_s", round(64 * 8192 * 8 * 128 * 2 * 2 / spent / 1e9, 1))


# translation ------------------------------------------------------------------------------------------------------

TOKENS, START, K = 700, 1234, 8


def translation(dtype: torch.dtype) -> tuple[PagedStorage, SlotTable, Translation]:
    """A segment of an 8B model's KV over scattered blocks, from ten anchors."""
    torch.manual_seed(0)
    spec = KVSpec(32, 8, 128, 128, dtype)
    blocks = (START + TOKENS) // BLOCK + 40
    storage = PagedStorage(spec, blocks, BLOCK, DEVICE, Rotary(Turns(128), START + TOKENS, DEVICE))
    storage.keys.fill_(torch.nan)
    storage.values.fill_(torch.nan)
    base = KVSegment(*torch.randn(2, 32, TOKENS, 8, 128, device=DEVICE).to(dtype))
    width = rows_of(base.slice(0, 1)).shape[1]
    half = torch.float16 if dtype == torch.float32 else dtype
    table = OffsetTable(width, half, DEVICE)
    for anchor in range(10):
        table.put(AnchorId(anchor), torch.randn(TOKENS, width, device=DEVICE))
    rows = torch.randint(0, 10 * TOKENS, (TOKENS, K), device=DEVICE)
    weights = torch.rand(TOKENS, K, device=DEVICE).softmax(1)
    slots = SlotTable.of(torch.randperm(blocks).tolist(), BLOCK)
    return storage, slots, Translation(START, base, Blend(rows, weights, table.version), table)


def written(storage: PagedStorage, slots: SlotTable) -> tuple[Tensor, Tensor]:
    chosen = slots.slots[START : START + TOKENS].to(DEVICE)
    return storage.keys[:, chosen], storage.values[:, chosen]


def exact(storage: PagedStorage, item: Translation) -> tuple[Tensor, Tensor]:
    """Keys and values of the equations, in float64."""
    arena, blend = item.table.arena, item.blend
    total = torch.zeros(TOKENS, arena.shape[1], dtype=torch.float64, device=DEVICE)
    for j in range(K):
        total += blend.weights[:, j, None].double() * arena[blend.rows[:, j]].double()
    offsets = split_rows(total, item.base)
    keys, values = item.base.keys.double(), item.base.values.double()
    keys[1:] += offsets.keys
    values[1:] += offsets.values
    cos, sin = (x[START : START + TOKENS, None].double() for x in storage.rotary.tables)
    first, second = keys[..., :64], keys[..., 64:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1), values


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)])
def test_translation_of_a_long_segment(dtype: torch.dtype, most: float, record_property: Callable[..., None]) -> None:
    storage, slots, item = translation(dtype)
    in_one_pass(slots_of(storage), slots, [item])
    for got, wanted in zip(written(storage, slots), exact(storage, item), strict=True):
        assert error(got, wanted) < most

    moved = 2 * item.base.nbytes + item.blend.rows.unique().numel() * item.table.row_bytes
    for name, translate in (("kernel", partial(in_one_pass, slots_of(storage))), ("twin", partial(in_chunks, storage))):
        spent = seconds(lambda translate=translate: translate(slots, [item]))  # type: ignore[misc]
        record_property(f"{name}_{dtype}_gb_per_s", round(moved / spent / 1e9, 1))
