"""Attention with its scores written out, for what PyTorch's fused kernels lack: capped scores (Gemma 2), where a score
s becomes cap * tanh(s / cap) before the softmax, and attention sinks on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 256
"""Queries at once, since the scores of all heads over a long context are materialised in float32."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention [heads, queries, head_dim] over key and value [kv_heads, context, head_dim].

    `mask` [queries, context] is added to the capped scores. `sinks` [heads] are one more score of every query, whose
    weight goes to no token.
    """
    grouped = query.reshape(len(key), -1, *query.shape[1:])
    sink = None if sinks is None else sinks.float().view(*grouped.shape[:2], 1, 1)
    parts = zip(grouped.split(ROWS, dim=2), mask.split(ROWS), strict=True)
    return torch.cat([_attend(rows, key, value, seen, scaling, cap, sink) for rows, seen in parts], dim=2).flatten(0, 1)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, cap: float | None, sink: Tensor | None
) -> Tensor:
    """Return the attention of some rows [kv_heads, group, rows, head_dim]; a group reads its keys once."""
    scores = (query.flatten(1, 2) @ key.transpose(1, 2)).float()
    scores = scores.mul_(scaling) if cap is None else scores.mul_(scaling / cap).tanh_().mul_(cap)
    scores = scores.view(*query.shape[:3], -1).add_(mask)
    if sink is None:
        weights = scores.softmax(-1)
    else:
        weights = torch.cat([scores, sink.expand(*scores.shape[:3], 1)], dim=-1).softmax(-1)[..., :-1]
    return (weights.to(value.dtype).flatten(1, 2) @ value).view(query.shape)
