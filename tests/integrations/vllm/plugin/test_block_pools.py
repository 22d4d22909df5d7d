"""What is done to many blocks of a pool at once has the effect of vLLM's own methods, which are the oracle here."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from kedge.integrations.vllm.plugin.block_pools import (
    NeededBlocks,
    cached_block,
    cached_prefix,
    free_blocks,
    hold_blocks,
    leading_blocks,
    name_blocks,
    own_prefix,
    replace_queue,
    take_blocks,
)
from kedge.policies.eviction import steps_to_execution

SIZE, BLOCKS, GROUP = 16, 10, 0
OWNERS = ("a", "b")


def chain(name: str, length: int) -> list[BlockHash]:
    return [BlockHash(f"{name}-{at}".encode()) for at in range(length)]


def needed(hashes: list[BlockHash], first: int = 0) -> NeededBlocks:
    """Return blocks of the only group, as many as there are hashes, the first of them at a place in the prompt."""
    return NeededBlocks([key(one) for one in hashes], range(first, first + len(hashes)))


def key(one: BlockHash) -> bytes:
    return make_block_hash_with_group_id(one, GROUP)


def pool_of(events: bool = False) -> BlockPool:
    pool = BlockPool(BLOCKS + 1, True, SIZE, enable_kv_cache_events=events)
    replace_queue(pool, steps_to_execution(), whole_sets=True).on_forecast(dict.fromkeys(OWNERS, (1.0, 1.0)))
    return pool


def insert(pool: BlockPool, one: BlockHash, block: KVCacheBlock, tokens: int) -> None:
    pool._insert_block_hash(make_block_hash_with_group_id(one, GROUP), block, num_tokens=tokens)


def state(pool: BlockPool) -> Any:
    """Return everything that a pool knows: the blocks, the order in which free ones go, the map and the events."""
    blocks = [(one.block_id, one.ref_cnt, one.block_hash, one.block_hash_num_tokens) for one in pool.blocks]
    order = [one.block_id for one in pool.free_block_queue.get_all_free_blocks()]
    cached = {key: list(one) if isinstance(one, dict) else one.block_id for key, one in _cached(pool).items()}
    return blocks, order, cached, pool.kv_event_queue, pool.cached_block_hashes_by_block


def _cached(pool: BlockPool) -> dict[Any, Any]:
    return pool.cached_block_hash_to_block._cache


def owned_by_vllm(pool: BlockPool, hashes: list[BlockHash], owner: str) -> None:
    blocks = leading_blocks(pool, hashes)
    pool.touch(blocks)
    pool.free_block_queue.own([block.block_id for block in blocks], owner)
    pool.free_blocks(reversed(blocks))


class Twins(RuleBasedStateMachine):
    """One pool is used by Kedge's functions, its twin by vLLM's methods."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[list[int]] = []

    @initialize(events=st.booleans())
    def build(self, events: bool) -> None:
        self.ours, self.vllms = pool_of(events), pool_of(events)

    def blocks(self, pool: BlockPool, ids: list[int]) -> list[KVCacheBlock]:
        return [pool.blocks[one] for one in ids]

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        if count <= self.ours.get_num_free_blocks():
            taken = [block.block_id for block in take_blocks(self.ours, count)]
            assert taken == [block.block_id for block in self.vllms.get_new_blocks(count)]
            self.held.append(taken)

    @rule(name=st.sampled_from("xy"), length=st.integers(1, 6))
    def hold(self, name: str, length: int) -> None:
        found = leading_blocks(self.ours, chain(name, length))
        hold_blocks(self.ours, found)
        self.vllms.touch(leading_blocks(self.vllms, chain(name, length)))
        self.held.append([block.block_id for block in found])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        ids = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        free_blocks(self.ours, self.blocks(self.ours, ids))
        self.vllms.free_blocks(reversed(self.blocks(self.vllms, ids)))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.sampled_from("xy"), first=st.integers(0, 3), skipped=st.frozensets(st.integers(0, 5)))
    def name(self, data: st.DataObject, name: str, first: int, skipped: frozenset[int]) -> None:
        ids = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        if any(self.ours.blocks[one].block_hash for one in ids):
            return
        hashes, named = chain(name, first + len(ids))[first:], 0
        for at, (one, block) in enumerate(zip(hashes, self.blocks(self.vllms, ids), strict=True)):
            if at not in skipped and cached_block(self.vllms, one) is None:
                insert(self.vllms, one, block, (first + at + 1) * SIZE)
                named += 1
        assert name_blocks(self.ours, needed(hashes, first), self.blocks(self.ours, ids), skipped) == named

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.sampled_from("xy"), at=st.integers(0, 5))
    def compute_twice(self, data: st.DataObject, name: str, at: int) -> None:
        """A request computes a block that is cached already: two blocks have its hash."""
        ids = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        if ids and not self.ours.blocks[ids[0]].block_hash:
            for pool in (self.ours, self.vllms):
                insert(pool, chain(name, at + 1)[at], pool.blocks[ids[0]], SIZE)

    @rule(name=st.sampled_from("xy"), length=st.integers(1, 6), owner=st.sampled_from(OWNERS))
    def own(self, name: str, length: int, owner: str) -> None:
        own_prefix(self.ours, chain(name, length), owner)
        owned_by_vllm(self.vllms, chain(name, length), owner)

    @invariant()
    def pools_are_alike(self) -> None:
        if hasattr(self, "ours"):
            assert state(self.ours) == state(self.vllms)
            self.ours.free_block_queue.check_integrity()


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


def test_a_prefix_is_that_of_the_pool_and_of_others() -> None:
    pool, hashes = pool_of(), chain("x", 8)
    name_blocks(pool, needed(hashes[:3]), take_blocks(pool, 3))
    assert [block.block_hash_num_tokens for block in leading_blocks(pool, hashes)] == [SIZE, 2 * SIZE, 3 * SIZE]
    assert cached_prefix(pool, hashes) == 3
    assert cached_prefix(pool, hashes, others=set(map(key, hashes[3:5]))) == 5
    assert cached_prefix(pool, hashes, stop=2) == 2
    assert cached_prefix(pool, hashes, start=4) == 4
    assert [cached_prefix(pool, hashes, guess=guess) for guess in range(9)] == [3] * 9


def test_blocks_that_are_watched_are_handed_out_by_vllm() -> None:
    pool, seen = pool_of(), list[int]()
    pool.unpin_blocks(take_blocks(pool, 2), lambda block: seen.append(block.block_id))
    taken = take_blocks(pool, BLOCKS)
    assert sorted(seen) == [1, 2]
    assert len(taken) == BLOCKS
