"""Translation in one pass over the bytes, as a Triton kernel (KVCOMM, Eq. 6 and 7).

Base KV and the blended rows of offsets are read once, added in float32, rotated to their position and written to their
slots, without intermediate results in memory. `kedge.anchors.translator.in_chunks` does the same in PyTorch. Importing
this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage

TILE = 16
"""Tokens per program: with head_dim 128 it reads 4 KiB at a time"""


def translate(
    storage: PagedStorage,
    slots: Tensor,
    start: int,
    base: KVSegment,
    arena: Tensor,
    rows: Tensor,
    weights: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Write `base` plus weighted rows of `arena` to `slots` (int64 [tokens]), keys rotated to the positions from
    `start` on.

    A row of `arena` begins with (layers - 1) * 2 * kv_heads * head_dim offsets, as `kedge.anchors.offsets` lays them
    out; token t takes `weights[t]` (float32 [tokens, k]) times its rows `rows[t]` (int64 [tokens, k]). Rows of whole
    numbers come with `scales` [capacity, (layers - 1) * 2 * kv_heads], one for each head of a layer's keys or values.
    """
    layers, tokens, heads, dim = base.keys.shape
    if not tokens:
        return
    assert storage.rotary.tables is not None, "the kernel rotates all layers alike"
    cos, sin = storage.rotary.tables
    half = cos.shape[1]
    # A program is a tile of tokens in one head of one layer, of the keys (0) or of the values (1).
    with torch.cuda.device_of(storage.keys):
        _translate[triton.cdiv(tokens, TILE), layers * heads, 2](
            storage.keys, storage.values, base.keys, base.values,
            arena, arena if scales is None else scales, rows.contiguous(), weights.contiguous(), slots, cos, sin,
            tokens, start, rows.shape[1], *storage.keys.stride()[:2], *base.keys.stride(), *base.values.stride(),
            arena.stride(0), 0 if scales is None else scales.stride(0), cos.stride(0), sin.stride(0),
            HEADS=heads, DIM=dim, HALF=half, SCALED=scales is not None,
            TURNED=triton.next_power_of_2(half), REST=triton.next_power_of_2(max(1, dim - 2 * half)),
            WHOLE=triton.next_power_of_2(dim), TILE=TILE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "start", "k"], do_not_specialize_on_alignment=["slots"])
def _translate(
    pool_keys, pool_values, base_keys, base_values, arena, scales, rows, weights, slots, cos, sin, tokens, start, k,
    pool_layer, pool_slot, keys_layer, keys_token, keys_head, keys_dim, values_layer, values_token, values_head,
    values_dim, arena_row, scales_row, cos_position, sin_position,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, SCALED: tl.constexpr, TURNED: tl.constexpr,
    REST: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    here = token < tokens
    # 64 bits, for a pool has more than 2^31 numbers.
    layer, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    slot = tl.load(slots + token, mask=here, other=0)
    out = (layer * pool_layer + slot * pool_slot + head * DIM)[:, None]
    seen = token < tl.where(layer > 0, tokens, 0)  # the first layer's offset is zero, and not kept
    row_at, weight_at = rows + token * k, weights + token * k
    group = ((layer - 1) * 2 + tl.program_id(2)) * HEADS + head
    offsets, scale = arena + group * DIM, scales + group
    if tl.program_id(2) == 1:
        dims = tl.arange(0, WHOLE)[None, :]
        inside = here[:, None] & (dims < DIM)
        at = base_values + (layer * values_layer + token * values_token + head * values_head)[:, None]
        at += dims * values_dim
        value = _sum(at, inside, offsets + dims, scale, arena_row, scales_row, row_at, weight_at, seen, k, SCALED)
        tl.store(pool_values + out + dims, value, mask=inside)
    else:
        dim = tl.arange(0, TURNED)[None, :]
        good = here[:, None] & (dim < HALF)
        start_at = base_keys + (layer * keys_layer + token * keys_token + head * keys_head)[:, None]
        one, two = start_at + dim * keys_dim, start_at + (dim + HALF) * keys_dim
        first = _sum(one, good, offsets + dim, scale, arena_row, scales_row, row_at, weight_at, seen, k, SCALED)
        second = _sum(two, good, offsets + dim + HALF, scale, arena_row, scales_row, row_at, weight_at, seen, k, SCALED)
        position = (start + token)[:, None]
        c = tl.load(cos + position * cos_position + dim, mask=good, other=0.0)
        s = tl.load(sin + position * sin_position + dim, mask=good, other=0.0)
        tl.store(pool_keys + out + dim, first * c - second * s, mask=good)
        tl.store(pool_keys + out + dim + HALF, second * c + first * s, mask=good)
        if DIM > 2 * HALF:
            last = 2 * HALF + tl.arange(0, REST)[None, :]
            left = here[:, None] & (last < DIM)
            end = start_at + last * keys_dim
            rest = _sum(end, left, offsets + last, scale, arena_row, scales_row, row_at, weight_at, seen, k, SCALED)
            tl.store(pool_keys + out + last, rest, mask=left)


@triton.jit
def _sum(
    base, inside, offsets, scale, arena_row, scales_row, row_at, weight_at, seen, k, SCALED: tl.constexpr
):  # fmt: skip
    """Return float32 [tokens, dimensions]: base KV of one head plus the weighted offsets of the tokens `seen`."""
    total = tl.load(base, mask=inside, other=0.0).to(tl.float32)
    for j in range(k):
        row = tl.load(row_at + j, mask=seen, other=0)
        weight = tl.load(weight_at + j, mask=seen, other=0.0)
        if SCALED:
            weight *= tl.load(scale + row * scales_row, mask=seen, other=0.0).to(tl.float32)
        offset = tl.load(offsets + row[:, None] * arena_row, mask=inside & seen[:, None], other=0)
        total += weight[:, None] * offset.to(tl.float32)
    return total
