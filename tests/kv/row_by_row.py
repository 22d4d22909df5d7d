"""What `kedge.kv.attention_kernel.attend` computes, written out."""

import torch
from torch import Tensor


def attend(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, owners: Tensor, lengths: Tensor,
    block_size: int, scaling: float, window: int | None, softcap: float | None = None, sinks: Tensor | None = None,
    *, together: bool = False,  # noqa: ARG001 (how it is computed, not what)
) -> Tensor:  # fmt: skip
    """[rows, heads, head_dim] in the dtype of `query`, row by row."""
    group, rows = query.shape[1] // keys.shape[1], []
    for one, row, length in zip(query, blocks[owners].long(), lengths.tolist(), strict=True):
        slots = (row[:, None] * block_size + torch.arange(block_size, device=row.device)).flatten()[:length]
        slots = slots[-window:] if window else slots
        key, value = (pool[slots].to(one.dtype).repeat_interleave(group, dim=1) for pool in (keys, values))
        scores = torch.einsum("hd,khd->hk", one, key) * scaling
        scores = softcap * (scores / softcap).tanh() if softcap else scores
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None].to(one.dtype)], dim=-1)
        weights = scores.softmax(-1)[:, : len(slots)]
        rows.append(torch.einsum("hk,khd->hd", weights, value))
    return torch.stack(rows)
