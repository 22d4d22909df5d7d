"""The shape of a model's KV, read from its config, and whether its attention can be translated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kedge.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class KVSpec:
    """KV of one token: `layers` x 2 x [kv_heads, head_dim] of `dtype`; the first `rotary_dim` of a key are rotated."""

    layers: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @classmethod
    def from_config(cls, config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> KVSpec:
        """Raises `UnsupportedModel` for what is not a RoPE decoder with one KV per token and layer."""
        config = config.get_text_config()
        if reason := _unservable(config):
            raise UnsupportedModel("model_type", config.model_type, reason)
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim,
            rotary_dim=int(head_dim * _rope(config).get("partial_rotary_factor", 1.0)),
            dtype=dtype,
        )


def _rope(config: PretrainedConfig) -> dict:
    return getattr(config, "rope_parameters", None) or {}


def _unservable(config: PretrainedConfig) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder has no single KV cache"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention (MLA) keeps no per-head KV"
    layer_types = set(getattr(config, "layer_types", None) or ())
    if odd := layer_types - {"full_attention", "sliding_attention"}:
        return f"layers of type {', '.join(sorted(odd))} (hybrid or state-space) keep no KV per token"
    if not hasattr(config, "num_attention_heads") or not _rope(config):
        return "no rotary position embedding in its config"
    return None


def translation_refusal(config: PretrainedConfig) -> str | None:
    """Why this model's KV cannot be translated, or None where it can. Exact reuse works either way."""
    config = config.get_text_config()
    if reason := _unservable(config):
        return reason
    rope = _rope(config)
    if any(isinstance(value, dict) for value in rope.values()):
        return "its layers rotate in different ways: a key has no single unrotated form"
    if rope.get("rope_type") in {"dynamic", "longrope"}:
        return f"{rope['rope_type']} RoPE changes with the length of the prompt"
    if _slides(config):
        return f"sliding-window attention (window {config.sliding_window}): a token does not see its whole context"
    return None


def _slides(config: PretrainedConfig) -> bool:
    if not getattr(config, "sliding_window", None):
        return False
    layer_types = getattr(config, "layer_types", None)
    return "sliding_attention" in layer_types if layer_types else True
