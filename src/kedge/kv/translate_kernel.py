"""Translation in one pass over the bytes, as a Triton kernel (KVCOMM, Eq. 6 and 7), and reading KV back.

Base KV and the blended rows of offsets are read once, added in float32, rotated to their position and written to their
slots, in all layers by one launch and without intermediate results in memory. `kedge.anchors.translator.in_chunks` does
the same in PyTorch. Importing this module needs Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kedge.kv.segment import KVSegment
from kedge.kv.storage import KernelSlots

TILE = 16
"""Tokens per program: with head_dim 128 it reads 4 KiB at a time"""


def translate(
    pages: KernelSlots,
    slots: Tensor,
    start: int,
    kv: KVSegment,
    arena: Tensor | None = None,
    rows: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    reads: bool = False,
) -> None:
    """Write `kv` plus weighted rows of `arena` (None: as it is) to `slots`, int64 [tokens], keys rotated to the
    positions from `start` on; -1 is left out. With `reads` it is the other way: `kv` is filled, keys rotated back.

    A row of `arena` begins with (layers - 1) * 2 * kv_heads * head_dim offsets, as `kedge.anchors.offsets` lays them
    out; token t takes `weights[t]` (float32 [tokens, k]) times its rows `rows[t]` (int64 [tokens, k]).
    """
    layers, tokens, heads, dim = kv.keys.shape
    if not tokens:
        return
    assert pages.rotary.tables is not None, "the kernel rotates all layers alike"
    cos, sin = pages.rotary.tables
    half, factor = cos.shape[1], 1 / pages.rotary.square if reads else 1.0
    k, arena = 0 if rows is None else rows.shape[1], kv.keys if arena is None else arena
    # A program is a tile of tokens in one head of one layer, of the keys (0) or of the values (1).
    with torch.cuda.device_of(kv.keys):
        _move[triton.cdiv(tokens, TILE), layers * heads, 2](
            pages.addresses, kv.keys, kv.values, arena,
            slots if rows is None else rows.contiguous(), cos if weights is None else weights.contiguous(), slots,
            cos, sin, factor, -factor if reads else factor, tokens, start, k, *pages.strides,
            *kv.keys.stride(), *kv.values.stride(),
            arena.stride(0), cos.stride(0), sin.stride(0),
            HEADS=heads, DIM=dim, HALF=half, READS=reads,
            BLOCK=pages.block_size, TILE=TILE, ROTATED=triton.next_power_of_2(half),
            REST=triton.next_power_of_2(max(1, dim - 2 * half)), WHOLE=triton.next_power_of_2(dim),
        )  # fmt: skip


# With fewer specialized, a part of a segment, or one without offsets, needs no kernel of its own.
@triton.jit(do_not_specialize=["tokens", "start", "k"], do_not_specialize_on_alignment=["slots", "rows", "weights"])
def _move(
    addresses, kv_keys, kv_values, arena, rows, weights, slots, cos, sin, cos_factor, sin_factor, tokens, start,
    k, pool_block, pool_token, pool_head, keys_layer, keys_token, keys_head, keys_dim, values_layer, values_token,
    values_head, values_dim, arena_row, cos_position, sin_position,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, READS: tl.constexpr,
    BLOCK: tl.constexpr, ROTATED: tl.constexpr, REST: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write KV plus offsets to slots; with READS, the other way: KV is the target."""
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    # 64 bits, for a pool has more than 2^31 numbers.
    layer, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    here = slot >= 0
    layers = tl.num_programs(1) // HEADS
    begin = tl.load(addresses + tl.program_id(2) * layers + layer).to(tl.pointer_type(kv_keys.dtype.element_ty))
    begin = tl.multiple_of(begin, 16)  # a pointer that was loaded says nothing of it
    pool = (begin + (slot // BLOCK * pool_block + slot % BLOCK * pool_token + head * pool_head))[:, None]
    seen = tl.where(layer > 0, slot, -1) >= 0  # the first layer's offset is zero, and not kept
    row_at, weight_at = rows + token * k, weights + token * k
    group = ((layer - 1) * 2 + tl.program_id(2)) * HEADS + head
    offsets = arena + group * DIM
    if tl.program_id(2) == 1:
        dims = tl.arange(0, WHOLE)[None, :]
        inside = here[:, None] & (dims < DIM)
        row = kv_values + (layer * values_layer + token * values_token + head * values_head)[:, None]
        source, target = _ends(row + dims * values_dim, pool + dims, READS)
        value = _sum(source, inside, offsets + dims, arena_row, row_at, weight_at, seen, k)
        tl.store(target, value, mask=inside)
    else:
        dim = tl.arange(0, ROTATED)[None, :]
        good = here[:, None] & (dim < HALF)
        own = kv_keys + (layer * keys_layer + token * keys_token + head * keys_head)[:, None]
        one, to_one = _ends(own + dim * keys_dim, pool + dim, READS)
        two, to_two = _ends(own + (dim + HALF) * keys_dim, pool + dim + HALF, READS)
        first = _sum(one, good, offsets + dim, arena_row, row_at, weight_at, seen, k)
        second = _sum(two, good, offsets + dim + HALF, arena_row, row_at, weight_at, seen, k)
        position = (start + token)[:, None]
        c = tl.load(cos + position * cos_position + dim, mask=good, other=0.0) * cos_factor
        s = tl.load(sin + position * sin_position + dim, mask=good, other=0.0) * sin_factor
        tl.store(to_one, first * c - second * s, mask=good)
        tl.store(to_two, second * c + first * s, mask=good)
        if DIM > 2 * HALF:
            last = 2 * HALF + tl.arange(0, REST)[None, :]
            left = here[:, None] & (last < DIM)
            end, to_end = _ends(own + last * keys_dim, pool + last, READS)
            rest = _sum(end, left, offsets + last, arena_row, row_at, weight_at, seen, k)
            tl.store(to_end, rest, mask=left)


@triton.jit
def _ends(own, pool, READS: tl.constexpr):
    """Return where numbers come from and where they go."""
    if READS:
        return pool, own
    else:  # noqa: RET505 (Triton compiles both branches of an early return)
        return own, pool


@triton.jit
def _sum(base, inside, offsets, arena_row, row_at, weight_at, seen, k):
    """Return float32 [tokens, dimensions]: base KV of one head plus the weighted offsets of the tokens `seen`."""
    total = tl.load(base, mask=inside, other=0.0).to(tl.float32)
    for j in range(k):
        row = tl.load(row_at + j, mask=seen, other=0)
        weight = tl.load(weight_at + j, mask=seen, other=0.0)
        offset = tl.load(offsets + row[:, None] * arena_row, mask=inside & seen[:, None], other=0)
        total += weight[:, None] * offset.to(tl.float32)
    return total
