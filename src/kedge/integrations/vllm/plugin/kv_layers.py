"""vLLM's attention layers as writers of KV: each with its pages, and with the op by which vLLM itself writes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class KVLayer(NamedTuple):
    """An attention layer (`Attention` or `MLAAttention` of vLLM's `model_executor.layers.attention`) and its pages."""

    layer: Any
    pages: Tensor
    """As vLLM registers them with a connector"""
    dtype: torch.dtype
    """Of the keys and values that the model computes"""

    @property
    def bound(self) -> Tensor:
        """The pages as vLLM passes them to the layer's op: another view of the same memory where blocks are split."""
        bound = getattr(self.layer, "kv_cache", None)
        return bound if isinstance(bound, Tensor) and _memory(bound) == _memory(self.pages) else self.pages

    @property
    def shape(self) -> tuple[int, int]:
        """(kv_heads, head_dim)"""
        return self.layer.num_kv_heads, self.layer.head_size

    @property
    def codes(self) -> Tensor:
        """The pages; bytes where a number has 8 bits, since PyTorch does little with float8."""
        return self.pages.view(torch.uint8) if self.pages.itemsize == 1 else self.pages

    @property
    def scales(self) -> tuple[Any, Any]:
        """What vLLM divides keys and values by before it keeps them in 8 bits, as they are now."""
        return self.layer._k_scale, self.layer._v_scale

    def store(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write rotated keys and values [tokens, kv_heads, head_dim] to `slots` [tokens] with the model's own op."""
        self.layer.impl.do_kv_cache_update(self.layer, keys, values, self.bound, slots)

    def fill(self, slots: Tensor) -> None:
        """Write numbers other than zero to `slots` [tokens] with the model's own op."""
        layer = self.layer
        if (latent := getattr(layer, "kv_lora_rank", None)) is None:
            size, heads = layer.head_size, layer.num_kv_heads
            values = self._numbers(len(slots), heads, getattr(layer, "head_size_v", size))
            self.store(self._numbers(len(slots), heads, size), values, slots)
        else:  # MLA has no keys and values by head
            latents, rope = self._numbers(len(slots), latent), self._numbers(len(slots), 1, layer.qk_rope_head_dim)
            layer.impl.do_kv_cache_update(latents, rope, self.bound, slots, layer.kv_cache_dtype, layer._k_scale)

    def _numbers(self, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return (torch.arange(count, device=self.pages.device) % 7 + 1).to(self.dtype).view(shape)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
