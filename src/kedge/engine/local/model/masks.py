"""A check at load that a model's masks equal those of Kedge's attention at all distances.

A window is larger than any prompt that could be tried at load. But Transformers makes masks from functions of two
positions, which can be evaluated for positions far apart. For that, one token runs through the model, with an attention
function that inspects its mask and passes the values on: a single token attends only to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kedge.engine.local.attention.arguments import unsupported
from kedge.engine.local.model.comparing import attention

if TYPE_CHECKING:
    from kedge.engine.local.model.runner import ModelRunner

NAME = "kedge-masks"
Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query position, key position) -> whether the query sees the key"""


@dataclass(frozen=True, slots=True)
class Mask:
    """A stand-in for a mask: it holds the function that the mask is made from."""

    sees: Sees


@dataclass(slots=True)
class Look:
    """The object passed through the model: positions up to which its masks are evaluated."""

    longest: int
    layers: int = field(default=0)

    def require_same(self, module: nn.Module, mask: object, window: int | None) -> None:
        """Raise `UnsupportedModel` unless a mask is that of causal attention within a window."""
        self.layers += 1
        if not isinstance(mask, Mask):
            raise unsupported(module, "its mask is not made by Transformers' functions, and cannot be checked")
        query, key = _pairs(self.longest, window)
        zero = torch.zeros_like(query)
        theirs = mask.sees(zero, zero, query, key)
        ours = (key <= query) & (key > query - (window or self.longest))
        if (odd := (theirs != ours).nonzero().flatten()).numel():
            q, k = int(query[odd[0]]), int(key[odd[0]])
            handed = f"a window of {window}" if window else "no window"
            raise unsupported(module, f"it hands over {handed}, and masks position {k} from {q} otherwise")


def require_same(runner: ModelRunner) -> None:
    """Raise `UnsupportedModel` unless every layer's mask fits the window passed to its attention function."""
    look = Look(runner.max_positions)
    token = torch.zeros(1, 1, dtype=torch.int64, device=runner.device)
    with attention(runner.model, NAME), torch.inference_mode():
        runner.model(input_ids=token, position_ids=token, use_cache=False, kedge=look, **runner.recurrent.fresh([1]))


def _pairs(longest: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Return positions of queries and keys at which different masks differ: near, at a window's edge, far."""
    edges = (0, 1, 2, longest // 2) if window is None else (0, 1, 2, window - 1, window, window + 1, longest // 2)
    points = sorted({at for edge in edges for at in (edge, longest - 1 - edge) if 0 <= at < longest})
    query, key = torch.meshgrid(torch.tensor(points), torch.tensor(points), indexing="ij")
    return query.flatten(), key.flatten()


def _make(mask_function: Sees, **_: Any) -> Mask:
    """Return a stand-in for a mask, with the signature of Transformers' mask functions."""
    return Mask(mask_function)


def _look(
    module: nn.Module,
    query: Tensor,
    key: Tensor,  # noqa: ARG001 (Transformers passes it)
    value: Tensor,
    attention_mask: object = None,
    *,
    kedge: Look,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Check the mask and return the values: value [1, kv_heads, 1, head_dim] -> [1, 1, heads, head_dim]."""
    kedge.require_same(module, attention_mask, sliding_window)
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _look)
AttentionMaskInterface.register(NAME, _make)
