"""The host tier on vLLM's own block pools: copies that land or are dropped, in any order."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kedge.cache import Copied, Copy, Direction
from kedge.cache.copies import Purpose
from kedge.integrations.vllm.plugin.block_pools import cached_block, leading_blocks
from kedge.integrations.vllm.plugin.host_tier import HostQuotas, HostTier
from kedge.policies.sessions import SessionKey
from kedge.settings import QuotaSettings
from kedge.types import Namespace, TenantId
from tests.integrations.vllm.plugin.pools import POLICY, admitted, chain, computed, evicted, land, opened

DEVICE, HOST = 12, 16


class Copies(RuleBasedStateMachine):
    """Whatever is emptied meanwhile, no worker writes to a block that others may be given."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = opened(DEVICE)
        self.queue: Any = self.pool.free_block_queue
        self.tier = HostTier(self.pool, HOST, POLICY, 1, self.quotas())
        self.sent: list[Copy] = []

    def quotas(self) -> HostQuotas | None:
        return None

    def owner(self, name: str) -> Any:
        return name

    @rule(name=st.sampled_from("abc"), length=st.integers(1, 6))
    def compute(self, name: str, length: int) -> None:
        """A request computes a prompt and ends."""
        hashes = chain(name, length)
        if found := admitted(self.pool, hashes):
            computed(self.pool, hashes, found[0])
            self.pool.free_blocks(reversed(found[0]))

    @rule(name=st.sampled_from("abc"), length=st.integers(1, 6))
    def back_up(self, name: str, length: int) -> None:
        self.tier.back_up(chain(name, length), self.owner(name), lambda _: True)

    @rule(name=st.sampled_from("abc"), length=st.integers(1, 6))
    def load(self, name: str, length: int) -> None:
        self.tier.load(chain(name, length), Purpose.DEMAND, None, lambda _: True)

    @rule(blocks=st.integers(1, DEVICE))
    def evict(self, blocks: int) -> None:
        evicted(self.pool, blocks)

    @rule()
    def send(self) -> None:
        self.sent += self.tier.take_copies()

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), ok=st.booleans())
    def land(self, data: st.DataObject, ok: bool) -> None:
        copy = self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))
        self.tier.on_copied(Copied(copy.copy_id, ok, 0.1))

    @rule()
    def empty_device(self) -> None:
        with self.tier.without_copies():
            assert self.pool.reset_prefix_cache()
            self.queue.forget_blocks()
        assert not leading_blocks(self.pool, chain("a", 1))

    @rule(name=st.sampled_from("abc"), length=st.integers(1, 8))
    def look(self, name: str, length: int) -> None:
        """What a tier has is counted, as long as it is a prefix."""
        hashes = chain(name, length)
        known = [bool(self.tier.loading(one) or cached_block(self.pool, one)) for one in hashes]
        held = [*known[: known.count(True)], *map(self.tier.holds, hashes[known.count(True) :])]
        found = self.tier.extent(hashes)
        assert 0 <= found[0] <= found[1] <= length
        if known == sorted(known, reverse=True) and held == sorted(held, reverse=True):
            assert found == (known.count(True), held.count(True))

    @rule()
    def empty_host(self) -> None:
        self.tier.clear()
        assert not any(self.tier.holds(one) for name in "abc" for one in chain(name, 6))

    @invariant()
    def targets_are_held(self) -> None:
        for copy in self.sent:
            pool: Any = self.pool if copy.direction is Direction.LOAD else self.tier.host
            assert all(pool.blocks[one].ref_cnt == 1 for one in copy.targets)

    @invariant()
    def sound(self) -> None:
        self.queue.check_integrity()
        self.tier.queue.check_integrity()
        if not self.tier.busy:
            assert self.pool.get_num_free_blocks() == DEVICE
            assert self.tier.host.get_num_free_blocks() == HOST
            assert {block.ref_cnt for block in (*self.pool.blocks[1:], *self.tier.host.blocks[1:])} == {0}

    def teardown(self) -> None:
        land(self.tier, self.sent)
        self.sent = []
        self.sound()
        assert not self.tier.busy


TestCopies = Copies.TestCase
TestCopies.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_next_load_is_of_what_the_device_lacks_and_no_load_brings() -> None:
    """A draft's head lets vLLM compute a block that the device has."""
    world, prompt = Copies(), chain("a", 4)
    world.compute("a", 6)
    world.back_up("a", 6)
    land(world.tier)
    assert world.tier.next_load(prompt, 3) == (None, False)
    world.empty_device()
    assert world.tier.next_load(prompt, 3) == (None, True)
    world.load("a", 4)
    transfer, _ = world.tier.next_load(prompt, 3)
    assert transfer and transfer.is_load
    longer = world.tier.load(chain("a", 6), Purpose.DEMAND, None, lambda _: True)
    assert longer and len(longer.sources) == 2
    world.teardown()


def test_without_room_nothing_is_held_and_what_was_under_way_when_the_device_was_emptied_brings_nothing() -> None:
    world, prompt = Copies(), chain("a", 4)
    backed_up(world, "a", 4)
    evicted(world.pool, DEVICE - 1)
    taken = world.pool.get_new_blocks(DEVICE - 3)
    world.load("a", 4)
    assert not world.tier.busy and world.pool.get_num_free_blocks() == 3, "the first block of the prompt among them"
    world.pool.free_blocks(taken)
    world.load("a", 4)
    assert world.tier.extent(prompt) == (4, 4) and len(world.tier.held_on_device()) == 4
    for end in (world.empty_device, lambda: land(world.tier)):
        end()
        assert world.tier.extent(prompt) == (0, 4)
    world.sound()


@pytest.mark.parametrize("ends", [(True, False), (True, True)])
def test_what_a_rank_fails_to_copy_is_not_loaded(ends: tuple[bool, bool]) -> None:
    world, prompt = Copies(), chain("a", 4)
    backed_up(world, "a", 4)
    world.empty_device()
    world.tier.transfers._ranks = 2
    transfer = world.tier.load(prompt, Purpose.DEMAND, None, lambda _: True)
    assert transfer
    for ok in ends:
        assert not leading_blocks(world.pool, prompt)
        world.tier.on_copied(Copied(transfer.copy.copy_id, ok, 0.1))
    assert len(leading_blocks(world.pool, prompt)) == (4 if all(ends) else 0)
    world.sound()


# quotas ---------------------------------------------------------------------------------------------------------------


def session(name: str) -> SessionKey:
    """Return a session of the tenant whose name is the first letter."""
    return SessionKey(Namespace(TenantId(name[0])), name)


class CopiesOfTenants(Copies):
    """Whatever lands, fails or is emptied, a tenant holds no more of the host than it may, and that is counted."""

    def quotas(self) -> HostQuotas:
        return HostQuotas({"a": 4, "*": 5}, HOST + 1)

    def owner(self, name: str) -> SessionKey:
        return session(name)

    @rule(name=st.sampled_from("abc"), steps=st.none() | st.integers(0, 3))
    def step(self, name: str, steps: int | None) -> None:
        """A session's step is known, or is not any more."""
        self.tier.owners.on_forecast({session(name): None if steps is None else (float(steps), 1.0)})

    @invariant()
    def within_quotas(self) -> None:
        quotas = self.tier.quotas
        assert quotas is not None
        quotas.check_integrity()
        for block in self.tier.host.blocks:
            if block.block_hash is not None:
                assert quotas.is_of(block.block_id, TenantId(block.block_hash[:1].decode()))
        if not self.tier.busy:
            hashed = sum(block.block_hash is not None for block in self.tier.host.blocks)
            assert quotas.held.total() == hashed


TestCopiesOfTenants = CopiesOfTenants.TestCase
TestCopiesOfTenants.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def backed_up(world: Copies, name: str, length: int, may_evict: Any = lambda _: True, *, ok: bool = True) -> None:
    """A turn of a session ends, and its history is copied to the host."""
    world.compute(name, length)
    world.tier.owners.on_forecast({session(name): (1.0, 1.0)})
    world.tier.back_up(chain(name, length), session(name), may_evict)
    land(world.tier, ok=ok)


def held(world: Copies, name: str) -> int:
    return sum(map(world.tier.holds, chain(name, 6)))


def test_a_tenant_over_its_quota_gives_up_its_own() -> None:
    world = CopiesOfTenants()
    backed_up(world, "b", 6)
    backed_up(world, "c", 5)
    backed_up(world, "a1", 3)
    backed_up(world, "a2", 3)
    assert [held(world, name) for name in ("b", "c", "a1", "a2")] == [5, 5, 1, 3]
    assert world.tier.holds(chain("a1", 1)[0]), "the end of a history goes first"
    backed_up(world, "a3", 6)
    found = [held(world, name) for name in ("b", "c", "a1", "a2", "a3")]
    assert found == [5, 5, 0, 0, 4], "no more than it may have"
    assert world.tier.counters["host_evictions_over_quota"] == 6
    backed_up(world, "a3", 6)
    assert held(world, "a3") == 4, "what it continues is not given up for its end"
    backed_up(world, "a4", 3, may_evict=lambda _: False)
    assert (held(world, "a3"), held(world, "a4")) == (4, 0), "nor what is needed sooner"
    world.empty_device()
    world.load("a3", 4)
    land(world.tier, ok=False)
    world.within_quotas()
    world.empty_host()
    backed_up(world, "a5", 4, ok=False)
    world.within_quotas()
    world.sound()


def test_quotas_are_in_whole_blocks_and_only_where_there_are_any() -> None:
    limits = {"a": QuotaSettings(host_memory="1KiB"), "b": QuotaSettings(anchor_bytes=3)}
    quotas = HostQuotas.of(limits, 300, 9)
    assert quotas is not None
    assert [quotas.excess(TenantId(name), 4) for name in "abc"] == [1, 0, 0]
    assert HostQuotas.of({"b": QuotaSettings(anchor_bytes=3)}, 300, 9) is None
