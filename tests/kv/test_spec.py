"""What is read from a config, and what is refused."""

from typing import Any

import pytest
import torch
import transformers as hf

from kedge.errors import UnsupportedModel
from kedge.kv.spec import KVSpec, keeps_latent, mixed_layers, translation_refusal

LLAMA_8B = hf.LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
QWEN = hf.Qwen3Config(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
GEMMA = hf.Gemma4TextConfig(head_dim=256, global_head_dim=512)


@pytest.mark.parametrize(
    ("config", "latent", "shape", "numbers"),
    [
        (LLAMA_8B, True, (32, 8, 128, 128), 32 * 2 * 8 * 128),
        (QWEN, True, (2, 2, 32, 32), 2 * 2 * 2 * 32),
        (GEMMA, True, (30, 4, 512, 512), 30 * 2 * 4 * 512),
        (hf.DeepseekV3Config(), True, (61, 1, 288, 64), 61 * (512 + 64)),
        (hf.DeepseekV3Config(), False, (61, 128, 192, 64), 61 * 2 * 128 * 192),
    ],
    ids=["Llama 3.1 8B", "a head_dim of its own", "the layer with the largest keys", "a latent", "all heads"],
)
def test_the_shape_of_a_model(config: Any, latent: bool, shape: tuple[int, ...], numbers: int) -> None:
    spec = KVSpec.from_config(config, torch.bfloat16, latent=latent)
    assert spec == KVSpec(*shape, torch.bfloat16, latent=512 if shape[1] == 1 else 0)
    assert spec.bytes_per_token == 2 * numbers


@pytest.mark.parametrize("config", [hf.T5Config(), hf.BertConfig()])
def test_models_without_rotated_kv_per_token_are_unsupported(config: object) -> None:
    with pytest.raises(UnsupportedModel, match=config.model_type):
        KVSpec.from_config(config)
    assert translation_refusal(config)


STATE = "keep one state of all tokens before, which cannot be translated (vLLM runs them)"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (hf.Qwen3NextConfig(), f"layers of type linear_attention {STATE}"),
        (hf.MambaConfig(), f"layers of type linear_attention {STATE}"),
        (hf.ZambaConfig(), f"layers of type hybrid, linear_attention {STATE}"),
        (hf.FalconH1Config(), f"layers of type hybrid {STATE}"),
        (hf.Lfm2Config(layer_types=["conv", "full_attention"], num_hidden_layers=2), f"layers of type conv {STATE}"),
        (hf.RwkvConfig(), "its config has no `num_attention_heads`: layers without attention keep no KV"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_layers_with_a_state_are_refused_by_their_type(config: Any, why: str) -> None:
    """Where only every fourth layer has KV, where none has, and where one has both."""
    with pytest.raises(UnsupportedModel) as caught:
        KVSpec.from_config(config)
    assert (caught.value.key, caught.value.value, caught.value.why) == ("model_type", config.model_type, why)
    assert translation_refusal(config) == why


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (hf.MistralConfig(sliding_window=4096), "sliding-window attention (window 4096)"),
        (hf.Gemma3TextConfig(), "its layers rotate in different ways"),
        (hf.SmolLM3Config(), "some of its layers do not rotate keys"),
        (hf.DeepseekV3Config(), "multi-head latent attention (MLA)"),
        (hf.LlamaConfig(), None),
        (hf.MistralConfig(sliding_window=None), None),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_layers_that_differ_are_translated_here_and_named_for_engines_that_cannot(config: Any, why: str | None) -> None:
    assert translation_refusal(config) is None
    assert (why is None and mixed_layers(config) is None) or str(why) in str(mixed_layers(config))


@pytest.mark.parametrize(
    ("expanded", "latent", "rotated", "kept"),
    [
        (4 * 40, 32, 8, True),
        (4 * 40 - 1, 32, 8, False),
        (10**6, 33, 8, False),
        (10**6, 8, 8, True),
        (10**6, 6, 8, False),
        (10**6, 32, 0, True),
        (10**6, 0, 8, False),
    ],
    ids=["4 times", "less", "odd", "as large a rotated part", "a larger one", "none", "no latent"],
)
def test_a_latent_is_kept_where_it_is_four_times_smaller_and_has_halves(
    expanded: int, latent: int, rotated: int, kept: bool
) -> None:
    assert keeps_latent(expanded, latent, rotated) is kept


def test_every_kind_of_layer_may_have_rope_that_changes_with_the_length() -> None:
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
    }
    for config in (hf.Gemma3TextConfig(rope_parameters=ropes), hf.LlamaConfig(rope_parameters=ropes["full_attention"])):
        assert "dynamic" in str(translation_refusal(config))
