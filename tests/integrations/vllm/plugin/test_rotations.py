"""Rotations of layers, from vLLM's tables, against the rotary modules of Transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import Gemma3TextConfig, LlamaConfig  # noqa: E402
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding, apply_rotary_pos_emb  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402

from kedge.integrations.vllm.plugin.rotations import rotation_of  # noqa: E402
from kedge.kv.rotary import Rotary, Rotation  # noqa: E402

POSITIONS = torch.arange(3, 40)
SIZE = {"head_dim": 32, "max_position_embeddings": 64}


def rotation(text: Any, layers: list[int]) -> Rotation:
    model = SimpleNamespace(hf_text_config=text, get_head_size=lambda: 32, dtype=torch.float32, max_model_len=64)
    with set_current_vllm_config(VllmConfig()):
        return rotation_of(model, layers, torch.device("cpu"))  # type: ignore[arg-type]


def rotated(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return apply_rotary_pos_emb(keys, keys, cos, sin, unsqueeze_dim=2)[1]


ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
"""Those of Gemma 3 from 4 billion parameters on"""


def test_every_layer_is_rotated_as_its_kind() -> None:
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    text = Gemma3TextConfig(**SIZE, layer_types=kinds, num_hidden_layers=3, rope_parameters=ROPES)
    keys, module = torch.randn(3, len(POSITIONS), 2, 32), Gemma3RotaryEmbedding(text)
    expected = torch.cat(
        [
            rotated(one[None], *module(one, POSITIONS[None], kind))
            for one, kind in zip(keys, text.layer_types, strict=True)
        ]
    )
    found, by_kind = torch.empty_like(keys), rotation(text, [0, 1, 2])
    by_kind.rotate(keys, POSITIONS, out=found)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(by_kind.unrotate(expected, POSITIONS), keys)
    by_kind = rotation(text, [2, 1])  # a rank may have some of the layers
    by_kind.rotate(keys[[2, 1]], POSITIONS, out=found[:2])
    torch.testing.assert_close(found[:2], expected[[2, 1]])


def test_layers_that_rotate_alike_share_one_rotation() -> None:
    text = LlamaConfig(**SIZE)
    one = rotation(text, [0, 1])
    assert isinstance(one, Rotary)
    keys = torch.randn(2, len(POSITIONS), 2, 32)
    found = torch.empty_like(keys)
    one.rotate(keys, POSITIONS, out=found)
    torch.testing.assert_close(found, rotated(keys, *LlamaRotaryEmbedding(text)(keys, POSITIONS[None])))
