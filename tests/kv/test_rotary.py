"""Rotation against Transformers' own."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kedge.kv.rotary import HALVES, Pairing, Rotary, RotaryByLayer, by_layer
from tests.engine.local.conftest import FAMILIES, tiny_model


def rotary_of(family: str) -> tuple[Rotary, torch.nn.Module, int]:
    model = tiny_model(family)
    head_dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    return Rotary(model.model.rotary_emb, 512, torch.device("cpu")), model.model.rotary_emb, head_dim


@pytest.mark.parametrize("family", FAMILIES)
def test_rotates_as_the_model_does_and_back(family: str) -> None:
    rotary, module, head_dim = rotary_of(family)
    keys, positions = torch.randn(3, 7, 2, head_dim), torch.tensor([0, 1, 5, 9, 100, 101, 400])
    cos, sin = module(keys, position_ids=positions[None])
    expected = apply_rotary_pos_emb(keys.transpose(1, 2), keys.transpose(1, 2), cos, sin)[1].transpose(1, 2)
    out = torch.empty_like(keys)
    rotary.rotate(keys, positions, out=out)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotary.unrotate(out, positions), keys, atol=1e-5, rtol=1e-4)


PAIRINGS = {
    "neighbours": Pairing(neighbours=True),
    "backwards": Pairing(backwards=True),
    "the last ones": Pairing(start=6),
    "the last ones, neighbours": Pairing(start=6, neighbours=True),
}


@pytest.mark.parametrize("pairing", PAIRINGS.values(), ids=PAIRINGS)
def test_a_pairing_is_a_permutation_of_the_usual_one(pairing: Pairing) -> None:
    """Rotated as usual after its dimensions are sorted, and sorted back; backwards, at the negative angle."""
    rotary, module, size = rotary_of("llama")
    order = torch.arange(size)
    if pairing.neighbours:
        order = torch.cat((order[::2], order[1::2]))
    start = pairing.start
    keys, positions = torch.randn(2, 5, 2, start + size), torch.tensor([0, 1, 5, 99, 400])
    cos, sin = module(keys, position_ids=positions[None])
    wanted, inner = keys.clone(), keys[..., start:][..., order].transpose(1, 2)
    turned = apply_rotary_pos_emb(inner, inner, cos, -sin if pairing.backwards else sin)[1].transpose(1, 2)
    wanted[..., start + order] = turned
    out = torch.empty_like(keys)
    rotary.paired(pairing).rotate(keys, positions, out=out)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotary.paired(pairing).unrotate(out, positions), keys, atol=1e-5, rtol=1e-4)
    assert rotary.pairing == HALVES


@pytest.mark.parametrize("pairing", [HALVES, *PAIRINGS.values()], ids=["halves", *PAIRINGS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_pair_is_rounded_step_by_step_as_it_always_was(pairing: Pairing, dtype: torch.dtype) -> None:
    rotary, module, size = rotary_of("llama")
    keys = torch.randn(2, 5, 2, pairing.start + size + 3).to(dtype)
    cos, sin = module(torch.zeros(1), position_ids=torch.arange(40, 45)[None])
    cos, sin = (table[0, :, None, : size // 2].to(dtype) for table in (cos, -sin if pairing.backwards else sin))
    (first, second), wanted = pairing.split(keys, size // 2), keys.clone()
    for target, one, other in zip(pairing.split(wanted, size // 2), (first, second), (-second, first), strict=True):
        target.copy_(torch.addcmul(one * cos, other, sin))
    rotary.paired(pairing).rotate(keys, slice(40, 45), out=(out := torch.empty_like(keys)))
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=0)


def test_kernels_get_tables_for_the_first_dimensions_in_halves_only() -> None:
    rotary, _, _ = rotary_of("llama")
    backwards = rotary.paired(Pairing(backwards=True)).tables
    torch.testing.assert_close(backwards[1], -rotary.tables[1])
    assert rotary.paired(Pairing(start=2)).tables is None
    assert rotary.paired(Pairing(neighbours=True)).tables is None
    assert RotaryByLayer([rotary, None]).tables is None


def test_layers_are_rotated_each_in_its_own_way() -> None:
    rotary, _, size = rotary_of("llama")
    other = rotary.paired(Pairing(neighbours=True))
    layers = [rotary, rotary, None, other, rotary]
    keys, out = torch.randn(5, 7, 2, size), torch.empty(5, 7, 2, size)
    mixed = by_layer(layers)
    mixed.rotate(keys, slice(30, 37), out=out)
    for layer, one in enumerate(layers):
        alone = keys[layer : layer + 1].clone()
        if one is not None:
            one.rotate(keys[layer : layer + 1], slice(30, 37), out=alone)
        torch.testing.assert_close(out[layer : layer + 1], alone)
    torch.testing.assert_close(mixed.unrotate(out, slice(30, 37)), keys, atol=1e-5, rtol=1e-4)
    assert by_layer([rotary, rotary]) is rotary, "that of all"
    assert isinstance(by_layer([None, None]), RotaryByLayer)
