"""What is read from a config, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
    SmolLM3Config,
    T5Config,
)

from kedge.errors import UnsupportedModel
from kedge.kv.spec import KVSpec, mixed_layers, translation_refusal


def test_shape_of_llama_3_1_8b() -> None:
    config = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    spec = KVSpec.from_config(config, torch.bfloat16)
    assert spec == KVSpec(layers=32, kv_heads=8, head_dim=128, rotary_dim=128, dtype=torch.bfloat16)
    assert spec.bytes_per_token == 128 * 1024


def test_head_dim_of_its_own_is_used() -> None:
    assert KVSpec.from_config(Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=32)).head_dim == 32


@pytest.mark.parametrize("config", [MambaConfig(), T5Config(), BertConfig(), Qwen3NextConfig(num_hidden_layers=3)])
def test_models_without_rotated_kv_per_token_are_unsupported(config: object) -> None:
    with pytest.raises(UnsupportedModel, match=config.model_type):
        KVSpec.from_config(config)
    assert translation_refusal(config)


def test_layers_with_a_state_have_no_kv_and_are_not_translated() -> None:
    """Of Qwen3-Next's 48 layers, every fourth attends."""
    spec = KVSpec.from_config(Qwen3NextConfig(), torch.bfloat16)
    assert (spec.layers, spec.kv_heads, spec.head_dim) == (12, 2, 256)
    why = "layers of type linear_attention keep one state of all tokens before, which cannot be translated"
    assert translation_refusal(Qwen3NextConfig()) == why


@pytest.mark.parametrize("config", [LlamaConfig(), Qwen2Config(), Qwen3Config(), MistralConfig(sliding_window=None)])
def test_full_rope_attention_can_be_translated(config: object) -> None:
    assert translation_refusal(config) is None


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MistralConfig(sliding_window=4096), "sliding-window attention (window 4096)"),
        (Gemma3TextConfig(), "its layers rotate in different ways"),
        (SmolLM3Config(), "some of its layers do not rotate keys"),
        (DeepseekV3Config(), "multi-head latent attention (MLA)"),
        (LlamaConfig(), None),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_layers_that_differ_are_translated_here_and_named_for_engines_that_cannot(config: Any, why: str | None) -> None:
    assert translation_refusal(config) is None
    assert (why is None and mixed_layers(config) is None) or str(why) in str(mixed_layers(config))


def test_latent_attention_has_the_expanded_keys_of_all_heads() -> None:
    spec = KVSpec.from_config(DeepseekV3Config(), torch.bfloat16)
    assert (spec.layers, spec.kv_heads, spec.head_dim, spec.rotary_dim) == (61, 128, 192, 64)


def test_the_pool_holds_the_layer_with_the_largest_keys() -> None:
    spec = KVSpec.from_config(Gemma4TextConfig(head_dim=256, global_head_dim=512))
    assert (spec.layers, spec.kv_heads, spec.head_dim) == (30, 4, 512)


def test_every_kind_of_layer_may_have_rope_that_changes_with_the_length() -> None:
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
    }
    assert "dynamic" in str(translation_refusal(Gemma3TextConfig(rope_parameters=ropes)))


def test_rope_that_depends_on_the_prompts_length_is_refused() -> None:
    config = LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert "dynamic" in str(translation_refusal(config))
