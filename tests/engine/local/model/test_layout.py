"""What the experiment at load finds: shapes of layers, and how each of them rotates its keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.engine.local.model.layout import Candidates, Recording, cos_and_sin, measured, recorded
from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.replica import random_model
from kedge.errors import UnsupportedModel
from kedge.kv.rotary import HALVES, Pairing, Rotary, RotaryByLayer
from kedge.kv.spec import KVSpec, LayerShape
from tests.engine.local.conftest import tiny_model
from tests.engine.local.model.test_architectures import BY_NAME

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
    runner = checked_runner(random_model(BY_NAME[name].config()).to(dtype))
    assert runner.refusal is None
    found = rotations(runner.rotary, runner.spec.layers)
    assert [one and (one.pairing, one.pairs) for one in found] == ROTATIONS[name]


@pytest.mark.parametrize("name", ["Gemma 3", "OLMo 3"])
def test_layers_of_a_kind_share_the_tables_of_their_kind(name: str) -> None:
    model = random_model(BY_NAME[name].config())
    runner = checked_runner(model)
    sliding, again, full = rotations(runner.rotary, 3)
    assert sliding is again
    for one, kind in ((sliding, "sliding_attention"), (full, "full_attention")):
        assert one is not None
        cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(1024)[None], kind)
        torch.testing.assert_close(one.tables, (cos[0, :, :8], sin[0, :, :8]))


def test_a_plain_model_has_one_rotation_and_fills_its_pool() -> None:
    runner = checked_runner(tiny_model("llama"))
    assert isinstance(runner.rotary, Rotary)
    assert (runner.rotary.pairing, runner.spec.shapes) == (HALVES, ())


SHAPES = {
    "Gemma 4": (LayerShape(2, 16, 16), LayerShape(2, 16, 16), LayerShape(1, 32, 32)),
    "MiMo V2, sinks and narrow values": (LayerShape(4, 24, 16), LayerShape(4, 24, 16), LayerShape(2, 24, 16)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_of_each_layer_is_found(name: str) -> None:
    assert checked_runner(random_model(BY_NAME[name].config())).spec.shapes == SHAPES[name]


def test_the_pool_is_as_large_as_the_largest_layer() -> None:
    spec = KVSpec(9, 9, 9, 9, torch.float32)
    assert measured(spec, (LayerShape(2, 8, 8),) * 2) == KVSpec(2, 2, 8, 9, torch.float32)
    shapes = (LayerShape(2, 8, 8), LayerShape(1, 16, 16))
    assert measured(spec, shapes) == KVSpec(2, 2, 16, 9, torch.float32, shapes)


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


def test_a_layer_that_attends_twice_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[2].self_attn.layer_idx = 1
    with pytest.raises(UnsupportedModel, match="attends in layer 1 more than once"):
        checked_runner(model)


def test_values_that_are_wider_than_keys_are_refused() -> None:
    layer = nn.Identity()
    layer.layer_idx = 0
    with pytest.raises(UnsupportedModel, match="keys and values have"):
        Recording().add(layer, torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 16))


ANGLES = torch.arange(5)[:, None] * torch.tensor([1.0, 0.1, 0.01])


@pytest.mark.parametrize(
    "given",
    [
        lambda x: x,
        lambda x: torch.cat((x, x), dim=-1)[None],
        lambda x: x.repeat_interleave(2, dim=-1)[None],
    ],
    ids=["once", "in halves", "in neighbours"],
)
def test_cos_and_sin_are_read_in_all_forms(given: Any) -> None:
    found = cos_and_sin((given(ANGLES.cos()), given(ANGLES.sin())))
    torch.testing.assert_close(found, (ANGLES.cos(), ANGLES.sin()))


def test_complex_numbers_are_cos_and_sin_too() -> None:
    found = cos_and_sin(torch.polar(torch.ones_like(ANGLES), ANGLES)[None])
    torch.testing.assert_close(found, (ANGLES.cos(), ANGLES.sin()))


@pytest.mark.parametrize(
    "output", [None, ANGLES, (ANGLES,), (ANGLES, None), (ANGLES, ANGLES[:2]), (ANGLES[0], ANGLES[0]), ([1], [2])]
)
def test_other_outputs_are_no_rotation(output: object) -> None:
    assert cos_and_sin(output) is None


def test_only_modules_without_weights_are_recorded_and_no_hook_stays() -> None:
    model = tiny_model("llama")
    with recorded(model) as calls, torch.no_grad():
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    assert [call.module for call in calls] == [model.model.rotary_emb]
    assert not any(module._forward_hooks for module in model.modules())


def test_no_candidate_means_that_keys_are_not_rotated_or_an_error() -> None:
    places = torch.tensor([0, 1, 5])
    constant, other = torch.ones(3, 2, 8), torch.randn(3, 2, 8)
    assert Candidates([]).best(constant, places) == (None, 0.0)
    rotary, error = Candidates([]).best(other, places)
    assert rotary is None
    assert error > 0.5
