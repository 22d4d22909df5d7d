"""Prefetches by forecast on vLLM's own block pools: of which sessions and agents, over what, and what is remembered."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kedge.cache import Copied, Copy
from kedge.integrations.vllm.plugin import host_loads
from kedge.integrations.vllm.plugin.block_pools import cached_block, cached_prefix, leading_blocks, replace_queue
from kedge.integrations.vllm.plugin.host_loads import HostLoads
from kedge.integrations.vllm.plugin.host_tier import HostTier
from kedge.policies.eviction import steps_to_execution
from kedge.policies.prefetch import is_within
from kedge.settings import TierSettings
from kedge.workflow.steps import NextRun

SIZE, DEVICE, HOST = 16, 12, 24
POLICY = steps_to_execution(math.inf)
NAMES = ("aX", "aY", "bX", "c", "d", "e")
SHARING = ("aX", "aY")
"""Sessions with a common head. Once evicted, a block is owned only by those that compute or load it again, so what is
said of all others holds for these until one of them computes the head without the other."""


def chain(name: str, length: int) -> list[BlockHash]:
    """Return hashes of a history: those with the same letter share two blocks."""
    return [BlockHash(f"{name[:1] if at < 2 else name}-{at}".encode()) for at in range(length)]


class Engine:
    """A device and a host, whose copies land when they are told to."""

    def __init__(self, **tiers: float) -> None:
        self.pool = BlockPool(DEVICE + 1, True, SIZE)
        self.queue = replace_queue(self.pool, POLICY, whole_sets=True)
        self.tier = HostTier(self.pool, HOST, POLICY, 1)
        self.tier.load_pays = lambda _: False  # type: ignore[method-assign] # of no matter while nobody waits
        self.settings = TierSettings(host_memory=f"{HOST} blocks", **tiers)
        self.trusted = True
        self.prompts = SimpleNamespace(prompts={}, steps={}, changed=False)
        self.loads = HostLoads(self.tier, self.prompts, self.settings, SIZE, lambda: self.trusted)  # type: ignore[arg-type]
        self.idle = self.loads.idle
        self.steps: dict[str, float] = {}
        self.sent: list[Copy] = []

    def set_step(self, name: str, step: float | None) -> None:
        if step is None:
            self.steps.pop(name, None)
        else:
            self.steps[name] = step
        changes = {name: None if step is None else (step, 1.0)}
        for queue in (self.queue, self.tier.queue):
            queue.on_forecast(changes)
        self.idle.on_steps(changes)  # type: ignore[arg-type]

    def turn(self, name: str, length: int, step: float) -> None:
        """Run a turn of a session, which is idle then, and back its history up."""
        self.set_step(name, -0.5)
        hashes = chain(name, length)
        found = leading_blocks(self.pool, hashes)
        self.pool.touch(found)
        if length - len(found) > self.pool.get_num_free_blocks():
            self.pool.free_blocks(reversed(found))
            return self.set_step(name, step)
        blocks = found + self.pool.get_new_blocks(length - len(found))
        for block, one in zip(blocks, hashes, strict=True):
            if block.block_hash is None:  # behind a hole there may be another block with the hash: vLLM knows both
                self.pool._insert_block_hash(make_block_hash_with_group_id(one, 0), block, num_tokens=SIZE)
        self.queue.own_history([block.block_id for block in blocks], name)
        self.set_step(name, step)
        self.idle.ended(name, hashes)
        self.tier.back_up(hashes, name, lambda _: True)
        self.pool.free_blocks(reversed(blocks))
        return self.land()

    def agent(self, name: str, length: int, step: float, probability: float = 1.0) -> None:
        """Run an agent, whose fixed prompt is needed again in so many steps, and is known as that."""
        self.turn(name, length, step)
        self.idle.clear()
        self.prompts.prompts[name], self.prompts.steps[name] = chain(name, length), NextRun(step, probability)

    def land(self, ok: bool = True) -> None:
        for copy in (*self.sent, *self.tier.take_copies()):
            self.tier.on_copied(Copied(copy.copy_id, ok, 0.1))
        self.sent = []

    def evict(self, blocks: int = DEVICE) -> None:
        """Compute something that is needed by no session."""
        self.pool.free_blocks(self.pool.get_new_blocks(min(blocks, self.pool.get_num_free_blocks())))

    def prefetch(self, slots: int = 4, *, waiting: bool = False) -> list[str]:
        """Order prefetches; the first blocks' owners, in order."""
        before = set(self.tier._transfers)
        self.loads.look_again()
        live: Any = SimpleNamespace(may_load=True, is_admitted=not waiting, session=None)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(host_loads, "PREFETCH_JOBS", self.tier.prefetching + slots)
            self.sent += self.loads.copies([live], idle=False)
        return [str(one.owner) for key, one in self.tier._transfers.items() if key not in before]

    def on_device(self, name: str, length: int) -> int:
        return cached_prefix(self.pool, chain(name, length))


def test_a_session_that_comes_near_is_loaded_before_its_request() -> None:
    engine = Engine()
    engine.turn("c", 4, 50.0)
    engine.evict()
    assert engine.prefetch() == [] and not engine.idle.changed, "it is far away"
    engine.set_step("c", 1.5)
    assert engine.idle.changed and engine.prefetch(waiting=True) == [], "a request waits"
    assert engine.prefetch() == ["c"] and not engine.idle.changed
    engine.land()
    assert engine.on_device("c", 4) == 4
    engine.set_step("c", 1.4)
    assert engine.prefetch() == [] and not engine.idle.changed


def test_near_sessions_and_agents_are_loaded_soonest_first() -> None:
    engine = Engine()
    engine.agent("aX", 3, 0.7)
    for name, step in (("c", 1.0), ("d", 0.5), ("e", 2.5)):
        engine.turn(name, 4, step)
    engine.evict()
    assert engine.prefetch(slots=1) == ["d"]
    assert engine.prefetch() == ["aX", "c"], "the other is outside of the window"


def test_an_agent_that_is_unlikely_to_run_replaces_nothing_that_is_needed() -> None:
    engine = Engine()
    engine.agent("c", 6, 1.0, probability=0.4)
    engine.evict()
    engine.turn("d", 12, 9.0)
    assert engine.prefetch() == []
    engine.prompts.steps["c"] = NextRun(1.0, 0.6)
    assert engine.prefetch() == ["c"]


def test_the_history_is_that_of_the_last_turn_and_the_oldest_is_forgotten() -> None:
    engine = Engine()
    for name, length in (("c", 4), ("d", 5), ("c", 2), ("e", HOST - 5)):
        engine.idle.ended(name, chain(name, length))
    assert engine.idle._histories == {"c": chain("c", 2), "e": chain("e", HOST - 5)} and engine.idle._blocks == HOST - 3
    engine.idle.check_integrity()


def test_only_what_is_needed_strictly_later_goes() -> None:
    engine = Engine()
    engine.turn("c", 6, 1.0)
    engine.evict()
    engine.turn("d", 6, 1.0)
    engine.turn("e", 6, 0.5)
    assert engine.prefetch() == []
    engine.set_step("d", 1.1)
    assert engine.prefetch() == ["c"], "what was refused is tried again"
    assert engine.on_device("d", 6) == 0 and engine.on_device("e", 6) == 6


def test_nothing_is_loaded_while_lru_rules_or_outside_of_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    engine.turn("c", 4, 1.0)
    engine.evict()
    engine.trusted = False
    assert engine.prefetch() == []
    engine.trusted = True
    monkeypatch.setattr(host_loads, "PREFETCH_WINDOW", -1.0)
    assert engine.prefetch() == []


def test_a_block_that_is_computed_while_it_is_loaded_is_owned_by_both() -> None:
    engine = Engine()
    engine.turn("aX", 1, 1.0)
    engine.evict()
    assert engine.prefetch() == ["aX"]
    engine.turn("aY", 1, 9.0)  # the load lands after aY has computed the same block
    engine.evict()
    assert engine.prefetch() == ["aX"]


def test_an_empty_device_is_filled_again_and_an_empty_host_is_not_looked_at() -> None:
    engine = Engine()
    engine.turn("c", 4, 1.0)
    assert engine.pool.reset_prefix_cache()
    engine.queue.forget_blocks()
    assert engine.prefetch() == ["c"]
    engine.land()
    engine.evict()
    engine.loads.clear()
    assert engine.prefetch() == [] and not engine.idle._histories


class Prefetches(RuleBasedStateMachine):
    """Whatever happens, no target is missed, and nothing goes that is needed as soon."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.longest: dict[str, int] = {}

    @rule(name=st.sampled_from(NAMES), length=st.integers(1, 7), step=st.sampled_from([0.0, 1.0, 1.5, 2.0, 9.0]))
    def turn(self, name: str, length: int, step: float) -> None:
        """A session only grows: a prompt that leaves its history is another session."""
        self.longest[name] = max(length, self.longest.get(name, 0))
        self.engine.turn(name, self.longest[name], step)

    @rule(name=st.sampled_from(NAMES), step=st.sampled_from([None, -0.5, 0.0, 1.0, 1.5, 2.0, 9.0, math.inf]))
    def move(self, name: str, step: float | None) -> None:
        self.engine.set_step(name, step)

    @rule(blocks=st.integers(1, DEVICE))
    def evict(self, blocks: int) -> None:
        self.engine.evict(blocks)

    @rule(slots=st.integers(0, 6))
    def prefetch(self, slots: int) -> None:
        engine = self.engine
        lengths = {str(name): len(hashes) for name, hashes in engine.idle._histories.items()}
        before = {name: engine.on_device(name, length) for name, length in lengths.items()}
        denied, loaded = engine.tier.counters["denied_loads"], engine.prefetch(slots)
        assert len(loaded) <= slots
        latest = max((engine.steps[name] for name in loaded), default=-1.0)
        lost = [name for name, length in lengths.items() if engine.on_device(name, length) < before[name]]
        assert all(engine.steps.get(name, math.inf) > latest for name in lost if name not in SHARING)
        if len(loaded) < slots and engine.tier.counters["denied_loads"] == denied:
            self._check_nothing_missed(lost)

    def _check_nothing_missed(self, lost: list[str]) -> None:
        """Every session that should be on the device is there or on its way; what was `lost` to a sooner one is looked
        at next.
        """
        engine = self.engine
        for name, hashes in engine.idle._histories.items():
            step = engine.steps.get(str(name), math.inf)
            is_gone = cached_block(engine.pool, hashes[-1]) is None
            if is_gone and step >= 0 and is_within(step, host_loads.PREFETCH_WINDOW) and name not in (*SHARING, *lost):
                first, stop = engine.tier.extent(hashes)
                assert engine.tier.loading(hashes[-1]) or first == stop

    @precondition(lambda self: self.engine.tier.busy)
    @rule(ok=st.booleans())
    def land(self, ok: bool) -> None:
        self.engine.land(ok)

    @invariant()
    def sound(self) -> None:
        engine = self.engine
        engine.idle.check_integrity()
        engine.queue.check_integrity()
        engine.tier.queue.check_integrity()
        assert all(0 <= engine.steps[str(name)] <= 2 for name in engine.idle._near)


TestPrefetches = Prefetches.TestCase
TestPrefetches.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
