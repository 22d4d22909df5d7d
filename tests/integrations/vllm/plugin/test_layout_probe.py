"""Layouts that are found by writing, and writers that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kedge.errors import LayoutUnknown
from kedge.integrations.vllm.plugin.block_layout import BlockLayout, KVLayer, find_block_axis, find_layouts
from tests.integrations.vllm.fake_layers import Layout, Shape, fake_layer, float8_layer, truncated

SHAPE = Shape()
FLOATS8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def probe(layer: KVLayer, shape: Shape = SHAPE) -> BlockLayout:
    return find_layouts([layer], shape.blocks, shape.size)[0]


def write_everywhere(layer: KVLayer, shape: Shape = SHAPE) -> tuple[Tensor, Tensor]:
    """Keys and values [blocks, size, heads, dim] that fill the pages, written in random order."""
    slots = torch.randperm(shape.blocks * shape.size)
    keys, values = torch.randn(2, len(slots), shape.heads, shape.dim).to(layer.dtype)
    layer.store(keys[slots], values[slots], slots)
    return keys.view(shape.blocks, shape.size, *keys.shape[1:]), values.view(shape.blocks, shape.size, *keys.shape[1:])


@st.composite
def layouts(draw: Any) -> tuple[Layout, Shape]:
    """Any order of dimensions, any neighbours as one, blocks in parts; sizes that several dimensions have in common."""
    order = draw(st.permutations(range(5)))
    merged = draw(st.none() | st.integers(0, 3))
    if merged is not None and order[merged + 1] == 0:
        merged = None  # then a block would not be in one run: see below
    sizes = st.sampled_from([2, 4, 6])
    shape = Shape(draw(sizes), 2 * draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(sizes))
    return Layout(order, merged, draw(st.sampled_from([1, 2]))), shape


@given(layouts(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=80, deadline=None)
def test_every_order_of_dimensions_is_found(case: tuple[Layout, Shape], dtype: torch.dtype) -> None:
    layout, shape = case
    layer = fake_layer(layout, shape, dtype)
    before = layer.pages.clone()
    found = probe(layer, shape)
    assert torch.equal(layer.pages, before), "what was in the blocks is put back"
    keys, values = write_everywhere(layer, shape)
    blocks = torch.randperm(shape.blocks)
    for read, written in zip(found.read(layer, blocks), (keys, values), strict=True):
        assert torch.equal(read, written[blocks])
    assert len(found.axis.blocks(layer.pages)) == shape.blocks
    held = found.axis.blocks(layer.pages)[0].flatten().sort().values
    assert torch.equal(held, torch.stack((keys[0], values[0])).flatten().sort().values), "a block has its tokens' KV"


@given(st.permutations(range(8)), st.permutations(range(8)))
@settings(max_examples=20, deadline=None)
def test_channels_in_any_order_are_found(of_keys: list[int], of_values: list[int]) -> None:
    layer = fake_layer(keep=(lambda keys: keys[..., of_keys], lambda values: values[..., of_values]))
    found, written = probe(layer), write_everywhere(layer)
    for read, one in zip(found.read(layer, torch.arange(6)), written, strict=True):
        assert torch.equal(read, one)


def test_places_that_nothing_is_written_to_are_left_out() -> None:
    """Head dimensions that a kernel pads."""
    wide = Shape(dim=12)

    def padded(given: Tensor) -> Tensor:
        return torch.nn.functional.pad(given, (0, 4))

    layer = fake_layer(shape=wide, keep=(padded, padded))
    layer.layer.head_size = 8
    found, written = probe(layer), write_everywhere(layer)
    for read, one in zip(found.read(layer, torch.arange(6)), written, strict=True):
        assert torch.equal(read, one)


def test_a_model_may_compute_in_another_dtype_than_its_pages() -> None:
    layer = fake_layer(dtype=torch.bfloat16, computed=torch.float32)
    found, (keys, _) = probe(layer), write_everywhere(layer)
    assert torch.equal(found.read(layer, torch.arange(6))[0], keys.bfloat16().float())


@pytest.mark.parametrize("float8", FLOATS8)
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounded", [Tensor.to, truncated])
@given(st.floats(0.03, 10.0), st.floats(0.03, 10.0))
@settings(max_examples=4, deadline=None)
def test_floats_of_8_bits_are_recognised_and_read_with_their_scales(
    float8: torch.dtype, computed: torch.dtype, rounded: Any, of_keys: float, of_values: float
) -> None:
    layer = float8_layer(float8, (of_keys, of_values), rounded=rounded, computed=computed)
    found = probe(layer)
    assert found.numbers.float8 is float8
    keys, values = write_everywhere(layer)
    for read, one, scale in zip(found.read(layer, torch.arange(6)), (keys, values), (of_keys, of_values), strict=True):
        expected = rounded(one.float() / scale, float8).view(float8).float() * torch.tensor(scale)
        torch.testing.assert_close(read, expected.to(computed))


@pytest.mark.parametrize("float8", FLOATS8)
@pytest.mark.parametrize("rounded", [Tensor.to, truncated])
@given(st.floats(0.03, 10.0), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 99))
@example(6.5, torch.float16, 0)  # 10,240 is the nearest, which times 6.5 is more than float16 holds
@example(3.199, torch.float16, 0)  # 20,480 times that is, too, and rounds to what it holds; an op may truncate
@settings(max_examples=8, deadline=None)
def test_what_is_written_is_rounded_to_the_nearest_however_the_op_rounds(
    float8: torch.dtype, rounded: Any, scale: float, computed: torch.dtype, seed: int
) -> None:
    layer = float8_layer(float8, (scale, scale), rounded=rounded, computed=computed)
    found, slots = probe(layer), torch.arange(24)
    most = torch.finfo(float8).max * scale
    drawn = torch.randn(24, 2, 8, generator=torch.Generator().manual_seed(seed)) * scale
    drawn[0, 0, :4] = torch.tensor([2 * most, -2 * most, most, torch.finfo(float8).tiny * scale]).clamp(-6e4, 6e4)
    given_ = drawn.to(computed)
    found.store(layer, given_, given_, slots)
    once = [one.flatten(0, 1) for one in found.read(layer, torch.arange(6))]
    kept = torch.arange(256, dtype=torch.uint8).view(float8).float()
    most = kept[kept * scale <= torch.finfo(computed).max].max()
    nearest = (given_.float() / scale).clamp(-most, most).to(float8).float() * torch.tensor(scale)
    torch.testing.assert_close(once[0], nearest.to(computed))
    found.store(layer, *once, slots)
    again = [one.flatten(0, 1) for one in found.read(layer, torch.arange(6))]
    assert all(map(torch.equal, once, again)), "what was kept once is kept as it is"


def test_a_scale_is_read_when_it_is_used() -> None:
    layer = float8_layer(torch.float8_e4m3fn, (1.0, 1.0))
    found = probe(layer)
    write_everywhere(layer)
    one, _ = found.read(layer, torch.arange(6))
    layer.layer._k_scale.fill_(3.0)
    other, _ = found.read(layer, torch.arange(6))
    torch.testing.assert_close(other, 3 * one)


# refused --------------------------------------------------------------------------------------------------------------


def coarse(given: Tensor) -> Tensor:
    return (given * 4).round() / 4


def short(given: Tensor) -> Tensor:
    """Floats that lack most bits, which no small integer shows."""
    return given.bfloat16().float()


def lossy(given: Tensor) -> Tensor:
    return torch.cat((given[..., :4], given[..., :4]), -1)


def sized(given: Tensor) -> Tensor:
    """Each token by its own scale."""
    return given / given.abs().amax((1, 2), keepdim=True)


@pytest.mark.parametrize("changes", [{"keep": (one, one)} for one in (coarse, short, lossy, sized)])
@pytest.mark.parametrize("side", [0, 1])
def test_writers_that_change_numbers_are_refused(changes: dict[str, Any], side: int) -> None:
    keep = [lambda given: given, lambda given: given]
    keep[side] = changes["keep"][side]
    with pytest.raises(LayoutUnknown, match="does not keep keys and values|not read again"):
        probe(fake_layer(keep=keep))


@pytest.mark.parametrize(
    ("slots_written", "why"),
    [
        (lambda slots: slots - slots % 2, "does not keep"),
        (lambda slots: slots.sort().values, "not read again"),
        (lambda slots: slots.flip(0) if len(slots) > 4 else slots, "not read again"),
        (lambda slots: (slots + 4) % 24, "not in one block"),
        (lambda slots: 23 - slots, "not in one block"),
        (lambda slots: slots % 4, "not in one block"),
        (lambda slots: (slots + 1) % 24, "not in one block"),
    ],
    ids=["two tokens in one place", "in order", "backwards", "next block", "reversed", "one block", "shifted"],
)
def test_writers_to_other_slots_are_refused(slots_written: Callable[[Tensor], Tensor], why: str) -> None:
    layer = fake_layer(slots_written=slots_written)
    before = layer.pages.clone()
    with pytest.raises(LayoutUnknown, match=why):
        probe(layer)
    kept = [0, 1, 5]
    assert torch.equal(layer.pages[kept], before[kept])


def test_blocks_that_are_not_in_one_run_are_refused() -> None:
    for order in ([1, 0, 2, 3, 4], [2, 0, 1, 3, 4]):
        with pytest.raises(LayoutUnknown, match="not in one block"):
            probe(fake_layer(Layout(order, merged=0)))


def test_blocks_that_differ_are_refused() -> None:
    """Every other block the other way round."""

    def swapped(slots: Tensor) -> Tensor:
        return torch.where(slots // 4 % 2 == 1, slots // 4 * 4 + 3 - slots % 4, slots)

    with pytest.raises(LayoutUnknown, match="does not keep"):
        probe(fake_layer(slots_written=swapped))


def test_pages_that_do_not_count_blocks_are_refused() -> None:
    with pytest.raises(LayoutUnknown, match="no dimension counts 7 blocks"):
        find_block_axis(fake_layer(), 7, 4)
    with pytest.raises(LayoutUnknown, match="no dimension counts 1 blocks"):
        find_block_axis(fake_layer(shape=Shape(blocks=1)), 1, 4)


def failing(*_: object) -> None:
    raise RuntimeError("no such kernel")


def test_an_op_that_raises_is_a_refusal_and_changes_nothing() -> None:
    layer = fake_layer()
    before = layer.pages.clone()
    layer.layer.impl.do_kv_cache_update = failing
    with pytest.raises(LayoutUnknown, match="op of SimpleNamespace failed: RuntimeError.'no such kernel'") as raised:
        probe(layer)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert torch.equal(layer.pages, before)
    del layer.layer.impl.do_kv_cache_update
    with pytest.raises(LayoutUnknown, match="do_kv_cache_update"):
        probe(layer)


@pytest.mark.parametrize("error", [1.05, 0.5, 100.0])
def test_another_scale_than_the_layers_is_refused(error: float) -> None:
    with pytest.raises(LayoutUnknown, match="does not keep|not read again"):
        probe(float8_layer(torch.float8_e4m3fn, error=error))


def test_other_formats_are_refused() -> None:
    with pytest.raises(LayoutUnknown, match=r"its numbers are torch.int16"):
        probe(fake_layer(dtype=torch.int16, computed=torch.float32))
    with pytest.raises(LayoutUnknown, match="a scale for each head"):
        probe(float8_layer(torch.float8_e4m3fn, _v_scale=torch.ones(2)))
    with pytest.raises(LayoutUnknown, match="does not keep"):
        whole = [lambda given: (given.float() * 8).round().clamp(0, 255)] * 2
        probe(float8_layer(torch.float8_e4m3fn, keep=whole))
    layer = fake_layer(keep=(lambda keys: keys, lambda values: values.repeat(1, 1, 2)), head_size_v=4)
    with pytest.raises(LayoutUnknown, match="differ in size"):
        probe(layer)


def test_a_layout_is_shared_by_layers_after_a_try() -> None:
    backwards = fake_layer(keep=(lambda keys: keys.flip(-1), lambda values: values))
    layers = [fake_layer(), fake_layer(), backwards]
    found = find_layouts(layers, 6, 4)
    assert found[0] is found[1]
    assert torch.equal(found[2].keys.index, found[0].keys.index.flip(-1))
    with pytest.raises(LayoutUnknown, match="not read again"):
        find_layouts([layers[0], fake_layer(keep=(coarse, coarse))], 6, 4)


def test_layers_that_share_kv_are_refused() -> None:
    """What one of them is given would overwrite the other's."""
    layer = fake_layer()
    other = fake_layer(pages=layer.pages)
    with pytest.raises(LayoutUnknown, match="shares another's"):
        find_layouts([layer, other], 6, 4)


def test_the_global_random_state_is_left_alone() -> None:
    """What vLLM samples from it must not depend on the plug-in."""
    torch.manual_seed(1)
    expected = torch.randn(3)
    layer = fake_layer()
    torch.manual_seed(1)
    probe(layer)
    assert torch.equal(torch.randn(3), expected)
