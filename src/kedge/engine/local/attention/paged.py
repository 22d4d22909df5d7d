"""The attention function that Transformers models run with: it writes and reads the paged pool.

Registered under the name `kedge`. A forward pass gets one flattened batch [1, tokens] of several sequences; what
belongs to whom is in a `Batch` that Transformers hands through its keyword arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from kedge.engine.local.attention import softcap as capped
from kedge.engine.local.attention.arguments import require_known, require_place, unsupported
from kedge.kv.storage import PagedStorage, Runs

NAME = "kedge"
FEW = 64
"""Up to this many queries attention is bound by reading the context, not by arithmetic."""
ALONE = 512
"""Tokens of a run from which it is read where it lies; shorter ones are copied together first, which costs less than a
call for each."""

# What SDPA itself calls on a CPU. It gives the logarithm of the softmax's sum as well, by which parts can be joined.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class Bias:
    """What is added to the scores of a part of the context: 0 where a query sees a key, else -inf."""

    scores: Tensor
    """[1, 1, queries, keys]"""
    seen: Tensor
    """[queries]: 0 where a query sees any of the keys, else -inf"""


@dataclass(slots=True)
class SequenceSlice:
    """One sequence's share of a batch: rows [start, stop) of the queries, and where its context lies."""

    start: int
    stop: int
    runs: Runs
    """Slots of positions 0 .. context-1."""
    context: int
    positions: Tensor
    """int64 [stop - start], ascending; the last one is context - 1"""
    contiguous: bool
    """The positions are the last ones of the context, without gaps."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """By sliding window, made once per pass for all layers."""
    biases: dict[tuple[int | None, int], list[Bias]] = field(default_factory=dict)
    """By sliding window and group size: of each part of the context. Made once per pass for all layers."""

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[queries, context]: 0 where key j is seen by the query at position p (p - window < j <= p), else -inf."""
        if window not in self.masks:
            keys, queries = torch.arange(self.context, device=self.positions.device), self.positions[:, None]
            hidden = keys > queries if window is None else (keys > queries) | (keys <= queries - window)
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=keys.device)
            self.masks[window] = zeros.masked_fill_(hidden, float("-inf"))
        return self.masks[window]

    def parts(self) -> list[list[int]]:
        """Return the indices of runs that are attended to together: each long one alone, all short ones as one part."""
        sizes = [run.stop - run.start for run in self.runs]
        short = [i for i, size in enumerate(sizes) if size < ALONE]
        return [[i] for i, size in enumerate(sizes) if size >= ALONE] + ([short] if short else [])

    def part_biases(self, window: int | None, groups: int, dtype: torch.dtype) -> list[Bias]:
        """Return the mask part by part, repeated for the heads of a group."""
        if (window, groups) not in self.biases:
            columns = self.mask(window, dtype).repeat(groups, 1).split([r.stop - r.start for r in self.runs], dim=1)
            masks = [torch.cat([columns[i] for i in part], dim=1) for part in self.parts()]
            self.biases[window, groups] = [Bias(mask[None, None], mask.amax(dim=1)) for mask in masks]
        return self.biases[window, groups]


@dataclass(slots=True)
class Batch:
    """One forward pass: flattened tokens, their positions and slots, and the sequences they belong to."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    sequences: list[SequenceSlice]
    logits_rows: Tensor
    """Rows whose logits are wanted."""
    storage: PagedStorage

    def attend(self, layer: int, query: Tensor, scaling: float, window: int | None, softcap: float | None) -> Tensor:
        """query [heads, tokens, head_dim] -> [tokens, heads, head_dim], each sequence over its own context."""
        out = torch.empty_like(query.transpose(0, 1), memory_format=torch.contiguous_format)
        for sequence in self.sequences:
            rows = slice(sequence.start, sequence.stop)
            mine = query[:, rows]
            if softcap is None:
                out[rows] = _attend(mine, self.storage, layer, sequence, scaling, window)
            else:
                out[rows] = _attend_capped(mine, self.storage, layer, sequence, scaling, window, softcap)
        return out


class ForwardBatch(Protocol):
    """What the attention function is handed: how queries find their contexts in the paged pool."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def slots(self) -> Tensor: ...
    @property
    def storage(self) -> PagedStorage: ...
    @property
    def logits_rows(self) -> Tensor | int:
        """Rows whose logits are wanted; 0 is all of them."""

    def attend(self, layer: int, query: Tensor, scaling: float, window: int | None, softcap: float | None) -> Tensor:
        """As `Batch.attend`."""


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    kedge: ForwardBatch | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Transformers' attention signature: query [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim].

    Raises `UnsupportedModel` for whatever else a model's scores depend on.
    """
    if kedge is None:
        raise unsupported(module, "it does not get the batch: its model does not hand on what its `forward` is given")
    require_known(module, {"attention_mask": attention_mask, **others})
    require_place(module, kedge.storage.keys, key, value)
    layer = cast(int, module.layer_idx)
    kedge.storage.store(layer, kedge.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return kedge.attend(layer, query[0], scaling, sliding_window, softcap)[None], None


def _attend(
    query: Tensor, storage: PagedStorage, layer: int, sequence: SequenceSlice, scaling: float, window: int | None
) -> Tensor:
    """One sequence's queries [heads, tokens, head_dim] over its context -> [tokens, heads, head_dim]."""
    if window is not None and window >= sequence.context:
        window = None
    if query.shape[1] <= FEW and query.device.type == "cpu":
        return _attend_few(query, storage, layer, sequence, scaling, window)
    key, value = (_gather(pool[layer], sequence.runs) for pool in (storage.keys, storage.values))
    groups = len(query) // len(key)
    # Heads of one group share their KV: an expanded view gives SDPA its heads without a copy.
    grouped = query.reshape(len(key), groups, *query.shape[1:])
    key, value = (x[:, None].expand(-1, groups, -1, -1) for x in (key, value))
    if sequence.contiguous and window is None:
        attend = _attend_causal if query.device.type == "cpu" else _attend_lower_right
        out = attend(grouped, key, value, scaling)
    else:
        mask = sequence.mask(window, query.dtype)
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return out.flatten(0, 1).transpose(0, 1)


def _attend_capped(
    query: Tensor,
    storage: PagedStorage,
    layer: int,
    sequence: SequenceSlice,
    scaling: float,
    window: int | None,
    softcap: float,
) -> Tensor:
    """As `_attend`, with scores that are capped before the softmax: no fused kernel of PyTorch does that."""
    key, value = (_gather(pool[layer], sequence.runs) for pool in (storage.keys, storage.values))
    return capped.attend(query, key, value, sequence.mask(window, torch.float32), scaling, softcap).transpose(0, 1)


def _attend_causal(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Return the last tokens of a context, all [batch, heads, tokens, head_dim]: what lies before them is seen whole,
    and of themselves the kernel leaves out what is not seen. A mask for both would cost the work of all pairs.
    """
    before = key.shape[2] - query.shape[2]
    out, own = _flash(query, key[:, :, before:], value[:, :, before:], is_causal=True, scale=scaling)
    if not before:
        return out
    rest, past = _flash(query, key[:, :, :before], value[:, :, :before], scale=scaling)
    return _joined([rest, out], [past, own])


def _attend_lower_right(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Return the same on a GPU, whose flash attention takes this shape of a mask, and none that is written out."""
    bias = causal_lower_right(query.shape[2], key.shape[2])
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)


def _gather(pool: Tensor, runs: Runs) -> Tensor:
    """Run of one layer's slots [slots, kv_heads, head_dim] as [kv_heads, tokens, head_dim]; one alone is a view."""
    pieces = [pool[run] for run in runs]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).transpose(0, 1)


def _attend_few(
    query: Tensor, storage: PagedStorage, layer: int, sequence: SequenceSlice, scaling: float, window: int | None
) -> Tensor:
    """Return a few queries over a long context: reading it is the cost, so that long runs are read where they lie, once
    for all heads of a group, and the parts' results are joined by their softmax sums.
    """
    kv_heads, head_dim = storage.keys.shape[2:]
    grouped = query.reshape(1, kv_heads, -1, head_dim)  # the heads of a group, and in each its queries
    parts = sequence.parts()
    biases: Sequence[Bias | None] = [None] * len(parts)
    if query.shape[1] > 1 or window is not None:
        biases = sequence.part_biases(window, len(query) // kv_heads, query.dtype)
    outs, sums = [], []
    for part, bias in zip(parts, biases, strict=True):
        runs = tuple(sequence.runs[i] for i in part)
        key, value = (_gather(pool[layer], runs)[None] for pool in (storage.keys, storage.values))
        out, logsumexp = _flash(grouped, key, value, attn_mask=bias and bias.scores, scale=scaling)
        outs.append(out)
        # Of a query that sees nothing of a part the kernel says 0, which would be a weight.
        sums.append(logsumexp if bias is None else logsumexp + bias.seen)
    out = outs[0] if len(outs) == 1 else _joined(outs, sums)
    return out.view(len(query), -1, head_dim).transpose(0, 1)


def _joined(outs: list[Tensor], sums: list[Tensor]) -> Tensor:
    """Attention over all parts [1, heads, queries, head_dim] from that over each, with the logarithms of its sums."""
    return torch.stack(outs).mul_(torch.stack(sums).softmax(0)[..., None]).sum(0)


AttentionInterface.register(NAME, paged_attention)
