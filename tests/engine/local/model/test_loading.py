"""What experiments at load find: shapes and rotations of layers, and what is refused, by which words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention

from kedge.engine.local.attention.paged import paged_attention
from kedge.engine.local.model import loading
from kedge.engine.local.model.layout import Recording, cos_and_sin
from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.replica import random_model, small_config
from kedge.errors import UnsupportedModel
from kedge.kv.rotary import HALVES, Pairing, Rotary, RotaryByLayer
from kedge.kv.spec import LayerShape
from tests.engine.local.conftest import SHAPE, tiny_model
from tests.engine.local.model.test_architectures import model_of

NEIGHBOURS = Pairing(neighbours=True)
ROTATIONS: dict[str, list[tuple[Pairing, int] | None]] = {
    "Qwen3": [(HALVES, 16)] * 3,
    "Phi, partial rotary": [(HALVES, 4)] * 3,
    "Cohere, neighbours paired": [(NEIGHBOURS, 8)] * 3,
    "GLM-4, partial rotary": [(NEIGHBOURS, 4)] * 3,
    "SmolLM3, layers without RoPE": [(HALVES, 8), (HALVES, 8), None],
    "Gemma 4": [(HALVES, 8), (HALVES, 8), (HALVES, 16)],
    "gpt-oss, attention sinks": [(HALVES, 8)] * 3,
    "DeepSeek-V2, MLA": [(Pairing(start=12, neighbours=True), 4)] * 3,
    "DeepSeek-V3 and Kimi K2, MLA": [(Pairing(start=12), 4)] * 3,
}
"""For each layer which dimensions are paired, and how many pairs there are; None where keys are not rotated"""


def rotations(rotary: Rotary | RotaryByLayer, layers: int) -> list[Rotary | None]:
    if isinstance(rotary, Rotary):
        return [rotary] * layers
    return [one for run, one in rotary._runs for _ in range(run.start, run.stop)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROTATIONS)
def test_the_rotation_of_each_layer_is_found(name: str, dtype: torch.dtype) -> None:
    runner = checked_runner(model_of(name).to(dtype))
    assert runner.refusal is None
    found = rotations(runner.rotary, runner.spec.layers)
    assert [one and (one.pairing, one.pairs) for one in found] == ROTATIONS[name]


@pytest.mark.parametrize("name", ["Gemma 3", "OLMo 3"])
def test_layers_of_a_kind_share_the_tables_of_their_kind(name: str) -> None:
    model = model_of(name)
    runner = checked_runner(model)
    sliding, again, full = rotations(runner.rotary, 3)
    assert sliding is again
    for one, kind in ((sliding, "sliding_attention"), (full, "full_attention")):
        cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(1024)[None], kind)
        torch.testing.assert_close(one.tables, (cos[0, :, :8], sin[0, :, :8]))


SHAPES = {
    "Gemma 4": (LayerShape(2, 16, 16), LayerShape(2, 16, 16), LayerShape(1, 32, 32)),
    "MiMo V2, sinks and narrow values": (LayerShape(4, 24, 16), LayerShape(4, 24, 16), LayerShape(2, 24, 16)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_of_each_layer_is_found_and_the_pool_is_as_large_as_the_largest(name: str) -> None:
    spec = checked_runner(model_of(name)).spec
    assert spec.shapes == SHAPES[name]
    widest = (max(one.kv_heads for one in spec.shapes), max(one.key_dim for one in spec.shapes))
    assert (spec.kv_heads, spec.head_dim) == widest


class Placed(nn.Module):
    """A projection that adds a vector of each position, as learned positions do."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.places = nn.Parameter(torch.randn(1024, inner.out_features))
        self.positions = torch.zeros(0)

    def look(self, _: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        given = kwargs.get("position_ids")
        self.positions = torch.arange(kwargs["input_ids"].shape[1])[None] if given is None else given

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.places[self.positions]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("v_proj", "the values of layer 1 depend on their position"),
        ("k_proj", "the keys of layer 1 are rotated in none of the known ways"),
    ],
)
def test_a_layer_with_positions_besides_rotation_is_served_and_not_translated(name: str, why: str) -> None:
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    placed = Placed(getattr(attention, name))
    setattr(attention, name, placed)
    model.register_forward_pre_hook(placed.look, with_kwargs=True)
    assert checked_runner(model).refusal == why


def test_values_that_are_wider_than_keys_are_refused() -> None:
    layer = nn.Identity()
    layer.layer_idx = 0
    with pytest.raises(UnsupportedModel, match="keys and values have"):
        Recording().add(layer, torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 16))


ANGLES = torch.arange(5)[:, None] * torch.tensor([1.0, 0.1, 0.01])


@pytest.mark.parametrize(
    "output", [None, ANGLES, (ANGLES,), (ANGLES, None), (ANGLES, ANGLES[:2]), (ANGLES[0], ANGLES[0]), ([1], [2])]
)
def test_other_outputs_are_no_rotation(output: object) -> None:
    assert cos_and_sin(output) is None


HALF = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
REFUSED = {
    "ALiBi": (transformers.FalconConfig(alibi=True), "ALiBi"),
    "no interface": (transformers.FalconConfig(), "attention of its own only"),
    "rope for half of a key": (
        transformers.LlamaConfig(rope_parameters=HALF),
        "its code fails with Kedge's attention: RuntimeError",
    ),
}


@pytest.mark.parametrize(("config", "why"), REFUSED.values(), ids=REFUSED)
def test_a_model_in_memory_is_refused_with_the_reason(config: transformers.PretrainedConfig, why: str) -> None:
    model = random_model(small_config(config))
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel) as refused:
        checked_runner(model)
    assert why in refused.value.why
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ('{"model_type": "llama", "hidden_size": "wide"}', "its config cannot be read"),
        ('{"model_type": "nothing"}', "its config cannot be read"),
        ("[", "its config cannot be read"),
        (transformers.CLIPConfig().to_json_string(), "no rotary position embedding"),
    ],
)
def test_what_is_no_config_of_a_language_model_is_unsupported(config: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(UnsupportedModel, match=why):
        loading.load(tmp_path, torch.float32, torch.device("cpu"))


class Changed(LlamaAttention):
    """Attention that hands over one argument more."""

    handed: dict[str, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **{**kwargs, **self.handed})


def handing(**handed: Any) -> transformers.PreTrainedModel:
    """A model whose attention hands over more arguments."""
    model, kind = tiny_model("llama"), type("Handing", (Changed,), {"handed": handed})
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    return model


@pytest.mark.parametrize(
    "handed", [{"position_bias": torch.zeros(1)}, {"is_causal": False}, {"head_mask": torch.ones(4)}, {"a_new_one": 0}]
)
def test_an_argument_that_is_not_honoured_is_refused_by_name(handed: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=f"does not know its argument `{next(iter(handed))}`") as refused:
        checked_runner(handing(**handed))
    assert refused.value.value == "Handing"


def test_an_argument_that_is_none_or_changes_nothing_is_let_through() -> None:
    assert checked_runner(handing(s_aux=None, is_causal=True, output_attentions=False)).refusal is None


def test_a_model_in_training_is_refused_for_its_dropout() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, attention_dropout=0.1)).train()
    with pytest.raises(UnsupportedModel, match="dropout"):
        checked_runner(model)


class Remembering(nn.Module):
    """A layer's MLP that also looks at the token before, which a cache of keys does not hold."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_model_with_a_state_of_its_own_is_refused_whatever_its_precision(dtype: torch.dtype) -> None:
    model = random_model(small_config(transformers.LlamaConfig()))
    model.model.layers[1].mlp = Remembering(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModel, match="its logits differ from those of its own attention by"):
        checked_runner(model.to(dtype))


@pytest.mark.parametrize(("window", "why"), [(4, "its logits differ"), (500, "it hands over no window, and masks")])
def test_a_window_that_is_only_in_the_mask_is_refused_however_large(window: int, why: str) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=window, max_window_layers=0)
    model = transformers.Qwen2ForCausalLM(config).eval()
    assert checked_runner(model).max_positions == 1024
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    with pytest.raises(UnsupportedModel, match=why):
        checked_runner(model)


SPOILED: dict[str, Callable[[Any], object]] = {
    "attends in layer 1 more than once": lambda model: setattr(model.model.layers[2].self_attn, "layer_idx", 1),
    "not called once by every layer, but 2 times, in 2 of 3 layers": lambda model: model.model.layers.pop(2),
    "its own logits are not finite": lambda model: model.lm_head.weight.data[0].fill_(float("nan")),
}


@pytest.mark.parametrize("why", SPOILED)
def test_a_model_whose_layers_or_logits_are_not_as_they_should_be_is_refused(why: str) -> None:
    model = tiny_model("llama")
    SPOILED[why](model)
    with pytest.raises(UnsupportedModel, match=why):
        checked_runner(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", [transformers.LlamaConfig, transformers.Gemma2Config, transformers.CohereConfig, transformers.Phi3Config]
)
def test_half_precision_is_no_reason_to_refuse(kind: type[transformers.PretrainedConfig], dtype: torch.dtype) -> None:
    checked_runner(random_model(small_config(kind())).to(dtype))


def test_the_check_leaves_random_numbers_and_the_default_dtype_as_they_were() -> None:
    model = tiny_model("qwen3")
    before = torch.get_rng_state()
    checked_runner(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.config._attn_implementation == "kedge"
    assert not model.training and not any(module._forward_hooks for module in model.modules())


def test_attention_without_a_batch_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="does not get the batch"):
        paged_attention(nn.Identity(), torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))


def test_a_small_copy_has_layers_of_every_type() -> None:
    config = transformers.Gemma3TextConfig()
    small = small_config(config)
    assert (len(config.layer_types), small.num_hidden_layers) == (26, 2)
    assert set(small.layer_types) == set(config.layer_types) == {"sliding_attention", "full_attention"}
