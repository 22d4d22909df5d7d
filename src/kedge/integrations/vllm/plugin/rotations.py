"""How the layers of a model rotate keys, with vLLM's own tables, and of which models with windows that is known.

The rotation of the first layer is checked by experiment: translation is off until that was seen. Of a later layer
nothing can be seen from outside: its keys depend on all tokens before. So where layers differ, only models are
translated that were compared with Transformers in all of their layers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.rotary_embedding import get_rope

from kedge.integrations.vllm.plugin.pages import RopeModule, rotation_error
from kedge.kv.rotary import Rotary, Rotation, by_layer
from kedge.kv.segment import KVSegment
from kedge.kv.spec import mixed_layers
from kedge.types import Tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import ModelConfig


WINDOWED = frozenset({"gemma2", "gemma3_text", "gpt_oss"})
"""Types of models with windows in some layers, which rotate keys as their config says, by kind of layer or all alike"""
logger = logging.getLogger(__name__)
MAX_ROTATION_ERROR = 0.05
"""Relative difference of keys that rounding of a 16-bit type explains, and another rotation does not. With 8 bits it is
the largest error of rounding, to which two keys' mean errors do not sum up.
"""
UNCHECKED = "its rotary embedding has not been checked yet"


def layers_refusal(text: PretrainedConfig) -> str | None:
    """Return how a model's layers differ where it is not known how they rotate keys, else None."""
    return None if text.model_type in WINDOWED else mixed_layers(text)


def rotation_of(config: ModelConfig, layers: Sequence[int], device: torch.device) -> Rotation:
    """Return the rotation of the layers with these numbers."""
    text = config.hf_text_config
    ropes: dict[str, Any] = text.rope_parameters
    if not any(isinstance(value, dict) for value in ropes.values()):
        return _rotary(config, ropes, device)
    kinds = [text.layer_types[number] for number in layers]
    rotaries = {kind: _rotary(config, ropes[kind], device) for kind in dict.fromkeys(kinds)}
    return by_layer([rotaries[kind] for kind in kinds])


def _rotary(config: ModelConfig, rope: dict[str, Any], device: torch.device) -> Rotary:
    longest = config.hf_text_config.max_position_embeddings
    embedding = get_rope(config.get_head_size(), longest, True, rope, config.dtype)
    table = embedding.cos_sin_cache.to(device)
    return Rotary(RopeModule(table), min(len(table), config.max_model_len), device)


class RotationCheck:
    """The check of one rank, by captured prompts."""

    def __init__(self, rounding: float) -> None:
        """`rounding` is the largest relative error with which the pages keep a key."""
        self._limit = max(MAX_ROTATION_ERROR, rounding)
        self.refusal: str | None = UNCHECKED
        """Why nothing is translated, None where keys are rotated as the model does it"""
        self.is_checked = False
        """Whether a prompt has shown that they are rotated so"""

    def trust(self) -> None:
        """Translate with what an engine has learned that had checked this model. The next prompt is checked again."""
        self.refusal = None

    def check(self, tokens: Tokens, kv: KVSegment) -> None:
        """Compare the keys of equal tokens in a captured prompt. Nothing changes where no token occurs twice."""
        error = rotation_error(tokens, kv.keys[0])
        if error is None:
            return
        self.is_checked = error < self._limit
        self.refusal = None if self.is_checked else "its rotary embedding differs from Kedge's"
        if not self.is_checked:
            logger.warning("translation is off: %s (keys of equal tokens differ by %.2f)", self.refusal, error)
