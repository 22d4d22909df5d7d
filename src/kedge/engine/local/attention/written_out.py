"""Attention with its scores written out, for what PyTorch's fused kernels lack: capped scores (Gemma 2), where a score
s becomes cap * tanh(s / cap) before the softmax, and on a GPU attention sinks and windows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention [heads, queries, head_dim] over key and value [kv_heads, context, head_dim]. The scores of all
    heads are materialised in float32; a group reads its keys once.

    `mask` [queries, context] is added to the capped scores. `sinks` [heads] are one more score of every query, whose
    weight goes to no token.
    """
    grouped = query.reshape(len(key), -1, *query.shape[1:])
    scores = (grouped.flatten(1, 2) @ key.transpose(1, 2)).float()
    scores = scores.mul_(scaling) if cap is None else scores.mul_(scaling / cap).tanh_().mul_(cap)
    scores = scores.view(*grouped.shape[:3], -1).add_(mask)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.float().view(*grouped.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return (weights.to(value.dtype).flatten(1, 2) @ value).view(query.shape)
