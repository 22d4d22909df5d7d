"""The attention kernel, on a GPU or in Triton's interpreter, against a softmax written out."""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kv import row_by_row
from tests.kv.triton_device import DEVICE, on_gpu, seconds

attention_kernel = pytest.importorskip("kedge.kv.attention_kernel", reason="Triton is not installed")
attend = attention_kernel.attend
BLOCK, BLOCKS = 16, 24
# The interpreter multiplies no bfloat16 matrices.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2} | ({torch.bfloat16: 2e-2} if DEVICE.type == "cuda" else {})
SHAPES = {
    "two heads a group": (4, 2, 16),
    "three in one": (3, 1, 24),
    "each its own": (2, 2, 64),
    "many": (32, 1, 16),
    "a head of 128": (8, 2, 128),
    "a head of 256": (4, 2, 256),
}
LENGTHS = [1, 17, 64, 383]
SCALE = 0.3


def check(tolerance: float, query: Tensor, *given: Any, together: bool = False) -> None:
    """Check the kernel's results against the softmax written out."""
    out = attend(query, *given, together=together)
    assert out.dtype == query.dtype
    wanted = row_by_row.attend(query.double(), *given)
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("window", "cap", "beside_sinks"), [(None, None, False), (40, 0.5, False), (40, None, True)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_row_sees_its_own_context(
    shape: tuple[int, int, int], window: int | None, cap: float | None, beside_sinks: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    heads, kv_heads, dim = shape
    keys, values = torch.randn(2, BLOCK * BLOCKS, kv_heads, dim, device=DEVICE).to(dtype)
    lengths = LENGTHS if shape == SHAPES["two heads a group"] else [200]
    # As a model hands it over: heads first in memory.
    query = torch.randn(heads, len(lengths), dim, device=DEVICE).to(dtype).transpose(0, 1)
    blocks = torch.stack([torch.randperm(BLOCKS) for _ in lengths]).to(torch.int32).to(DEVICE)

    sinks = torch.randn(heads, device=DEVICE).to(dtype) if beside_sinks else None
    where = (blocks, torch.arange(len(lengths), device=DEVICE).int(), torch.tensor(lengths, device=DEVICE).int())
    check(TOLERANCE[dtype], query, keys, values, *where, BLOCK, SCALE, window, cap, sinks)


PIECES = {
    "a prompt's last tokens": [(0, range(120, 140))],
    "scattered tokens beside decodes": [(0, [150]), (1, [*range(3, 100, 7), *range(120, 170)]), (2, [7])],
    "decodes alone": [(i, [5 * i]) for i in range(17)],
}


@pytest.mark.parametrize(("window", "cap", "beside_sinks"), [(None, None, False), (40, 0.5, True)])
@pytest.mark.parametrize("kv_heads", [2, 6])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_rows_of_a_sequence_share_its_context(
    pieces: list[tuple[int, list[int]]], kv_heads: int, window: int | None, cap: float | None, beside_sinks: bool
) -> None:
    torch.manual_seed(0)
    heads, dim = 6, 16
    keys, values = torch.randn(2, BLOCK * BLOCKS, kv_heads, dim, device=DEVICE)
    rows = [(owner, position) for owner, positions in pieces for position in positions]
    query = torch.randn(heads, len(rows), dim, device=DEVICE).transpose(0, 1)
    blocks = torch.stack([torch.randperm(BLOCKS) for _ in range(17)]).to(torch.int32).to(DEVICE)
    sinks = torch.randn(heads, device=DEVICE) if beside_sinks else None
    owners, positions = torch.tensor(rows, device=DEVICE).int().T.contiguous()
    where = blocks, owners, positions + 1
    check(1e-5, query, keys, values, *where, BLOCK, SCALE, window, cap, sinks, together=True)


def test_where_no_kernel_can_be_built_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    can_build = attention_kernel.can_build.__wrapped__
    assert can_build(DEVICE)
    monkeypatch.setattr(attention_kernel, "can_build", cache(can_build))
    tries: list[object] = []

    class Failing:
        def __getitem__(self, grid: object) -> Any:
            tries.append(grid)
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(attention_kernel, "_fill", Failing())
    with caplog.at_level(logging.WARNING):
        assert not attention_kernel.can_build(DEVICE) and not attention_kernel.can_build(DEVICE)
    assert len(tries) == 1 and "Failed to find C compiler" in caplog.text


# at the sizes of an 8B model ------------------------------------------------------------------------------------------

LARGE = {"8B": (32, 8, 128), "seven in a group": (28, 4, 128), "each its own": (16, 16, 64), "of 64": (32, 8, 64)}
LARGE_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def contexts(rows: int, sequences: int, longest: int, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scattered blocks [sequences, width], and each row's sequence and length, the longest and a single token among
    them.
    """
    width = -(-longest // BLOCK)
    table = torch.stack([torch.randperm(blocks, device=DEVICE)[:width] for _ in range(sequences)]).int()
    lengths = torch.randint(1, longest + 1, (rows,), device=DEVICE).int()
    lengths[0], lengths[-1] = longest, 1 if rows > 1 else longest
    return table, (torch.arange(rows, device=DEVICE) * sequences // rows).int(), lengths


@on_gpu
@pytest.mark.parametrize("dtype", LARGE_TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize(("rows", "sequences"), [(1, 1), (7, 7), (64, 64), (64, 3), (200, 2)])
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
def test_attention_over_long_contexts(
    shape: tuple[int, int, int], rows: int, sequences: int, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    heads, kv_heads, dim = shape
    keys, values = torch.randn(2, 600 * BLOCK, kv_heads, dim, device=DEVICE).to(dtype)
    query = torch.randn(heads, rows, dim, device=DEVICE).to(dtype).transpose(0, 1)
    where = contexts(rows, sequences, 8192, 600)
    given = query, keys, values, *where, BLOCK, SCALE, window, None, None
    check(LARGE_TOLERANCE[dtype], *given, together=sequences < rows)


@on_gpu
def test_attention_in_a_pool_of_more_numbers_than_31_bits_count(record_property: Callable[..., None]) -> None:
    torch.manual_seed(0)
    blocks = 2**31 // (BLOCK * 8 * 128) + 600
    keys, values = (torch.randn(blocks * BLOCK, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    query = torch.randn(64, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    table, owners, lengths = contexts(64, 64, 8192, 600)
    table += blocks - 600
    given = query, keys, values, table, owners, lengths, BLOCK, SCALE, None, None, None
    check(2e-2, *given)

    lengths.fill_(8192)
    spent = seconds(lambda: attend(*given))
    record_property("attention_gb_per_s", round(64 * 8192 * 8 * 128 * 2 * 2 / spent / 1e9, 1))
