"""What is refused when a model is loaded, by which words, and what the check leaves as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CLIPConfig,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    HunYuanDenseV1Config,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    StableLmConfig,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from kedge.engine.local.attention.paged import paged_attention
from kedge.engine.local.model import loading as models
from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.replica import random_model, small_config
from kedge.errors import UnsupportedModel
from tests.engine.local.conftest import SHAPE, tiny_model

HALF = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
REFUSED = {
    "partial rotary without an interface": (StableLmConfig(), "attention of its own only"),
    "ALiBi": (FalconConfig(alibi=True), "ALiBi"),
    "no interface": (FalconConfig(), "attention of its own only"),
    "rope for half of a key": (
        LlamaConfig(rope_parameters=HALF),
        "its code fails with Kedge's attention: RuntimeError",
    ),
}


@pytest.mark.parametrize(("config", "why"), REFUSED.values(), ids=REFUSED)
def test_a_model_in_memory_is_refused_with_the_reason(config: PretrainedConfig, why: str) -> None:
    model = random_model(small_config(config))
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel) as refused:
        checked_runner(model)
    assert why in refused.value.why
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("text", ['{"model_type": "llama", "hidden_size": "wide"}', '{"model_type": "nothing"}', "["])
def test_a_config_that_cannot_be_read_is_unsupported(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(UnsupportedModel, match="its config cannot be read"):
        models.load(tmp_path, torch.float32, torch.device("cpu"))


def test_what_is_no_language_model_is_unsupported(tmp_path: Path) -> None:
    CLIPConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="no rotary position embedding"):
        models.load(tmp_path, torch.float32, torch.device("cpu"))


class Changed(LlamaAttention):
    """Attention that hands over one argument more."""

    handed: dict[str, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **{**kwargs, **self.handed})


@pytest.mark.parametrize(
    ("handed", "why"),
    [
        ({"position_bias": torch.zeros(1)}, "`position_bias` (a bias by distance)"),
        ({"is_causal": False}, "`is_causal` (attention to later tokens)"),
        ({"head_mask": torch.ones(4)}, "`head_mask` (heads that are switched off)"),
        ({"a_new_one": 0}, "`a_new_one`"),
    ],
    ids=["position_bias", "is_causal", "head_mask", "a_new_one"],
)
def test_an_argument_that_is_not_honoured_is_refused_by_name(handed: dict[str, Any], why: str) -> None:
    model = tiny_model("llama")
    kind = type("Handing", (Changed,), {"handed": handed})
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    with pytest.raises(UnsupportedModel) as refused:
        checked_runner(model)
    assert (refused.value.value, why in refused.value.why) == ("Handing", True)


def test_an_argument_that_is_none_or_changes_nothing_is_let_through() -> None:
    model = tiny_model("llama")
    handed = {"s_aux": None, "is_causal": True, "output_attentions": False}
    kind = type("Handing", (Changed,), {"handed": handed})
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    assert checked_runner(model).refusal is None


def test_a_model_in_training_is_refused_for_its_dropout() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_dropout=0.1)).train()
    with pytest.raises(UnsupportedModel, match="dropout"):
        checked_runner(model)


class Remembering(nn.Module):
    """A layer's MLP that also looks at the token before, which a cache of keys does not hold."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def test_a_model_with_a_state_of_its_own_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp = Remembering(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModel, match="its logits differ from those of its own attention by"):
        checked_runner(model)


def windowless(model: PreTrainedModel) -> PreTrainedModel:
    """A model that masks by a window and keeps it from its attention."""
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    return model


@pytest.mark.parametrize(("window", "why"), [(4, "its logits differ"), (500, "it hands over no window, and masks")])
def test_a_window_that_is_only_in_the_mask_is_refused_however_large(window: int, why: str) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=window, max_window_layers=0)
    model = Qwen2ForCausalLM(config).eval()
    assert checked_runner(model).max_positions == 1024
    with pytest.raises(UnsupportedModel, match=why):
        checked_runner(windowless(model))


def test_a_layer_that_is_skipped_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers = model.model.layers[:2]
    with pytest.raises(UnsupportedModel, match="not called once by every layer, but 2 times, in 2 of 3 layers"):
        checked_runner(model)


def test_logits_that_are_not_finite_are_refused() -> None:
    model = tiny_model("llama")
    model.lm_head.weight.data[0, 0] = float("nan")
    with pytest.raises(UnsupportedModel, match="its own logits are not finite"):
        checked_runner(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [LlamaConfig, Gemma2Config, CohereConfig, Phi3Config])
def test_half_precision_is_no_reason_to_refuse(kind: type[PretrainedConfig], dtype: torch.dtype) -> None:
    checked_runner(random_model(small_config(kind())).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_hide_a_difference(dtype: torch.dtype) -> None:
    model = random_model(small_config(LlamaConfig()))
    model.model.layers[1].mlp = Remembering(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModel, match="its logits differ"):
        checked_runner(model.to(dtype))


def test_keys_whose_rotation_cannot_be_undone_are_served_and_not_translated() -> None:
    """HunYuan normalises keys, with a weight per dimension, after it has rotated them."""
    refusal = checked_runner(random_model(small_config(HunYuanDenseV1Config()))).refusal
    assert refusal == "the keys of layer 0 are rotated in none of the known ways"
    assert checked_runner(random_model(small_config(LlamaConfig()))).refusal is None


def test_the_check_leaves_random_numbers_and_the_default_dtype_as_they_were() -> None:
    model = tiny_model("qwen3")
    before = torch.get_rng_state()
    checked_runner(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.config._attn_implementation == "kedge"
    assert not model.training


def test_attention_without_a_batch_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="does not get the batch"):
        paged_attention(nn.Identity(), torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))
