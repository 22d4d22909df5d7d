"""Views of a pool of blocks: what layers of several groups lie over is copied once, and all of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from kedge.errors import LayoutUnknown
from kedge.integrations.vllm.plugin.worker_side import BlockMemory, distinct, pool_views

BLOCKS, PAGE = 6, 32


def memory() -> torch.Tensor:
    """Two regions of pages, one behind the other."""
    return torch.zeros(2 * BLOCKS * PAGE)


def region(pool: torch.Tensor, number: int, *shape: int) -> torch.Tensor:
    return pool[number * BLOCKS * PAGE : (number + 1) * BLOCKS * PAGE].view(BLOCKS, *shape)


def test_layers_that_lie_over_one_another_are_copied_once() -> None:
    pool = memory()
    layers = [region(pool, number, 4, 8) for _ in range(3) for number in (0, 1)]
    assert [view.data_ptr() for view in distinct(layers)] == [layers[0].data_ptr(), layers[1].data_ptr()]


def test_keys_and_values_apart_are_both_copied() -> None:
    pages = torch.zeros(2, BLOCKS, PAGE)
    assert len(distinct([pages.movedim(1, 0)] * 2)) == 1
    assert len(distinct([pages[0], pages[1]])) == 2


def test_a_state_within_a_page_is_copied_with_it() -> None:
    pool = memory()
    pages = region(pool, 0, 4, 8)
    state = pool[4:].as_strided((BLOCKS, 5), (PAGE, 1))
    assert distinct([state, pages]) == [pages]
    assert len(distinct([state, region(pool, 1, PAGE)])) == 2


@given(st.lists(st.tuples(st.integers(0, PAGE - 1), st.integers(1, PAGE)), min_size=1, max_size=5))
def test_no_byte_is_left_out(parts: list[tuple[int, int]]) -> None:
    pool = memory()
    views = [pool[start:].as_strided((BLOCKS, min(count, PAGE - start)), (PAGE, 1)) for start, count in parts]
    wanted, found = memory(), memory()
    for view, filled in ((one, wanted) for one in views):
        filled.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(1)
    for view in distinct(views):
        found.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(1)
    assert torch.equal(wanted, found)
    memories = [BlockMemory.of(view) for view in distinct(views)]
    assert not any(one is not other and one.covers(other) for one in memories for other in memories)


def kv_config(spec: Any) -> KVCacheConfig:
    return KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


def test_states_have_a_block_each() -> None:
    config = kv_config(MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align"))
    both = [region(memory(), 0, PAGE)[:, :4], region(memory(), 0, PAGE)[:, 4:9]]
    assert len(pool_views({"layer": both}, {}, config, torch.float32)) == 2
    with pytest.raises(LayoutUnknown, match="does not count 6 blocks"):
        pool_views({"layer": torch.zeros(BLOCKS + 1, 4)}, {}, config, torch.float32)


def test_pages_of_an_op_that_fails_are_refused() -> None:
    config = kv_config(FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype=torch.float32))
    layer = SimpleNamespace(head_size=4, num_kv_heads=1, impl=SimpleNamespace())
    with pytest.raises(LayoutUnknown, match="failed"):
        pool_views({"layer": region(memory(), 0, PAGE)}, {"layer": layer}, config, torch.float32)
