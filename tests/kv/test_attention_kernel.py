"""The attention kernel, on a GPU or in Triton's interpreter, against a softmax written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kv.triton_device import DEVICE

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


def expected(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, window: int | None, cap: float | None, sinks: Tensor
) -> Tensor:
    """One row: query [heads, dim] over the slots of its context."""
    if window:
        slots = slots[-window:]
    group = len(query) // keys.shape[1]
    keys, values = (x[slots].double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("hd,khd->hk", query.double(), keys) * SCALE
    weights = (cap * (scores / cap).tanh() if cap else scores).exp()
    return torch.einsum("hk,khd->hd", weights / (weights.sum(-1, keepdim=True) + sinks.double().exp()), values)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("window", "cap", "beside_sinks"), [(None, None, False), (40, 0.5, False), (40, None, True)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_row_sees_its_own_context(
    shape: tuple[int, int, int], window: int | None, cap: float | None, beside_sinks: bool, dtype: torch.dtype
) -> None:
    from kedge.kv.attention_kernel import attend

    torch.manual_seed(0)
    heads, kv_heads, dim = shape
    keys, values = torch.randn(2, BLOCK * BLOCKS, kv_heads, dim, device=DEVICE).to(dtype)
    lengths = LENGTHS if shape == SHAPES["two heads a group"] else [200]
    # As a model hands it over: heads first in memory.
    query = torch.randn(heads, len(lengths), dim, device=DEVICE).to(dtype).transpose(0, 1)
    blocks = torch.stack([torch.randperm(BLOCKS) for _ in lengths]).to(torch.int32).to(DEVICE)

    sinks = torch.randn(heads, device=DEVICE).to(dtype) if beside_sinks else None
    owners = torch.arange(len(lengths), device=DEVICE).int()
    contexts = (blocks, owners, torch.tensor(lengths, device=DEVICE).int(), BLOCK)

    out = attend(query, keys, values, *contexts, SCALE, window, cap, sinks)

    assert out.dtype == dtype
    for row, length in enumerate(lengths):
        slots = (blocks[row, :, None] * BLOCK + torch.arange(BLOCK, device=DEVICE)).flatten()[:length]
        absent = torch.full((heads, 1), -torch.inf, device=DEVICE)
        wanted = expected(query[row], keys, values, slots, window, cap, absent if sinks is None else sinks[:, None])
        torch.testing.assert_close(out[row].double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


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
    from kedge.kv.attention_kernel import attend

    torch.manual_seed(0)
    heads, dim = 6, 16
    keys, values = torch.randn(2, BLOCK * BLOCKS, kv_heads, dim, device=DEVICE)
    rows = [(owner, position) for owner, positions in pieces for position in positions]
    query = torch.randn(heads, len(rows), dim, device=DEVICE).transpose(0, 1)
    blocks = torch.stack([torch.randperm(BLOCKS) for _ in range(17)]).to(torch.int32).to(DEVICE)
    sinks = torch.randn(heads, device=DEVICE) if beside_sinks else None
    owners, positions = torch.tensor(rows, device=DEVICE).int().T.contiguous()

    out = attend(query, keys, values, blocks, owners, positions + 1, BLOCK, SCALE, window, cap, sinks, together=True)

    absent = torch.full((heads, 1), -torch.inf, device=DEVICE)
    for row, (owner, position) in enumerate(rows):
        slots = (blocks[owner, :, None] * BLOCK + torch.arange(BLOCK, device=DEVICE)).flatten()[: position + 1]
        wanted = expected(query[row], keys, values, slots, window, cap, absent if sinks is None else sinks[:, None])
        torch.testing.assert_close(out[row].double(), wanted, atol=1e-5, rtol=1e-5)
