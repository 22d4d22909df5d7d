"""Look-ups of prompts in a pool, and what a hit of several KV cache groups needs, against vLLM's own longest hit."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kedge.cache.copies import Purpose
from kedge.errors import LayoutUnknown
from kedge.integrations.vllm.plugin.block_pools import (
    CacheGroup,
    CacheGroups,
    NeededBlocks,
    cached_prefix,
    groups_of,
    has_end,
    leading_blocks,
    name_blocks,
    own_prefix,
    replace_queue,
)
from kedge.integrations.vllm.plugin.host_tier import HostTier
from tests.integrations.vllm.plugin.pools import POLICY, SIZE, land, opened

BLOCKS, LENGTH = 100, 9
SPEC = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
HASHES = [BlockHash(f"hash-{at}".encode()) for at in range(LENGTH)]
FULL = FullAttentionSpec(block_size=SIZE, **SPEC)
STATE = MambaSpec(block_size=SIZE, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def window(tokens: int, block_size: int = SIZE) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=tokens, **SPEC)


MODELS = {
    "window": (window(2 * SIZE), FULL),
    "two windows": (window(SIZE + 1), window(3 * SIZE), FULL),
    "wider blocks": (FULL, window(2 * SIZE, 2 * SIZE)),
    "state": (STATE, FULL),
    "full attention twice": (FULL, FullAttentionSpec(block_size=SIZE, **{**SPEC, "num_kv_heads": 2})),
}
HEADS = [
    (name, head)
    for name, specs in MODELS.items()
    for head in (None, *(number for number, spec in enumerate(specs) if spec is not STATE))
]
"""Models, each with the groups that a drafting head's layers may be in; None: vLLM does not say"""


def kv_config(specs: Any, head: int | None = None) -> KVCacheConfig:
    """`head`: the group that vLLM marks as that of a drafting head."""
    listed = [KVCacheGroupSpec([f"layer{at}"], spec, is_eagle_group=at == head) for at, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=listed)


def config(hash_size: int | None = None, drafts: bool | None = False) -> Any:
    """`drafts`: whether a head drafts; None: something without KV does."""
    speculative = None if drafts is False else SimpleNamespace(use_eagle=lambda: bool(drafts))
    return SimpleNamespace(cache_config=SimpleNamespace(hash_block_size=hash_size), speculative_config=speculative)


def groups(specs: Any) -> CacheGroups:
    return groups_of(config(), kv_config(specs))


def cached(pool: BlockPool, found: CacheGroups, kept: Any) -> None:
    """Put blocks into a pool: those of a group at the indices of hashes that `kept` has for it."""
    for group in found:
        for at in kept[group.number]:
            (block,) = pool.get_new_blocks(1)
            key = make_block_hash_with_group_id(HASHES[at], group.number)
            pool._insert_block_hash(key, block, num_tokens=(at + 1) * SIZE)
            pool.free_blocks([block])


def coordinator(specs: Any, drafts: bool = False, head: int | None = None) -> HybridKVCacheCoordinator:
    align = math.lcm(*(spec.block_size for spec in specs))
    return HybridKVCacheCoordinator(
        kv_cache_config=kv_config(specs, head),
        max_model_len=1024,
        max_in_flight_tokens=1024,
        use_eagle=drafts,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=align,
        hash_block_size=SIZE,
    )


def draw_kept(data: st.DataObject, found: CacheGroups) -> dict[int, set[int]]:
    """Of the main group a prefix, of the others whatever."""
    kept = {found.main.number: set(range(data.draw(st.integers(0, LENGTH))))}
    for group in found.others:
        places = range(group.hashes - 1, LENGTH, group.hashes)
        kept[group.number] = data.draw(st.sets(st.sampled_from(places)))
        if group.window is None:
            kept[group.number] = set(sorted(places)[: len(kept[group.number])])
    return kept


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_longest_hit_is_vllms_and_may_be_owned(name: str, data: st.DataObject) -> None:
    specs = MODELS[name]
    found, vllm = groups(specs), coordinator(specs)
    pool = vllm.block_pool
    queue = replace_queue(pool, POLICY, groups=found)
    queue.owners.on_forecast({"owner": (1.0, 1.0)})
    kept = draw_kept(data, found)
    cached(pool, found, kept)
    _, tokens, _ = vllm.find_longest_cache_hit(HASHES, LENGTH * SIZE)
    assert cached_prefix(pool, HASHES) == tokens // SIZE
    keys = pool.cached_block_hash_to_block._cache
    assert found.reach(HASHES, keys.__contains__) == tokens // SIZE
    assert set(found.needed(HASHES[: tokens // SIZE]).keys) <= keys.keys()
    assert has_end(pool, HASHES[: tokens // SIZE])
    own_prefix(pool, HASHES, "owner")
    of_others = sum(len(group.places(tokens // SIZE)) for group in found.others)
    assert queue.members_of("owner") == len(kept[found.main.number]) + of_others
    queue.check_integrity()


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_comes_back_from_the_host_is_a_hit(name: str, data: st.DataObject) -> None:
    """Of what was backed up, whatever the device has lost is loaded, and nothing twice."""
    found = groups(MODELS[name])
    device = BlockPool(BLOCKS, True, SIZE)
    replace_queue(device, POLICY, groups=found).owners.on_forecast({"owner": (1.0, 1.0)})
    tier = HostTier(device, BLOCKS, POLICY, 1)
    length = data.draw(st.integers(1, LENGTH))
    length -= length % found.align
    prompt = HASHES[:length]
    needed = dict(zip(*found.needed(prompt), strict=True))
    cached(device, found, {group.number: group.places(length) for group in found})
    for _ in range(2):  # half of the device at most, each time
        tier.back_up(prompt, "owner", lambda _: True)
        assert len(tier._backing_up) <= BLOCKS // 2
        land(tier)
    assert set(tier.host.cached_block_hash_to_block._cache) == needed.keys()
    lost = data.draw(st.sets(st.sampled_from(sorted(needed)))) if needed else set()
    ends = [needed[key] for key in lost if key.endswith(found.main.key_end)]  # a prompt is lost from its end
    lost |= {key for key, at in needed.items() if ends and at >= min(ends) and key.endswith(found.main.key_end)}
    device.evict_blocks({device.cached_block_hash_to_block.get_one_block(key).block_id for key in lost})
    places = [(group, group.places(length)) for group in found if length]
    assert has_end(device, prompt) == lost.isdisjoint(HASHES[at[-1]] + group.key_end for group, at in places)
    first = cached_prefix(device, prompt)
    transfer = tier.load(prompt, Purpose.DEMAND, "owner", lambda _: True) if first < length else None
    if first < length:
        assert transfer and set(transfer.needed.keys) == lost
        assert tier.next_load(prompt, first) == (transfer, False)
    land(tier)
    assert cached_prefix(device, prompt) == length and tier.extent(prompt) == (length, length)
    places = {block.block_hash: block.block_hash_num_tokens for block in device.blocks if block.block_hash}
    assert places == {key: (at + 1) * SIZE for key, at in needed.items()}
    assert device.get_num_free_blocks() == BLOCKS - 1 and tier.host.get_num_free_blocks() == BLOCKS
    device.free_block_queue.check_integrity()
    tier.queue.check_integrity()


def test_the_blocks_of_a_request_are_those_of_the_main_group_and_others() -> None:
    found = groups(MODELS["two windows"])
    assert found.held_blocks(([0, 0, 3], [0, 4, 5], [6, 7, 8])) == ([6, 7, 8], [3, 4, 5])
    assert found.held_blocks(()) == ([], [])


@pytest.mark.parametrize(("name", "head"), HEADS)
@pytest.mark.parametrize("length", [2, 4, 6, 8])
def test_with_a_drafting_head_vllm_finds_all_but_the_last_block(name: str, head: int | None, length: int) -> None:
    """Whether it knows in which group the head's layers are or not."""
    specs = MODELS[name]
    found = groups_of(config(drafts=True), kv_config(specs, head))
    vllm = coordinator(specs, drafts=True, head=head)
    replace_queue(vllm.block_pool, POLICY, groups=found)
    cached(vllm.block_pool, found, {group.number: group.places(length) for group in found})
    _, tokens, _ = vllm.find_longest_cache_hit(HASHES, LENGTH * SIZE)
    assert tokens // SIZE == length - found.align
    keys = vllm.block_pool.cached_block_hash_to_block._cache
    assert found.reach(HASHES, keys.__contains__) == length


def test_beside_a_head_a_group_without_its_layers_needs_nothing_behind_the_hit() -> None:
    """Of a window vLLM caches no more than that, of a prompt's end."""
    specs = MODELS["window"]
    found = groups_of(config(drafts=True), kv_config(specs, 1))
    assert found.others == (CacheGroup.of(0, 1, 2, behind=1),)
    assert found.fitted(HASHES, 8, lambda key: not key.startswith(HASHES[6])) == 7
    assert groups_of(config(drafts=True), kv_config(specs, 0)).others == (CacheGroup.of(0, 1, 3),)
    assert groups_of(config(), kv_config(specs, 1)) == groups(specs)
    assert groups_of(config(drafts=None), kv_config(specs)) == groups(specs), "such drafts have no KV"


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ((window(32), window(64)), "none has full attention"),
        ((FULL, ChunkedLocalAttentionSpec(block_size=SIZE, attention_chunk_size=32, **SPEC)), "no kind that is known"),
        ((FULL, MambaSpec(block_size=SIZE, shapes=((4,),), dtypes=(torch.float32,))), "must be align"),
        ((window(64, 64), window(64, 32), FULL), "two sizes"),
        ((window(64, 24), FULL), "none has full attention in blocks of 8"),
        ((SimpleNamespace(block_size=SIZE, kv_cache_specs={"a": FULL, "b": window(32)}), FULL), "different windows"),
        ((FULL, type("Strided", (FullAttentionSpec,), {"rswa_window": 4})(block_size=SIZE, **SPEC)), "no kind that"),
    ],
)
def test_groups_that_are_not_known_are_refused(specs: Any, why: str) -> None:
    with pytest.raises(LayoutUnknown, match=why):
        groups(specs)


# one group ------------------------------------------------------------------------------------------------------------

PLAIN = [make_block_hash_with_group_id(one, 0) for one in HASHES]


@pytest.fixture
def pool() -> BlockPool:
    built = opened(10)
    built.free_block_queue.owners.on_forecast({"a": (1.0, 1.0)})
    return built


def test_a_prefix_is_that_of_the_pool_and_of_others(pool: BlockPool) -> None:
    assert name_blocks(pool, NeededBlocks(PLAIN[:3], range(3)), pool.get_new_blocks(3)) == 3
    assert [block.block_hash_num_tokens for block in leading_blocks(pool, HASHES)] == [SIZE, 2 * SIZE, 3 * SIZE]
    assert cached_prefix(pool, HASHES) == 3
    assert cached_prefix(pool, HASHES, others=set(PLAIN[3:5])) == 5
    assert cached_prefix(pool, HASHES, start=4) == 4
    assert [cached_prefix(pool, HASHES, guess=guess) for guess in range(10)] == [3] * 10


def test_what_is_known_is_not_named_and_what_a_pool_has_is_owned(pool: BlockPool) -> None:
    first, again = pool.get_new_blocks(2), pool.get_new_blocks(3)
    name_blocks(pool, NeededBlocks(PLAIN[:2], range(2)), first)
    assert name_blocks(pool, NeededBlocks(PLAIN[:3], range(3)), again) == 1
    assert leading_blocks(pool, HASHES) == [*first, again[2]]
    pool.free_blocks([*again, *first])
    own_prefix(pool, HASHES, "a")
    assert pool.free_block_queue.members_of("a") == 3 and pool.get_num_free_blocks() == 10
    assert pool.free_block_queue.get_all_free_blocks()[-3:] == [again[2], *reversed(first)], "from its end"
    pool.free_block_queue.check_integrity()
