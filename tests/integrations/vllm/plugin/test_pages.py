"""Pages of several layouts against a plain tensor, and the check of the rotation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding, apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from vllm.config import VllmConfig, set_current_vllm_config

from kedge.errors import LayoutUnknown
from kedge.integrations.vllm.plugin.block_layout import KVLayer, Places, find_layouts
from kedge.integrations.vllm.plugin.pages import Pages, RopeModule, rotation_error, rotation_of
from kedge.kv.rotary import Rotary, Rotation
from kedge.kv.segment import KVSegment
from tests.integrations.vllm.fake_layers import float8_layer

BLOCKS, SIZE, HEADS, DIM, LAYERS = 6, 4, 2, 8, 3
View = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Pages [blocks, heads, size, 2 * dim] -> keys and values, each a view [blocks, size, heads, dim]"""


def side_by_side(pages: Tensor) -> tuple[Tensor, Tensor]:
    """As FlashAttention keeps them."""
    keys, values = pages.transpose(1, 2).split(DIM, dim=-1)
    return keys, values


def keys_transposed(pages: Tensor) -> tuple[Tensor, Tensor]:
    """As the CPU keeps them: K [dim, size] by head, then V."""
    keys, values = pages.view(len(pages), HEADS, 2, SIZE * DIM).unbind(2)
    return keys.view(-1, HEADS, DIM, SIZE).permute(0, 3, 1, 2), values.view(-1, HEADS, SIZE, DIM).transpose(1, 2)


def layer_of(view: View, dtype: torch.dtype = torch.float32, order: Sequence[int] = range(DIM)) -> KVLayer:
    """`order`: of the dimensions, as the backend keeps them."""

    def write(_: object, keys: Tensor, values: Tensor, pages: Tensor, slots: Tensor) -> None:
        for target, source in zip(view(pages), (keys, values), strict=True):
            target[slots // SIZE, slots % SIZE] = source[..., list(order)]

    impl = SimpleNamespace(do_kv_cache_update=write)
    pages = torch.randn(BLOCKS, HEADS, SIZE, 2 * DIM).to(dtype)
    return KVLayer(SimpleNamespace(impl=impl, num_kv_heads=HEADS, head_size=DIM), pages, dtype)


def pages_of(layers: Sequence[KVLayer]) -> Pages:
    layouts = find_layouts(layers, BLOCKS, SIZE)
    return Pages(layers, layouts, SIZE, rotary())


def rotary() -> Rotary:
    angles = torch.arange(64)[:, None] * 0.5 ** torch.arange(DIM // 2)
    return Rotary(RopeModule(torch.cat((angles.cos(), angles.sin()), -1)), 64, torch.device("cpu"))


@pytest.mark.parametrize("view", [side_by_side, keys_transposed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [[4, 1, 3], [5]])
def test_reading_gives_what_the_layers_hold(view: View, dtype: torch.dtype, blocks: list[int]) -> None:
    layers = [layer_of(view, dtype) for _ in range(LAYERS)]
    pages = pages_of(layers)
    start, stop = 1, SIZE * len(blocks) - 1
    read = pages.read(pages.table(blocks), start, stop)
    assert read.keys.is_contiguous() and read.values.is_contiguous(), "vLLM's ops want it so"
    for number, layer in enumerate(layers):
        keys, values = (side[blocks].flatten(0, 1)[start:stop] for side in view(layer.pages))
        expected = rotary().unrotate(keys[None], slice(start, stop))[0]
        torch.testing.assert_close(read.keys[number], expected)
        torch.testing.assert_close(read.values[number], values)


def test_dimensions_in_no_regular_order_are_read_all_the_same() -> None:
    order = [0, 2, 1, 3, 7, 5, 4, 6]
    layer, regular = layer_of(side_by_side, order=order), layer_of(side_by_side)
    strides = [find_layouts([one], BLOCKS, SIZE)[0].keys.strides for one in (regular, layer)]
    assert strides[0] is not None and strides[1] is None
    pages, kv = pages_of([layer]), KVSegment(*torch.randn(2, 1, 5, HEADS, DIM))
    pages.write(table := pages.table([4, 1]), 2, kv, None)
    read = pages.read(table, 2, 7)
    torch.testing.assert_close(read.keys, kv.keys)
    assert torch.equal(read.values, kv.values)
    assert torch.equal(side_by_side(layer.pages)[1][4, 2], kv.values[0, 0][:, order])


@pytest.mark.parametrize("view", [side_by_side, keys_transposed])
def test_writing_is_base_plus_offsets_and_touches_nothing_else(view: View) -> None:
    layers = [layer_of(view) for _ in range(LAYERS)]
    before = [layer.pages.clone() for layer in layers]
    pages = pages_of(layers)
    table = pages.table([2, 5, 0])
    base = KVSegment(*torch.randn(2, LAYERS, 5, HEADS, DIM))
    offsets = KVSegment(*torch.randn(2, LAYERS - 1, 5, HEADS, DIM))
    pages.write(table, 3, base, offsets)
    read = pages.read(table, 3, 8)
    torch.testing.assert_close(read.keys[1:], base.keys[1:] + offsets.keys, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(read.values[1:], base.values[1:] + offsets.values)
    torch.testing.assert_close(read.values[0], base.values[0])
    torch.testing.assert_close(read.keys[0], base.keys[0], atol=1e-5, rtol=1e-5)
    for layer, old in zip(layers, before, strict=True):
        kept = torch.ones(BLOCKS, SIZE, dtype=torch.bool)
        kept[2, 3], kept[5] = False, False
        for now, then in zip(view(layer.pages), view(old), strict=True):
            assert torch.equal(now[kept], then[kept])


def test_layers_of_other_shapes_are_refused() -> None:
    other = layer_of(side_by_side)
    layouts = find_layouts([other], BLOCKS, SIZE)
    half = replace(layouts[0], keys=Places.of(layouts[0].keys.index[..., :4].contiguous()))
    with pytest.raises(LayoutUnknown, match="must have one shape"):
        Pages([other, other], [*layouts, half], SIZE, rotary())


def test_each_layer_is_read_by_its_own_layout_and_format() -> None:
    """Layers whose KV is not quantized, beside others."""
    layers = [layer_of(side_by_side), layer_of(keys_transposed), float8_layer(torch.float8_e4m3fn)]
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


def test_positions_that_a_table_leaves_out_are_not_written() -> None:
    layers = [layer_of(side_by_side) for _ in range(LAYERS)]
    pages, blocks = pages_of(layers), [4, 1, 3]
    before = pages.read(pages.table(blocks), 0, 12)
    given = KVSegment(torch.randn(LAYERS, 9, HEADS, DIM), torch.randn(LAYERS, 9, HEADS, DIM))
    pages.write(pages.table(blocks, only=(range(2, 5), range(9, 11))), 2, given, None)
    after = pages.read(pages.table(blocks), 0, 12)
    written = [2, 3, 4, 9, 10]
    kept = [at for at in range(12) if at not in written]
    torch.testing.assert_close(after.keys[:, written], given.keys[:, [at - 2 for at in written]])
    torch.testing.assert_close(after.values[:, written], given.values[:, [at - 2 for at in written]])
    assert torch.equal(after.values[:, kept], before.values[:, kept])
    assert torch.equal(after.keys[:, kept], before.keys[:, kept])


# rotations of layers, from vLLM's tables, against the rotary modules of Transformers --------------------------------

POSITIONS = torch.arange(3, 40)
CONFIG = {"head_dim": 32, "max_position_embeddings": 64}


def vllms_rotation(text: Any, layers: list[int]) -> Rotation:
    model = SimpleNamespace(hf_text_config=text, get_head_size=lambda: 32, dtype=torch.float32, max_model_len=64)
    with set_current_vllm_config(VllmConfig()):
        return rotation_of(model, layers, torch.device("cpu"))  # type: ignore[arg-type]


def transformers_rotated(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return apply_rotary_pos_emb(keys, keys, cos, sin, unsqueeze_dim=2)[1]


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
            transformers_rotated(one[None], *module(one, POSITIONS[None], kind))
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


def test_layers_that_rotate_alike_share_one_rotation() -> None:
    text = LlamaConfig(**CONFIG)
    one = vllms_rotation(text, [0, 1])
    assert isinstance(one, Rotary)
    keys = torch.randn(2, len(POSITIONS), 2, 32)
    found = torch.empty_like(keys)
    one.rotate(keys, POSITIONS, out=found)
    torch.testing.assert_close(found, transformers_rotated(keys, *LlamaRotaryEmbedding(text)(keys, POSITIONS[None])))
