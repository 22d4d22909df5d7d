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
RECURRENT = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Types of layers with a state of all tokens before, instead of KV or beside it."""
ATTENDING = frozenset({"full_attention", "sliding_attention"})
"""Types of layers with KV of every token."""
SAVING = 4
"""A latent is kept where that takes at least so many times less memory than keys and values of all heads."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one token's KV in one layer: keys [kv_heads, key_dim] and values [kv_heads, value_dim]."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The shape of one token's KV: `layers` x 2 x [kv_heads, head_dim] of `dtype`; `rotary_dim` dimensions of a key are
    rotated.
    """

    layers: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    dtype: torch.dtype
    shapes: tuple[LayerShape, ...] = ()
    """The shape of every layer, where not all of them fill [kv_heads, head_dim]; otherwise empty."""
    latent: int = 0
    """With multi-head latent attention: the dimensions of the latent that keys and values of all heads are computed
    from. A token's KV is then the latent and a rotated part, `latent` + `rotary_dim` numbers, of which `PagedStorage`
    counts the first half as values and the second as keys of a single head. Otherwise 0.
    """

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @classmethod
    def from_config(
        cls, config: PretrainedConfig, dtype: torch.dtype = torch.float32, *, latent: bool = True
    ) -> KVSpec:
        """Return the shape according to a config; unless `latent`, that of all heads where a latent could be kept.

        Raises `UnsupportedModel` unless it is a RoPE decoder with one KV per token and layer.
        `kedge.engine.local.model.layout` finds the shape that a model really has.
        """
        config = _text(config)
        if reason := _unservable(config):
            raise UnsupportedModel("model_type", config.model_type, reason)
        layers = _layers(config)
        if latent and (rank := _latent(layers)):
            rotated = _rotary_dim(config)
            return cls(config.num_hidden_layers, 1, (rank + rotated) // 2, rotated, dtype, latent=rank)
        return cls(
            layers=config.num_hidden_layers,
            kv_heads=max(getattr(one, "num_key_value_heads", None) or one.num_attention_heads for one in layers),
            head_dim=max(map(_head_dim, layers)),
            rotary_dim=max(map(_rotary_dim, layers)),
            dtype=dtype,
        )


def keeps_latent(expanded: int, latent: int, rotated: int) -> bool:
    """Return whether a layer's KV is kept as a latent and a rotated part: where that takes at most 1 / `SAVING` of the
    `expanded` numbers of all heads, and both halves of it are equal, the second with the whole rotated part.
    """
    fits = latent > 0 and rotated <= latent and (latent + rotated) % 2 == 0
    return fits and SAVING * (latent + rotated) <= expanded


def longest(config: PretrainedConfig) -> int:
    """Return the most positions that a sequence may have: the model supports them and rotates them consistently.

    Beyond its original length a model with length-dependent RoPE rotates all keys anew; cached keys, and those of
    shorter sequences in the same pass, would differ.
    """
    config = _text(config)
    positions: int = config.max_position_embeddings
    changing = [rope for rope in ropes(config) if rope.get("rope_type") in CHANGING]
    return min([positions, *(rope.get("original_max_position_embeddings") or positions for rope in changing)])


def ropes(config: PretrainedConfig) -> list[dict]:
    """Return the parameters of RoPE: one entry, or one for every kind of layer that has its own."""
    rope = getattr(_text(config), "rope_parameters", None) or {}
    by_kind = [value for value in rope.values() if isinstance(value, dict)]
    return by_kind or ([rope] if rope else [])


def _text(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the language model. Raises `UnsupportedModel` where there are several."""
    try:
        return config.get_text_config()
    except ValueError as error:
        raise UnsupportedModel("model_type", config.model_type, "it has more than one language model") from error


def _layers(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Return the config of every layer where they differ, else the one of all layers."""
    return list(getattr(config, "per_layer_config", None) or [config])


def _latent(layers: list[PretrainedConfig]) -> int:
    """Return the dimensions of the latent that is kept for a token, 0 for keys and values of all heads."""
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    sizes = {(one.num_attention_heads, *(getattr(one, name, None) for name in names)) for one in layers}
    heads, latent, rotated, unrotated, values = next(iter(sizes))
    if len(sizes) > 1 or not all(isinstance(size, int) for size in (latent, rotated, unrotated, values)):
        return 0
    return latent if keeps_latent(heads * (rotated + unrotated + values), latent, rotated) else 0


def _head_dim(config: PretrainedConfig) -> int:
    """Return the dimensions of a key in memory. With latent attention (MLA) `head_dim` is of its rotated part only."""
    if rotated := getattr(config, "qk_rope_head_dim", None):
        return rotated + config.qk_nope_head_dim
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rotary_dim(config: PretrainedConfig) -> int:
    if rotated := getattr(config, "qk_rope_head_dim", None):
        return rotated
    shares = [rope.get("partial_rotary_factor") or 1.0 for rope in ropes(config)]
    return int(_head_dim(config) * max(shares, default=0.0))


def _unservable(config: PretrainedConfig) -> str | None:
    """Return why Kedge cannot run such a model according to its text part's `config`, or None."""
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder has no single KV cache"
    layer_types = set(getattr(config, "layer_types", None) or ())
    if recurrent := ", ".join(sorted(layer_types & RECURRENT)):
        why = "keep one state of all tokens before, which cannot be translated (vLLM runs them)"
        return f"layers of type {recurrent} {why}"
    if odd := layer_types - ATTENDING:
        return f"layers of type {', '.join(sorted(odd))} (sparse, chunked) do not see all tokens before"
    if getattr(config, "alibi", False):
        return "ALiBi: positions are a bias of the scores, not a rotation of the keys"
    if not getattr(config, "num_attention_heads", None):
        return "its config has no `num_attention_heads`: layers without attention keep no KV"
    if not ropes(config):
        return "no rotary position embedding in its config"
    most = {"num_hidden_layers": 2**16, "num_attention_heads": 2**16, "vocab_size": 2**31}
    one = _layers(config)[0] if getattr(config, "num_hidden_layers", None) in range(1, 2**16) else config
    most |= {"max_position_embeddings": 2**31, "head_dim" if getattr(one, "head_dim", None) else "hidden_size": 2**31}
    sizes = {name: getattr(one, name, None) for name in most}
    bad = [name for name, size in sizes.items() if not (isinstance(size, int) and 0 < size < most[name])]
    return f"its config has no single `{bad[0]}` of a size that can be" if bad else None


def translation_refusal(config: PretrainedConfig) -> str | None:
    """Return why this model's KV cannot be translated according to its config, or None. Exact reuse works either way.

    Whether the rotation of its keys can be undone is not in a config: `kedge.engine.local.model.layout` tries it.
    """
    config = _text(config)
    if reason := _unservable(config):
        return reason
    changing = [rope["rope_type"] for rope in ropes(config) if rope.get("rope_type") in CHANGING]
    return f"{changing[0]} RoPE changes with the length of the prompt" if changing else None


def mixed_layers(config: PretrainedConfig) -> str | None:
    """Return how the layers differ from full attention with one rotation of whole keys, or None where they do not."""
    config = _text(config)
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention (MLA) keeps no per-head KV"
    if len(ropes(config)) > 1:
        return "its layers rotate in different ways: a key has no single unrotated form"
    if 0 in (getattr(config, "no_rope_layers", None) or ()):
        return "some of its layers do not rotate keys"
    kinds = getattr(config, "layer_types", None)
    if getattr(config, "sliding_window", None) and (not kinds or "sliding_attention" in kinds):
        return f"sliding-window attention (window {config.sliding_window}): a token does not see its whole context"
    return None
