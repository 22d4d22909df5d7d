"""Attention of few tokens over their paged contexts, as Triton kernels, and whether any kernel can be built. Importing
this module needs Triton.

Every row is a token that attends to all positions up to its own. Its context is read in several shares at once, whose
results are joined by their softmax sums, as in Flash-Decoding. Some rows share a program, which reads a context once
for all rows of its sequence. Lengths of contexts are read on the GPU, so that one CUDA graph serves all lengths.
"""

import logging
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

logger = logging.getLogger(__name__)
TILE = 64
"""Most positions that a program processes together"""
LOADED = 16 << 10
"""Most bytes of queries, keys or values that a program holds at once, so that 99 KiB of shared memory are enough"""
SHARES = 16
"""Most programs that share a context, so that a single request keeps a whole GPU reading"""
PROGRAMS = 1024
"""Programs that keep a GPU busy: with so many a context is not shared out further"""
FEWEST, MOST = 16, 64
"""Least rows of a matrix product, to which a group of heads is padded; and most of one, with the heads of several rows
"""


@triton.jit
def _fill(target):
    """Do the least that a kernel can."""
    tl.store(target, 1)


@cache
def can_build(device: torch.device) -> bool:
    """Return whether a kernel can be built and run on a device. To build one Triton compiles C at run time, which slim
    images lack a compiler for, and it supports only some GPUs.
    """
    target = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        with torch.cuda.device_of(target):
            _fill[(1,)](target)
        return bool(target.item())
    except Exception as error:  # Triton's errors have no common class
        logger.warning("Triton can't build kernels for %s, so PyTorch's operations take their place: %s", device, error)
        return False


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    owners: Tensor,
    lengths: Tensor,
    block_size: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    *,
    together: bool = False,
) -> Tensor:
    """Compute attention of `query` [rows, heads, head_dim] over one layer's pool [slots, kv_heads, head_dim].

    Returns [rows, heads, head_dim]. A row is of the sequence `owners[row]` (int32 [rows]), whose context is in the
    blocks `blocks[owner]` (int32 [sequences, width]), and sees the first `lengths[row]` (int32 [rows]) tokens of it;
    with a `window` only the last ones of these. With a `softcap` a score s becomes softcap * tanh(s / softcap). `sinks`
    [heads] are one more score of every row, whose weight goes to no token. `together` is for rows that mostly follow
    others of their sequence: some at a time read its context once, while sequences of one row each wait for each other.
    """
    rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = triton.next_power_of_2(heads // kv_heads)
    whole = max(16, triton.next_power_of_2(dim))
    at_once, tile = sizes_of(group, whole * query.element_size(), together=together)
    tiles = triton.cdiv(rows, at_once)
    shares = SHARES
    while shares > 1 and tiles * kv_heads * shares > PROGRAMS:
        shares //= 2
    parts = query.new_empty(rows, heads, shares, dim, dtype=torch.float32)
    sums = query.new_empty(rows, heads, shares, dtype=torch.float32)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(query):
        _attend[tiles, kv_heads, shares](
            query, keys, values, blocks, owners, lengths, parts, sums, rows, scaling, window or 0, softcap or 0.0,
            *query.stride()[:2], keys.stride(0), blocks.stride(0),
            CAPPED=softcap is not None, HEADS=heads, GROUP=heads // kv_heads, PADDED=group, DIM=dim, BLOCK=block_size,
            SHARES=shares, TILE=tile, TOGETHER=at_once, ROWS=max(FEWEST, at_once * group), WHOLE=whole,
        )  # fmt: skip
        _join[rows, heads](
            parts, sums, sums if sinks is None else sinks, out,
            HEADS=heads, DIM=dim, SHARES=shares, WITH_SINKS=sinks is not None, WHOLE=whole,
        )  # fmt: skip
    return out


def sizes_of(group: int, row_bytes: int, *, together: bool) -> tuple[int, int]:
    """Return the rows that share a program, each with a `group` of heads, and the positions that it processes together,
    for queries and keys of `row_bytes` each. All are powers of two.
    """
    fitting = max(FEWEST, LOADED // row_bytes)
    return max(1, min(MOST, fitting) // group) if together else 1, min(TILE, fitting)


@triton.jit(do_not_specialize=["rows"])
def _attend(
    query, keys, values, blocks, owners, lengths, parts, sums, rows, scaling, window, softcap,
    query_row, query_head, slot_stride, blocks_row,
    CAPPED: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, SHARES: tl.constexpr, TILE: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute attention over one share of each context of some rows, for the heads of a group.

    Writes parts [rows, heads, shares, head_dim] float32 and the logarithms of their softmax sums [rows, heads, shares];
    -inf where a share is empty.
    """
    kv_head, share = tl.program_id(1), tl.program_id(2)
    member, dim, place = tl.arange(0, ROWS), tl.arange(0, WHOLE), tl.arange(0, TILE)
    row, head = tl.program_id(0) * TOGETHER + member // PADDED, kv_head * GROUP + member % PADDED
    real = (member < TOGETHER * PADDED) & (member % PADDED < GROUP) & (row < rows)
    good = real[:, None] & (dim < DIM)[None, :]
    q = tl.load(query + row[:, None] * query_row + head[:, None] * query_head + dim[None, :], mask=good, other=0.0)
    length = tl.load(lengths + row, mask=real, other=0)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    owner = tl.load(owners + row, mask=real, other=-1)
    most = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.full((ROWS,), 0.0, dtype=tl.float32)
    out = tl.full((ROWS, WHOLE), 0.0, dtype=tl.float32)
    current = tl.max(owner, 0)
    while current >= 0:  # one sequence after the other: mostly all rows are of one
        its = owner == current
        longest = tl.max(tl.where(its, length, 0), 0)
        start = tl.min(tl.where(its, first, longest), 0)
        size = tl.cdiv(tl.cdiv(longest - start, SHARES), TILE) * TILE
        begin = start + share * size
        end = tl.minimum(longest, begin + size)
        for at in range(begin, end, TILE):
            position = at + place
            here = position < end
            block = tl.load(blocks + current * blocks_row + position // BLOCK, mask=here, other=0).to(tl.int64)
            slot = block * BLOCK + position % BLOCK
            at_slot = slot[:, None] * slot_stride + kv_head * DIM + dim[None, :]
            inside = here[:, None] & (dim < DIM)[None, :]
            key = tl.load(keys + at_slot, mask=inside, other=0.0)
            value = tl.load(values + at_slot, mask=inside, other=0.0)
            scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scaling
            if CAPPED:  # tanh by the sigmoid, which every version of Triton has
                scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
            sees = its[:, None] & (position[None, :] < length[:, None]) & (position[None, :] >= first[:, None])
            scores = tl.where(sees & here[None, :], scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
            weights, shrink = tl.exp(scores - level[:, None]), tl.exp(most - level)
            total = total * shrink + tl.sum(weights, 1)
            out = out * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            most = higher
        current = tl.max(tl.where(owner < current, owner, -1), 0)
    whole = tl.where(total > 0, total, 1.0)
    at_part = (row * HEADS + head) * SHARES + share
    tl.store(parts + at_part[:, None] * DIM + dim[None, :], out / whole[:, None], mask=good)
    tl.store(sums + at_part, most + tl.log(whole), mask=real)


@triton.jit
def _join(
    parts, sums, sinks, out,
    HEADS: tl.constexpr, DIM: tl.constexpr, SHARES: tl.constexpr, WITH_SINKS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Join the shares of one row and head: parts [rows, heads, shares, head_dim] -> out [rows, heads, head_dim]."""
    at, head = tl.program_id(0) * HEADS + tl.program_id(1), tl.program_id(1)
    share, dim = tl.arange(0, SHARES), tl.arange(0, WHOLE)
    its = tl.load(sums + at * SHARES + share)
    highest = tl.max(its, 0)
    if WITH_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    weights = tl.exp(its - highest)
    total = tl.sum(weights, 0)
    if WITH_SINKS:
        total += tl.exp(sink - highest)
    at_part = (at * SHARES + share)[:, None] * DIM + dim[None, :]
    part = tl.load(parts + at_part, mask=(dim < DIM)[None, :], other=0.0)
    joined = tl.sum(part * (weights / total)[:, None], 0)
    tl.store(out + at * DIM + dim, joined.to(out.dtype.element_ty), mask=dim < DIM)
