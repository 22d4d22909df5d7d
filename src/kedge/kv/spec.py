"""The shape of a model's KV, read from its config, and whether its attention can be translated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kedge.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CHANGING = frozenset({"dynamic", "longrope"})
"""Kinds of RoPE with frequencies that depend on the longest sequence of a pass."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The shape of one token's KV: `layers` x 2 x [kv_heads, head_dim] of `dtype`; the first `rotary_dim` of a key are
    rotated.
    """

    layers: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @classmethod
    def from_config(cls, config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> KVSpec:
        """Return the shape. Raises `UnsupportedModel` unless it is a RoPE decoder with one KV per token and layer."""
        config = _text(config)
        if reason := _unservable(config):
            raise UnsupportedModel("model_type", config.model_type, reason)
        heads, head_dim = config.num_attention_heads, _head_dim(config)
        return cls(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim,
            rotary_dim=int(head_dim * (_rope(config).get("partial_rotary_factor") or 1.0)),
            dtype=dtype,
        )


def longest(config: PretrainedConfig) -> int:
    """Return the largest number of positions of a sequence: those that the model supports and rotates consistently.

    Beyond its original length a model with length-dependent RoPE rotates all keys anew; cached keys, and those of
    shorter sequences in the same pass, would differ.
    """
    config = _text(config)
    rope, positions = _rope(config), config.max_position_embeddings
    if rope.get("rope_type") not in CHANGING:
        return positions
    return min(positions, rope.get("original_max_position_embeddings") or positions)


def _text(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the language model. Raises `UnsupportedModel` where there are several."""
    try:
        return config.get_text_config()
    except ValueError as error:
        raise UnsupportedModel("model_type", config.model_type, "it has more than one language model") from error


def _rope(config: PretrainedConfig) -> dict:
    return getattr(config, "rope_parameters", None) or {}


def _head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _unservable(config: PretrainedConfig) -> str | None:
    """Return why Kedge cannot run such a model according to its text part's `config`, or None."""
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder has no single KV cache"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention (MLA) keeps no per-head KV"
    layer_types = set(getattr(config, "layer_types", None) or ())
    if odd := layer_types - {"full_attention", "sliding_attention"}:
        return f"layers of type {', '.join(sorted(odd))} (hybrid, sparse or state-space) keep no KV that all tokens see"
    if getattr(config, "alibi", False):
        return "ALiBi: positions are a bias of the scores, not a rotation of the keys"
    if not getattr(config, "num_attention_heads", None) or not _rope(config):
        return "no rotary position embedding in its config"
    if any(isinstance(value, dict) for value in _rope(config).values()):
        return "its layers rotate in different ways: a key has no single unrotated form"
    return _incomplete(config)


def _incomplete(config: PretrainedConfig) -> str | None:
    """Return the size that the config does not give as a single number, or None."""
    sizes = ["num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"]
    sizes.append("head_dim" if getattr(config, "head_dim", None) else "hidden_size")
    odd = [name for name in sizes if not isinstance(getattr(config, name, None), int)]
    return f"its config has no single `{odd[0]}`" if odd else None


def translation_refusal(config: PretrainedConfig) -> str | None:
    """Return why this model's KV cannot be translated, or None where it can. Exact reuse works either way."""
    config = _text(config)
    if reason := _unservable(config):
        return reason
    rope = _rope(config)
    if 0 in (getattr(config, "no_rope_layers", None) or ()):
        return "some of its layers do not rotate keys"
    if rope.get("rope_type") in CHANGING:
        return f"{rope['rope_type']} RoPE changes with the length of the prompt"
    if _slides(config):
        return f"sliding-window attention (window {config.sliding_window}): a token does not see its whole context"
    return None


def _slides(config: PretrainedConfig) -> bool:
    if not getattr(config, "sliding_window", None):
        return False
    layer_types = getattr(config, "layer_types", None)
    return "sliding_attention" in layer_types if layer_types else True
