"""The attention function that Transformers models run with: it writes and reads the paged pool.

Registered under the name `kedge`. A forward pass gets one flattened batch [1, tokens] of several sequences; what
belongs to whom is in a `Batch` that Transformers hands through its keyword arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from kedge.kv.storage import PagedStorage, Runs

NAME = "kedge"
FEW = 64
"""Up to this many queries attention is bound by reading the context, not by arithmetic."""


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
    """Attention masks by sliding window, made once per pass for all layers."""

    def mask(self, window: int | None) -> Tensor:
        """bool [queries, context]: key j is seen by the query at position p when p - window < j <= p."""
        if window not in self.masks:
            keys, queries = torch.arange(self.context, device=self.positions.device), self.positions[:, None]
            seen = keys <= queries
            self.masks[window] = seen if window is None else seen & (keys > queries - window)
        return self.masks[window]


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


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (Transformers passes it)
    *,
    scaling: float,
    kedge: Batch,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Transformers' attention signature: query [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim]."""
    storage, layer = kedge.storage, cast(int, module.layer_idx)
    storage.store(layer, kedge.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    out = torch.empty_like(query[0].transpose(0, 1), memory_format=torch.contiguous_format)
    for sequence in kedge.sequences:
        rows = slice(sequence.start, sequence.stop)
        out[rows] = _attend(query[0, :, rows], storage, layer, sequence, scaling, sliding_window)
    return out[None], None


def _attend(
    query: Tensor, storage: PagedStorage, layer: int, sequence: SequenceSlice, scaling: float, window: int | None
) -> Tensor:
    """One sequence's queries [heads, tokens, head_dim] over its context -> [tokens, heads, head_dim]."""
    if window is not None and window >= sequence.context:
        window = None
    keys = [storage.keys[layer, run] for run in sequence.runs]
    values = [storage.values[layer, run] for run in sequence.runs]
    if query.shape[1] <= FEW:
        mask = None if query.shape[1] == 1 and window is None else sequence.mask(window)
        return _attend_few(query, keys, values, scaling, mask)
    key = keys[0] if len(keys) == 1 else torch.cat(keys)
    value = values[0] if len(values) == 1 else torch.cat(values)
    kv_heads = key.shape[1]
    groups = query.shape[0] // kv_heads
    # Heads of one group share their KV: an expanded view gives SDPA its heads without a copy.
    grouped = query.reshape(kv_heads, groups, *query.shape[1:])
    key, value = (x.transpose(0, 1)[:, None].expand(-1, groups, -1, -1) for x in (key, value))
    causal = sequence.contiguous and window is None and query.shape[1] == sequence.context
    mask = None if causal else sequence.mask(window)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, is_causal=causal, scale=scaling)
    return out.flatten(0, 1).transpose(0, 1)


def _attend_few(query: Tensor, keys: list[Tensor], values: list[Tensor], scaling: float, mask: Tensor | None) -> Tensor:
    """A few queries over a long context that lies in several runs: reading it is the cost, so nothing is copied."""
    kv_heads, head_dim = keys[0].shape[1:]
    count = query.shape[1]
    grouped = query.reshape(kv_heads, -1, head_dim)  # the heads of a group, and in each its queries
    scores = torch.cat([grouped @ key.permute(1, 2, 0) for key in keys], dim=-1).float().mul_(scaling)
    if mask is not None:
        scores.view(kv_heads, -1, *mask.shape).masked_fill_(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    parts = weights.split([len(value) for value in values], dim=-1)
    out = torch.stack([part @ value.transpose(0, 1) for part, value in zip(parts, values, strict=True)]).sum(0)
    return out.view(-1, count, head_dim).transpose(0, 1)


AttentionInterface.register(NAME, paged_attention)
