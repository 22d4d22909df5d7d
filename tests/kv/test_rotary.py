"""Rotation against Transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kedge.kv.rotary import Rotary
from tests.engine.local.conftest import FAMILIES, tiny_model


def rotary_of(family: str) -> tuple[Rotary, torch.nn.Module, int]:
    model = tiny_model(family)
    head_dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    return Rotary(model.model.rotary_emb, 512, torch.device("cpu")), model.model.rotary_emb, head_dim


@pytest.mark.parametrize("family", FAMILIES)
def test_rotates_as_the_model_does(family: str) -> None:
    rotary, module, head_dim = rotary_of(family)
    keys, positions = torch.randn(3, 7, 2, head_dim), torch.tensor([0, 1, 5, 9, 100, 101, 400])
    cos, sin = module(keys, position_ids=positions[None])
    expected = apply_rotary_pos_emb(keys.transpose(1, 2), keys.transpose(1, 2), cos, sin)[1].transpose(1, 2)
    out = torch.empty_like(keys)
    rotary.rotate(keys, positions, out=out)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_unrotating_undoes_it_at_any_position(family: str) -> None:
    rotary, _, head_dim = rotary_of(family)
    keys, out = torch.randn(2, 64, 2, head_dim), torch.empty(2, 64, 2, head_dim)
    rotary.rotate(keys, slice(300, 364), out=out)
    torch.testing.assert_close(rotary.unrotate(out, slice(300, 364)), keys, atol=1e-5, rtol=1e-4)


def test_dimensions_beyond_the_rotary_ones_stay() -> None:
    rotary, _, head_dim = rotary_of("llama")
    keys = torch.randn(1, 4, 2, head_dim + 6)
    out = torch.empty_like(keys)
    rotary.rotate(keys, slice(10, 14), out=out)
    torch.testing.assert_close(out[..., head_dim:], keys[..., head_dim:])
    assert not torch.allclose(out[..., :head_dim], keys[..., :head_dim])
