"""Pages of several layouts against a plain tensor, and the check of the rotation."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding, apply_rotary_pos_emb
from vllm.config import VllmConfig, set_current_vllm_config

from kedge.errors import LayoutUnknown
from kedge.integrations.vllm.plugin.block_layout import KVLayer, Places, find_layouts
from kedge.integrations.vllm.plugin.pages import Pages, look_up, rotation_error, rotation_of
from kedge.kv.rotary import Rotary, Rotation
from kedge.kv.segment import KVSegment
from tests.integrations.vllm.fake_layers import Layout, Shape, fake_layer, float8_layer

BLOCKS, SIZE, HEADS, DIM, LAYERS = 6, 4, 2, 8, 3
SIDE_BY_SIDE = Layout((0, 3, 2, 1, 4), merged=3)
"""As FlashAttention keeps them: [blocks, heads, size, 2 * dim]"""
TRANSPOSED = Layout((0, 3, 1, 4, 2))
"""[blocks, heads, 2, dim, size], as the CPU keeps its keys"""


def pages_of(layers: Sequence[KVLayer]) -> Pages:
    layouts = find_layouts(layers, SIZE)
    return Pages(layers, layouts, SIZE, rotary())


def rotary() -> Rotary:
    angles = torch.arange(64)[:, None] * 0.5 ** torch.arange(DIM // 2)
    return Rotary(partial(look_up, torch.cat((angles.cos(), angles.sin()), -1)), 64, torch.device("cpu"))


@pytest.mark.parametrize("layout", [SIDE_BY_SIDE, TRANSPOSED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [[4, 1, 3], [5]])
def test_reading_gives_what_the_layers_hold(layout: Layout, dtype: torch.dtype, blocks: list[int]) -> None:
    layers = [fake_layer(layout, dtype=dtype) for _ in range(LAYERS)]
    pages = pages_of(layers)
    start, stop = 1, SIZE * len(blocks) - 1
    read = pages.read(pages.table(blocks), start, stop)
    assert read.keys.is_contiguous() and read.values.is_contiguous(), "vLLM's ops want it so"
    for number, layer in enumerate(layers):
        keys, values = (side[blocks].flatten(0, 1)[start:stop] for side in layout.held(layer.pages, Shape()))
        expected = rotary().unrotate(keys[None], slice(start, stop))[0]
        torch.testing.assert_close(read.keys[number], expected)
        torch.testing.assert_close(read.values[number], values)


def test_dimensions_in_no_regular_order_are_read_all_the_same() -> None:
    order = [0, 2, 1, 3, 7, 5, 4, 6]
    layer, regular = fake_layer(SIDE_BY_SIDE, keep=[lambda given: given[..., order]] * 2), fake_layer(SIDE_BY_SIDE)
    strides = [find_layouts([one], SIZE)[0].keys.strides for one in (regular, layer)]
    assert strides[0] is not None and strides[1] is None
    pages, kv = pages_of([layer]), KVSegment(*torch.randn(2, 1, 5, HEADS, DIM))
    pages.write(table := pages.table([4, 1]), 2, kv, None)
    read = pages.read(table, 2, 7)
    torch.testing.assert_close(read.keys, kv.keys)
    assert torch.equal(read.values, kv.values)
    assert torch.equal(SIDE_BY_SIDE.held(layer.pages, Shape())[1][4, 2], kv.values[0, 0][:, order])


@pytest.mark.parametrize("layout", [SIDE_BY_SIDE, TRANSPOSED])
@pytest.mark.parametrize(("only", "written"), [(None, range(3, 8)), ((range(1, 5), range(7, 8)), (3, 4, 7))])
def test_writing_is_base_plus_offsets_and_touches_nothing_else(
    layout: Layout, only: tuple[range, ...] | None, written: Sequence[int]
) -> None:
    """Nor positions that the table leaves out."""
    layers, blocks = [fake_layer(layout) for _ in range(LAYERS)], [2, 5, 0]
    before = [layer.pages.clone() for layer in layers]
    pages, at = pages_of(layers), [position - 3 for position in written]
    base = KVSegment(*torch.randn(2, LAYERS, 5, HEADS, DIM))
    offsets = KVSegment(*torch.randn(2, LAYERS - 1, 5, HEADS, DIM))
    pages.write(pages.table(blocks, only=only), 3, base, offsets)
    read = pages.read(pages.table(blocks), 3, 8)
    torch.testing.assert_close(read.keys[1:, at], (base.keys[1:] + offsets.keys)[:, at], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(read.values[1:, at], (base.values[1:] + offsets.values)[:, at])
    torch.testing.assert_close(read.values[0, at], base.values[0, at])
    torch.testing.assert_close(read.keys[0, at], base.keys[0, at], atol=1e-5, rtol=1e-5)
    kept = torch.ones(BLOCKS, SIZE, dtype=torch.bool)
    for position in written:
        kept[blocks[position // SIZE], position % SIZE] = False
    for layer, old in zip(layers, before, strict=True):
        for now, then in zip(layout.held(layer.pages, Shape()), layout.held(old, Shape()), strict=True):
            assert torch.equal(now[kept], then[kept])


def test_layers_of_other_shapes_are_refused() -> None:
    other = fake_layer(SIDE_BY_SIDE)
    layouts = find_layouts([other], SIZE)
    half = replace(layouts[0], keys=Places.of(layouts[0].keys.index[..., :4].contiguous()))
    with pytest.raises(LayoutUnknown, match="must have one shape"):
        Pages([other, other], [*layouts, half], SIZE, rotary())


def test_each_layer_is_read_by_its_own_layout_and_format() -> None:
    """Layers whose KV is not quantized, beside others."""
    layers = [fake_layer(SIDE_BY_SIDE), fake_layer(TRANSPOSED), float8_layer(torch.float8_e4m3fn)]
    pages, kv = pages_of(layers), KVSegment(*torch.randn(2, 3, 5, HEADS, DIM))
    assert pages.rounding == 0 and pages_of(layers[::-1]).rounding == 2**-4
    pages.write(table := pages.table([4, 1]), 2, kv, None)
    read = pages.read(table, 2, 7)
    torch.testing.assert_close(read.keys[:2], kv.keys[:2])
    assert torch.equal(read.values[:2], kv.values[:2])
    expected = (kv.values[2] / 0.02).to(torch.float8_e4m3fn).float() * 0.02
    torch.testing.assert_close(read.values[2], expected)
    rotated = torch.empty_like(kv.keys)
    rotary().rotate(kv.keys, slice(2, 7), out=rotated)
    kept = (rotated[2:] / 0.5).to(torch.float8_e4m3fn).float() * 0.5
    torch.testing.assert_close(read.keys[2:], rotary().unrotate(kept, slice(2, 7)))


def test_keys_of_equal_tokens_reveal_another_rotation() -> None:
    tokens = [7, 8, 9, 7, 8, 7]
    by_token = torch.randn(10, 1, HEADS, DIM)
    unrotated = torch.stack([by_token[token] for token in tokens], dim=1)
    keys = torch.empty_like(unrotated)
    rotary().rotate(unrotated, slice(10, 16), out=keys)
    assert rotation_error(tokens, rotary().unrotate(keys, slice(10, 16))[0]) == pytest.approx(0, abs=1e-5)
    assert rotation_error(tokens, keys[0]) > 0.1  # type: ignore[operator]
    assert rotation_error([1, 2, 3], keys[0, :3]) is None


# rotations of layers, from vLLM's tables, against the rotary modules of Transformers --------------------------------

POSITIONS = torch.arange(3, 40)
CONFIG = {"head_dim": 32, "max_position_embeddings": 64}


def vllms_rotation(text: Any, layers: list[int]) -> Rotation:
    model = SimpleNamespace(hf_text_config=text, get_head_size=lambda: 32, dtype=torch.float32, max_model_len=64)
    with set_current_vllm_config(VllmConfig()):
        return rotation_of(model, layers, torch.device("cpu"))  # type: ignore[arg-type]


ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
"""Those of Gemma 3 from 4 billion parameters on"""


def test_every_layer_is_rotated_as_its_kind() -> None:
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    text = Gemma3TextConfig(**CONFIG, layer_types=kinds, num_hidden_layers=3, rope_parameters=ROPES)
    keys, module = torch.randn(3, len(POSITIONS), 2, 32), Gemma3RotaryEmbedding(text)
    expected = torch.cat(
        [
            apply_rotary_pos_emb(one[None], one[None], *module(one, POSITIONS[None], kind), unsqueeze_dim=2)[1]
            for one, kind in zip(keys, text.layer_types, strict=True)
        ]
    )
    found, by_kind = torch.empty_like(keys), vllms_rotation(text, [0, 1, 2])
    by_kind.rotate(keys, POSITIONS, out=found)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(by_kind.unrotate(expected, POSITIONS), keys)
    by_kind = vllms_rotation(text, [2, 1])  # a rank may have some of the layers
    by_kind.rotate(keys[[2, 1]], POSITIONS, out=found[:2])
    torch.testing.assert_close(found[:2], expected[[2, 1]])
