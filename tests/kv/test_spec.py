"""What is read from a config, and what is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    DeepseekV3Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
    T5Config,
)

from kedge.errors import UnsupportedModel
from kedge.kv.spec import KVSpec, translation_refusal


def test_shape_of_llama_3_1_8b() -> None:
    config = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    spec = KVSpec.from_config(config, torch.bfloat16)
    assert spec == KVSpec(layers=32, kv_heads=8, head_dim=128, rotary_dim=128, dtype=torch.bfloat16)
    assert spec.bytes_per_token == 128 * 1024


def test_head_dim_of_its_own_is_used() -> None:
    assert KVSpec.from_config(Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=32)).head_dim == 32


@pytest.mark.parametrize("config", [MambaConfig(), T5Config(), BertConfig(), DeepseekV3Config(), Qwen3NextConfig()])
def test_models_without_rotated_kv_per_token_are_unsupported(config: object) -> None:
    with pytest.raises(UnsupportedModel, match=config.model_type):
        KVSpec.from_config(config)
    assert translation_refusal(config)


@pytest.mark.parametrize("config", [LlamaConfig(), Qwen2Config(), Qwen3Config(), MistralConfig(sliding_window=None)])
def test_full_rope_attention_can_be_translated(config: object) -> None:
    assert translation_refusal(config) is None


def test_sliding_window_is_refused_with_the_reason() -> None:
    assert "window 4096" in str(translation_refusal(MistralConfig(sliding_window=4096)))
    assert KVSpec.from_config(MistralConfig(sliding_window=4096)).layers == 32


def test_rope_that_depends_on_the_prompts_length_is_refused() -> None:
    config = LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert "dynamic" in str(translation_refusal(config))
