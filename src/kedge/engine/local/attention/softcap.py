"""Attention with capped scores, as Gemma 2 has it: a score s becomes cap * tanh(s / cap) before the softmax."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 256
"""Queries at once, since the scores of all heads over a long context are materialised in float32."""


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, cap: float) -> Tensor:
    """Return attention with capped scores [heads, queries, head_dim] over key and value [kv_heads, context, head_dim].

    `mask` [queries, context] is added to the capped scores.
    """
    grouped = query.reshape(len(key), -1, *query.shape[1:])
    parts = zip(grouped.split(ROWS, dim=2), mask.split(ROWS), strict=True)
    return torch.cat([_attend(rows, key, value, seen, scaling, cap) for rows, seen in parts], dim=2).flatten(0, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, cap: float) -> Tensor:
    """Return the attention of some rows [kv_heads, group, rows, head_dim]; a group reads its keys once."""
    scores = (query.flatten(1, 2) @ key.transpose(1, 2)).float().mul_(scaling / cap).tanh_().mul_(cap)
    weights = scores.view(*query.shape[:3], -1).add_(mask).softmax(-1).to(value.dtype)
    return (weights.flatten(1, 2) @ value).view(query.shape)
