"""Layouts that are found by writing, whatever vLLM's own ops for the CPU have here, and writers that are refused."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from kedge.errors import LayoutUnknown
from kedge.integrations.vllm.plugin.block_layout import BlockLayout, KVLayer, blocks_of, find_layouts, memory_order
from tests.integrations.vllm.fake_layers import Layout, Shape, fake_layer, float8_layer, truncated

SHAPE = Shape()
FLOATS8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def probe(layer: KVLayer, shape: Shape = SHAPE) -> BlockLayout:
    return find_layouts([layer], shape.size)[0]


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
    if merged is not None and 0 in order[merged : merged + 2]:
        merged = None  # blocks are a dimension of their own
    sizes = st.sampled_from([2, 4, 6])
    shape = Shape(draw(sizes), 2 * draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(sizes))
    return Layout(order, merged, draw(st.sampled_from([1, 2]))), shape


@given(layouts(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_order_of_dimensions_is_found(case: tuple[Layout, Shape], dtype: torch.dtype, shuffled: bool) -> None:
    """Also where those of a head are kept in no regular order."""
    layout, shape = case
    orders = [torch.randperm(shape.dim) if shuffled else torch.arange(shape.dim) for _ in "kv"]
    layer = fake_layer(layout, shape, dtype, [partial(torch.index_select, dim=-1, index=order) for order in orders])
    before = layer.pages.clone()
    found = probe(layer, shape)
    assert torch.equal(layer.pages, before), "what was in the blocks is put back"
    keys, values = write_everywhere(layer, shape)
    blocks = torch.randperm(shape.blocks)
    for read, written in zip(found.read(layer, blocks), (keys, values), strict=True):
        assert torch.equal(read, written[blocks])
    held = blocks_of(layer.pages, shape.blocks)[0].flatten().sort().values
    assert torch.equal(held, torch.stack((keys[0], values[0])).flatten().sort().values), "a block has its tokens' KV"


def test_places_that_nothing_is_written_to_are_left_out_whatever_the_model_computes_in() -> None:
    """Head dimensions that a kernel pads."""
    wide = Shape(dim=12)
    layer = fake_layer(dtype=torch.bfloat16, computed=torch.float32)
    found, (keys, _) = probe(layer), write_everywhere(layer)
    assert torch.equal(found.read(layer, torch.arange(6))[0], keys.bfloat16().float())

    def padded(given: Tensor) -> Tensor:
        return torch.nn.functional.pad(given, (0, 4))

    layer = fake_layer(shape=wide, keep=(padded, padded))
    layer.layer.head_size = 8
    found, written = probe(layer), write_everywhere(layer)
    for read, one in zip(found.read(layer, torch.arange(6)), written, strict=True):
        assert torch.equal(read, one)


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


def test_memory_order_is_a_view_without_gaps() -> None:
    pages = torch.arange(2 * 3 * 4 * 5).view(2, 4, 3, 5).transpose(1, 2)
    view = memory_order(pages)
    assert view.is_contiguous() and view.data_ptr() == pages.data_ptr() and len(view) == 2


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


def swapped(slots: Tensor) -> Tensor:
    """Every other block the other way round."""
    return torch.where(slots // 4 % 2 == 1, slots // 4 * 4 + 3 - slots % 4, slots)


def plain(given: Tensor) -> Tensor:
    return given


def whole(given: Tensor) -> Tensor:
    return (given.float() * 8).round().clamp(0, 255)


CHANGES = (coarse, short, lossy, sized)
WRITERS: dict[str, tuple[dict[str, Any], str]] = {
    **{f"keys {one.__name__}": ({"keep": (one, plain)}, "does not keep|not read") for one in CHANGES},
    **{f"values {one.__name__}": ({"keep": (plain, one)}, "does not keep|not read") for one in CHANGES},
    "two tokens in one place": ({"slots_written": lambda slots: slots - slots % 2}, "does not keep"),
    "in order": ({"slots_written": lambda slots: slots.sort().values}, "not read again"),
    "backwards": ({"slots_written": lambda slots: slots.flip(0) if len(slots) > 4 else slots}, "not read again"),
    "next block": ({"slots_written": lambda slots: (slots + 4) % 24}, "does not keep"),
    "one block": ({"slots_written": lambda slots: slots % 4}, "does not keep"),
    "blocks that differ": ({"slots_written": swapped}, "does not keep"),
    "blocks not in one run": ({"layout": Layout([1, 0, 2, 3, 4], merged=0)}, "does not keep"),
    "nor in this order": ({"layout": Layout([2, 0, 1, 3, 4], merged=0)}, "does not keep"),
    "integers": ({"dtype": torch.int16, "computed": torch.float32}, r"its numbers are torch.int16"),
    "sizes": ({"keep": (plain, lambda values: values.repeat(1, 1, 2)), "head_size_v": 4}, "differ in size"),
}


@pytest.mark.parametrize(("given", "why"), WRITERS.values(), ids=WRITERS)
def test_other_writers_are_refused(given: dict[str, Any], why: str) -> None:
    layer = fake_layer(**given)
    before, kept = layer.pages.clone(), [0, 1, 5]
    with pytest.raises(LayoutUnknown, match=why):
        probe(layer)
    assert "layout" in given or torch.equal(layer.pages[kept], before[kept])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        *(({"error": error}, "does not keep|not read again") for error in (1.05, 0.5, 100.0)),
        ({"_v_scale": torch.ones(2)}, "a scale for each head"),
        ({"keep": (whole, whole)}, "does not keep"),
    ],
)
def test_other_numbers_of_8_bits_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(LayoutUnknown, match=why):
        probe(float8_layer(torch.float8_e4m3fn, **given))


def test_an_op_that_raises_is_a_refusal_and_changes_nothing() -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("no such kernel")

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


def test_a_layout_is_shared_by_layers_after_a_try() -> None:
    backwards = fake_layer(keep=(lambda keys: keys.flip(-1), lambda values: values))
    layers = [fake_layer(), fake_layer(), backwards]
    found = find_layouts(layers, 4)
    assert found[0] is found[1]
    assert torch.equal(found[2].keys.index, found[0].keys.index.flip(-1))
    with pytest.raises(LayoutUnknown, match="not read again"):
        find_layouts([layers[0], fake_layer(keep=(coarse, coarse))], 4)


def test_pages_that_do_not_count_blocks_or_that_layers_share_are_refused() -> None:
    """What one of two layers is given would overwrite the other's."""
    layer = fake_layer()
    shared, odd = [layer, fake_layer(pages=layer.pages)], [layer._replace(num_blocks=7)]
    for layers, why in ((shared, "shares another's"), (odd, "does not count 7 blocks")):
        with pytest.raises(LayoutUnknown, match=why):
            find_layouts(layers, 4)


def test_the_global_random_state_is_left_alone() -> None:
    """What vLLM samples from it must not depend on the plug-in."""
    torch.manual_seed(1)
    expected = torch.randn(3)
    layer = fake_layer()
    torch.manual_seed(1)
    probe(layer)
    assert torch.equal(torch.randn(3), expected)


# vLLM's own ops for the CPU -----------------------------------------------------------------------------------------

ON_CPU = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's ops for the CPU are not there")
BLOCKS, SIZE, HEADS, DIM = 5, 32, 2, 64
HAS_AMX, HAS_AVX512 = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported()


def cpu_layer(
    isa: str, dtype: torch.dtype, kv: str = "auto", scales: tuple[float, float] = (1.0, 1.0), size: int = SIZE
) -> KVLayer:
    impl: Any = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)
    impl.attn_type, impl.kv_cache_dtype = AttentionType.DECODER, kv
    layer = SimpleNamespace(impl=impl, num_kv_heads=HEADS, head_size=DIM, isa=isa, kv_cache_dtype=kv)
    for name, scale in zip("kv", scales, strict=True):
        setattr(layer, f"_{name}_scale", torch.tensor(scale))
        setattr(layer, f"_{name}_scale_float", scale)
    kept = dtype if kv == "auto" else torch.uint8
    return KVLayer(layer, torch.randint(1, 9, (BLOCKS, HEADS, size, 2 * DIM)).to(kept), dtype, BLOCKS)


FLOATS = torch.float32, torch.bfloat16, torch.float16
CASES = [
    *(("vec", dtype, "auto") for dtype in FLOATS),
    *(("vec16", dtype, "auto") for dtype in FLOATS[:2]),
    *(
        pytest.param("vec", dtype, kv, marks=pytest.mark.skipif(not HAS_AVX512, reason="needs AVX-512"))
        for kv in ("fp8", "fp8_e4m3", "fp8_e5m2")
        for dtype in FLOATS
    ),
    *(
        pytest.param("amx", torch.bfloat16, kv, marks=pytest.mark.skipif(not HAS_AMX, reason="needs AMX"))
        for kv in ("auto", "fp8")
    ),
]


@ON_CPU
@pytest.mark.parametrize(("isa", "dtype", "kv"), CASES)
@pytest.mark.parametrize("size", [32, 96])
def test_the_layouts_of_vllms_op_are_found(isa: str, dtype: torch.dtype, kv: str, size: int) -> None:
    layer = cpu_layer(isa, dtype, kv, (0.37, 1.9) if kv != "auto" else (1.0, 1.0), size)
    before = layer.pages.clone()
    (found,) = find_layouts([layer], size)
    assert torch.equal(layer.pages, before)
    expected = {"auto": None, "fp8_e5m2": torch.float8_e5m2}
    assert found.numbers.float8 is expected.get(kv, torch.float8_e4m3fn)
    slots = torch.randperm(2 * size)[: size + 7]
    keys, values = torch.randn(2, len(slots), HEADS, DIM).to(dtype)
    layer.store(keys, values, slots)
    for read, written in zip(found.read(layer, torch.arange(2)), (keys, values), strict=True):
        kept = read.flatten(0, 1)[slots]
        error = (kept.float() - written.float()).abs().mean() / written.float().abs().mean()
        assert error == 0 if kv == "auto" else error < found.numbers.rounding


@ON_CPU
@pytest.mark.skipif(not HAS_AVX512, reason="needs AVX-512")
def test_scales_on_the_host_that_differ_from_the_devices_are_noticed() -> None:
    """vLLM's ops for the CPU take the one, its kernels the other."""
    layer = cpu_layer("vec", torch.float32, "fp8", (1.0, 1.0))
    layer.layer._v_scale_float = 2.5
    with pytest.raises(LayoutUnknown, match="does not keep"):
        find_layouts([layer], SIZE)
