"""vLLM's pages, read and written by a kernel in all layers at once, against the same layer by layer."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kedge.anchors.offsets import Blend, empty_table
from kedge.anchors.translator import Translation, translate_into
from kedge.integrations.vllm.plugin.block_layout import find_layouts
from kedge.integrations.vllm.plugin.pages import Pages, look_up, slots_for_kernels
from kedge.kv.rotary import Rotary, RotaryByLayer
from kedge.kv.segment import KVSegment
from tests.integrations.vllm.fake_layers import Layout, Shape, fake_layer, float8_layer
from tests.kv.triton_device import DEVICE, error

BLOCKS = 6
LAYOUTS = {
    "NHD": Layout(),
    "HND": Layout((0, 1, 3, 2, 4)),
    "keys of all blocks first": Layout((1, 0, 2, 3, 4)),
    "heads side by side": Layout((0, 2, 3, 1, 4), merged=3),
}
ULPS = {torch.float32: 1e-6, torch.bfloat16: 2**-6}
"""Largest difference over the largest number: the twin rounds after every step, the interpreter cuts bfloat16 off"""


def rotary(dim: int, scale: float = 1.0) -> Rotary:
    angles = torch.arange(256)[:, None] * 0.5 ** torch.arange(dim // 2)
    table = scale * torch.cat((angles.cos(), angles.sin()), -1)
    return Rotary(partial(look_up, table.to(DEVICE)), 256, DEVICE)


@dataclass
class Both:
    """The same pages by a kernel and without."""

    kernel: Pages
    twin: Pages

    @property
    def memory(self) -> list[Tensor]:
        return [torch.stack([one.pages.double() for one in pages._layers]) for pages in (self.kernel, self.twin)]

    def write(self, blocks: list[int], only: list[range] | None, start: int, kv: KVSegment) -> None:
        for pages in (self.kernel, self.twin):
            pages.write(pages.table(blocks, only), start, kv, None)

    def read(self, blocks: list[int], start: int, stop: int) -> list[KVSegment]:
        return [pages.read(pages.table(blocks), start, stop) for pages in (self.kernel, self.twin)]


def both(layout: Layout, shape: Shape, layers: int, turns: Rotary, dtype: torch.dtype = torch.float32) -> Both:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        fakes = [fake_layer(layout, shape, dtype, pages=layout.pages(shape, dtype).to(DEVICE)) for _ in range(layers)]
        found = find_layouts(fakes, shape.size)
        made.append(Pages(fakes, found, shape.size, turns))
    one, made[1].kernel_slots = made[0], None
    one.kernel_slots = slots_for_kernels(one._layers, one._layouts, turns)
    assert one.kernel_slots is not None
    return Both(*made)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@settings(max_examples=4, deadline=None, phases=[*Phase][:3])
@given(
    st.sampled_from(list(ULPS)), st.sampled_from([16, 32]), st.sampled_from([(1, 8, 8), (2, 8, 4), (3, 24, 12)]),
    st.integers(1, 3), st.sampled_from([1.0, 1.25]), st.data(),
)  # fmt: skip
def test_a_kernel_reads_and_writes_what_layers_do(
    layout: Layout,
    dtype: torch.dtype,
    size: int,
    heads: tuple[int, int, int],
    layers: int,
    scale: float,
    data: st.DataObject,
) -> None:
    count, dim, turned = heads
    pages = both(layout, Shape(BLOCKS, size, count, dim), layers, rotary(turned, scale), dtype)
    blocks = data.draw(st.permutations(range(BLOCKS)))[:2]
    start = data.draw(st.integers(0, 2 * size - 1))
    stop = data.draw(st.integers(start + 1, 2 * size))
    cut = data.draw(st.integers(start, stop))
    kv = KVSegment(*torch.randn(2, layers, stop - start, count, dim).to(DEVICE, dtype))
    pages.write(blocks, [range(start, cut), range(min(cut + 3, stop), stop)], start, kv)
    assert error(*pages.memory) < ULPS[dtype]
    got, wanted = pages.read(blocks, start, stop)
    assert got.owned().keys is got.keys, "nothing larger is kept alive"
    assert got.keys.dtype == dtype and got.keys.is_contiguous() and got.values.is_contiguous()
    assert error(got.keys, wanted.keys) < ULPS[dtype] and torch.equal(got.values, wanted.values)


@pytest.mark.parametrize("dtype", ULPS, ids=str)
def test_a_kernel_translates_what_layers_do(dtype: torch.dtype) -> None:
    shape, layers, tokens = Shape(BLOCKS, 16, 2, 8), 3, 21
    pages = both(LAYOUTS["HND"], shape, layers, rotary(8), dtype)
    base = KVSegment(*torch.randn(2, layers, tokens, shape.heads, shape.dim).to(DEVICE, dtype))
    table = empty_table(base)
    table.put(0, torch.randn(9, table.width, device=DEVICE))
    rows, weights = torch.randint(0, 9, (tokens, 4)), torch.rand(tokens, 4)
    item = Translation(5, base, Blend(rows, weights, table.version), table)
    for one in (pages.kernel, pages.twin):
        translate_into(one)(one.table([3, 1], [range(5, 9), range(12, 26)]), [item])
    assert error(*pages.memory) < (2e-3 if dtype == torch.float32 else 3e-2), "the twin rounds offsets"


def test_what_kernels_do_not_know_goes_layer_by_layer() -> None:
    turns = rotary(8)
    plain, other = fake_layer(), fake_layer(Layout((0, 1, 3, 2, 4)))
    eight, mixed = float8_layer(torch.float8_e4m3fn), fake_layer(dtype=torch.bfloat16)
    scattered, in_two = fake_layer(Layout((0, 1, 2, 4, 3))), fake_layer(Layout(parts=2))
    unaligned = fake_layer(LAYOUTS["heads side by side"], Shape(dim=12), torch.bfloat16)
    for layers in ([plain, other], [eight], [plain, mixed], [scattered], [in_two], [unaligned]):
        found = find_layouts(layers, 4)
        assert slots_for_kernels(layers, found, turns) is None
    found = find_layouts([plain], 4)
    by_layer = RotaryByLayer([turns])
    assert slots_for_kernels([plain], found, by_layer) is None
    assert slots_for_kernels([plain], found, turns) is not None
    assert Pages([plain], found, 4, turns).kernel_slots is None, "on a CPU"
