"""Views of pages by block. How their dimension is found: `test_layout_probe.py`."""

from __future__ import annotations

import torch

from kedge.integrations.vllm.plugin.block_layout import BlockAxis, KVLayer, find_block_axis, memory_order
from tests.integrations.vllm.fake_layers import Layout, fake_layer


def test_memory_order_is_a_view_without_gaps() -> None:
    pages = torch.arange(2 * 3 * 4 * 5).view(2, 4, 3, 5).transpose(1, 2)
    view = memory_order(pages)
    assert view.is_contiguous() and view.data_ptr() == pages.data_ptr() and len(view) == 2


def test_pages_are_written_through_the_view_that_vllm_bound() -> None:
    """With blocks in parts the registered view may be the scheduler's, the bound one the backend's."""
    layer = fake_layer(Layout(parts=2))
    registered = layer.pages.view(6, 2, *layer.pages.shape[1:])
    layer.layer.kv_cache = layer.pages
    split = KVLayer(layer.layer, registered, layer.dtype)
    assert find_block_axis(split, 6, 4) == BlockAxis(0, 1)
    layer.layer.kv_cache = torch.zeros_like(layer.pages)
    assert split.bound is registered, "another tensor is not written to"
