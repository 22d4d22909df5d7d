"""Attention of single tokens over their paged contexts, as a Triton kernel. Importing this module needs Triton.

Every row is a token that attends to all positions up to its own. Its context is read in several shares at once, whose
results are joined by their softmax sums, as in Flash-Decoding. How long the contexts are is read on the GPU: so that
one CUDA graph serves all lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64
"""Positions that a program processes together"""
SHARES = 16
"""Programs per row and KV head, so that a single request keeps a whole GPU reading"""
FEWEST = 16
"""Least rows of a matrix product; a group of heads is padded to them"""


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    lengths: Tensor,
    block_size: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of `query` [rows, heads, head_dim] over one layer's pool [slots, kv_heads, head_dim].

    Returns [rows, heads, head_dim]. `blocks` (int32 [rows, width]) are the blocks of each row's context, of which the
    first `lengths` (int32 [rows]) tokens are visible; with a `window` only the last ones. With a `softcap` a score s
    becomes softcap * tanh(s / softcap). `sinks` [heads] are one more score of every row, whose weight goes to no token.
    """
    rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    parts = query.new_empty(rows, heads, SHARES, dim, dtype=torch.float32)
    sums = query.new_empty(rows, heads, SHARES, dtype=torch.float32)
    with torch.cuda.device_of(query):
        _attend[rows, kv_heads, SHARES](
            query, keys, values, blocks, lengths, parts, sums, scaling, window or 0, softcap or 0.0,
            *query.stride()[:2], keys.stride(0), blocks.stride(0),
            CAPPED=softcap is not None,
            HEADS=heads, GROUP=heads // kv_heads, DIM=dim, BLOCK=block_size, SHARES=SHARES, TILE=TILE,
            ROWS=max(FEWEST, triton.next_power_of_2(heads // kv_heads)), WHOLE=max(16, triton.next_power_of_2(dim)),
        )  # fmt: skip
    if sinks is not None:
        sums = torch.cat([sums, sinks.float()[None, :, None].expand(rows, -1, -1)], dim=-1)
    return (parts * sums.softmax(-1)[..., :SHARES, None]).sum(2).to(query.dtype)


@triton.jit
def _attend(
    query, keys, values, blocks, lengths, parts, sums, scaling, window, softcap,
    query_row, query_head, slot_stride, blocks_row,
    CAPPED: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    SHARES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute attention over one share of one row's context, for the heads of a group.

    Writes parts [rows, heads, shares, head_dim] float32 and the logarithms of their softmax sums [rows, heads, shares];
    -inf where a share is empty.
    """
    row, kv_head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    member, dim, place = tl.arange(0, ROWS), tl.arange(0, WHOLE), tl.arange(0, TILE)
    head = kv_head * GROUP + member
    good = (member < GROUP)[:, None] & (dim < DIM)[None, :]
    q = tl.load(query + row * query_row + head[:, None] * query_head + dim[None, :], mask=good, other=0.0)
    length = tl.load(lengths + row)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    size = tl.cdiv(tl.cdiv(length - first, SHARES), TILE) * TILE
    begin = first + share * size
    end = tl.minimum(length, begin + size)
    most = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.full((ROWS,), 0.0, dtype=tl.float32)
    out = tl.full((ROWS, WHOLE), 0.0, dtype=tl.float32)
    for at in range(begin, end, TILE):
        position = at + place
        here = position < end
        block = tl.load(blocks + row * blocks_row + position // BLOCK, mask=here, other=0).to(tl.int64)
        slot = block * BLOCK + position % BLOCK
        at_slot = slot[:, None] * slot_stride + kv_head * DIM + dim[None, :]
        inside = here[:, None] & (dim < DIM)[None, :]
        key = tl.load(keys + at_slot, mask=inside, other=0.0)
        value = tl.load(values + at_slot, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scaling
        if CAPPED:  # tanh, of what every version of Triton has
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        scores = tl.where(here[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - higher[:, None]), tl.exp(most - higher)
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        most = higher
    whole = tl.where(total > 0, total, 1.0)
    at_part = (row * HEADS + head) * SHARES + share
    tl.store(parts + at_part[:, None] * DIM + dim[None, :], out / whole[:, None], mask=good)
    tl.store(sums + at_part, most + tl.log(whole), mask=member < GROUP)
