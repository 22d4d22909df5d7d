"""Loads from the host: which, in which order, over what and how long a request waits; and prefetches by forecast."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kedge.cache import Copy
from kedge.integrations.vllm.plugin import host_loads
from kedge.integrations.vllm.plugin.block_pools import cached_block, cached_prefix
from kedge.integrations.vllm.plugin.host_loads import HostLoads
from kedge.integrations.vllm.plugin.host_tier import HostTier
from kedge.integrations.vllm.plugin.requests import LiveRequest
from kedge.policies.prefetch import is_within
from kedge.settings import TierSettings
from kedge.workflow.steps import NextRun
from tests.integrations.vllm.plugin.pools import POLICY, SIZE, admitted, chain, computed, evicted, land, opened

DEVICE, HOST = 12, 24
NAMES = ("aX", "aY", "bX", "c", "d", "e")
SHARING = ("aX", "aY")
"""Sessions with a common head. Once evicted, a block is owned only by those that compute or load it again, so what is
said of all others holds for these until one of them computes the head without the other."""


prompt = partial(chain, letter=2)
"""Hashes of histories: those of one first letter share two blocks"""


class Engine:
    """A device and a host, whose copies land when they are told to."""

    def __init__(self, **tiers: float) -> None:
        self.pool = opened(DEVICE)
        self.queue: Any = self.pool.free_block_queue
        self.tier = HostTier(self.pool, HOST, POLICY, 1)
        self.tier.load_pays = lambda _: False  # type: ignore[method-assign] # of no matter while nobody waits
        self.settings = TierSettings(host_memory=f"{HOST} blocks", **tiers)
        self.trusted = True
        self.prompts = SimpleNamespace(prompts={}, steps={}, changed=False)
        self.loads = HostLoads(self.tier, self.prompts, self.settings, SIZE, lambda: self.trusted)  # type: ignore[arg-type]
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
        self.loads.on_steps(changes)  # type: ignore[arg-type]

    def turn(self, name: str, length: int, step: float) -> None:
        """Run a turn of a session, which is idle then, and back its history up."""
        self.set_step(name, -0.5)
        hashes = prompt(name, length)
        found = admitted(self.pool, hashes)
        if found is None:
            return self.set_step(name, step)
        blocks, _ = found
        computed(self.pool, hashes, blocks)
        self.queue.own_history([block.block_id for block in blocks], name)
        self.set_step(name, step)
        self.loads._remember(name, hashes)
        self.tier.back_up(hashes, name, lambda _: True)
        self.pool.free_blocks(reversed(blocks))
        return self.land()

    def agent(self, name: str, length: int, step: float, probability: float = 1.0) -> None:
        """Run an agent, whose fixed prompt is needed again in so many steps, and is known as that."""
        self.turn(name, length, step)
        self.loads._forget(name)
        self.prompts.prompts[name], self.prompts.steps[name] = prompt(name, length), NextRun(step, probability)

    def land(self, ok: bool = True) -> None:
        land(self.tier, self.sent, ok)
        self.sent = []

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
        return cached_prefix(self.pool, prompt(name, length))


def test_a_session_that_comes_near_is_loaded_before_its_request() -> None:
    engine = Engine()
    engine.turn("c", 4, 50.0)
    evicted(engine.pool)
    assert engine.prefetch() == [] and not engine.loads._is_due, "it is far away"
    engine.set_step("c", 1.5)
    assert engine.loads._is_due and engine.prefetch(waiting=True) == [], "a request waits"
    assert engine.prefetch() == ["c"]
    engine.land()
    assert engine.on_device("c", 4) == 4
    assert engine.prefetch() == []
    engine.set_step("c", 1.4)
    assert not engine.loads._is_due, "it is on the device"


def test_near_sessions_and_agents_are_loaded_soonest_first() -> None:
    engine = Engine()
    engine.agent("aX", 3, 0.7)
    for name, step in (("c", 1.0), ("d", 0.5), ("e", 2.5)):
        engine.turn(name, 4, step)
    evicted(engine.pool)
    assert engine.prefetch(slots=1) == ["d"]
    assert engine.prefetch() == ["aX", "c"], "the other is outside of the window"


def test_an_agent_that_is_unlikely_to_run_replaces_nothing_that_is_needed() -> None:
    engine = Engine()
    engine.agent("c", 6, 1.0, probability=0.4)
    evicted(engine.pool)
    engine.turn("d", 12, 9.0)
    assert engine.prefetch() == []
    engine.prompts.steps["c"] = NextRun(1.0, 0.6)
    assert engine.prefetch() == ["c"]


def test_nothing_is_loaded_while_lru_rules_or_outside_of_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    engine.turn("c", 4, 1.0)
    evicted(engine.pool)
    engine.trusted = False
    assert engine.prefetch() == []
    engine.trusted = True
    monkeypatch.setattr(host_loads, "PREFETCH_WINDOW", -1.0)
    assert engine.prefetch() == []


def test_a_block_that_is_computed_while_it_is_loaded_is_owned_by_both() -> None:
    engine = Engine()
    engine.turn("aX", 1, 1.0)
    evicted(engine.pool)
    assert engine.prefetch() == ["aX"]
    engine.turn("aY", 1, 9.0)  # the load lands after aY has computed the same block
    evicted(engine.pool)
    assert engine.prefetch() == ["aX"]


def test_an_empty_host_is_not_looked_at() -> None:
    engine = Engine()
    engine.turn("c", 4, 1.0)
    evicted(engine.pool)
    engine.loads.clear()
    assert engine.prefetch() == [] and not engine.loads._histories


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
        evicted(self.engine.pool, blocks)

    @rule(slots=st.integers(0, 6))
    def prefetch(self, slots: int) -> None:
        engine = self.engine
        lengths = {str(name): len(hashes) for name, hashes in engine.loads._histories.items()}
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
        for name, hashes in engine.loads._histories.items():
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
        engine.loads.check_integrity()
        engine.queue.check_integrity()
        engine.tier.queue.check_integrity()


TestPrefetches = Prefetches.TestCase
TestPrefetches.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# requests that wait ---------------------------------------------------------------------------------------------------

SOONER = SimpleNamespace(step=-0.5, varying=False)
"""A free block of a waiting request that goes before the others"""


class Tier:
    """The host has everything. It notes the first block of each load, and whether that may evict `SOONER`."""

    def __init__(self) -> None:
        queue = SimpleNamespace(has_step=lambda _: True, step_of=lambda _: -0.25)
        self.host, self.counters = SimpleNamespace(num_gpu_blocks=100), Counter[str]()
        self.device = SimpleNamespace(num_gpu_blocks=100, free_block_queue=queue)
        self.loaded: list[tuple[str, bool]] = []
        self.under_way: set[str] = set()
        self.has_room, self.pays = True, True

    @property
    def loads(self) -> int:
        return len(self.under_way)

    @property
    def busy(self) -> bool:
        return bool(self.under_way)

    def next_load(self, hashes: list[str], block: int) -> tuple[Any, bool]:
        return SimpleNamespace(demanded=False) if hashes[block] in self.under_way else None, True

    def extent(self, hashes: list[str]) -> tuple[int, int]:
        return 0, len(hashes)

    def load_pays(self, _: int) -> bool:
        return self.pays

    def load(self, hashes: list[str], _purpose: Any, _owner: Any, may_evict: Any) -> Any:
        if not self.has_room:
            return None
        self.loaded.append((hashes[0], may_evict(SOONER)))
        self.under_way.add(hashes[0])
        return SimpleNamespace()


class World:
    """The policy of loads on a clock, with three requests that wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.tier = 0.0, Tier()
        monkeypatch.setattr(host_loads, "time", SimpleNamespace(monotonic=lambda: self.now))
        settings = TierSettings(host_memory="10 blocks")
        prompts: Any = SimpleNamespace(prompts={}, steps={})
        self.policy = HostLoads(self.tier, prompts, settings, SIZE)  # type: ignore[arg-type]
        self.requests = [self.request(name) for name in "abc"]

    @staticmethod
    def request(name: str) -> LiveRequest:
        asked: Any = SimpleNamespace(num_tokens=40, num_prompt_tokens=40, block_hashes=[f"{name}0", f"{name}1"])
        turn: Any = SimpleNamespace(session=name)
        return LiveRequest(asked, turn=turn)

    def step(self, order: str, idle: bool = False) -> str:
        """vLLM comes to these requests in this order. Returns those that wait."""
        named = {str(live.session): live for live in self.requests}
        waits = [name for name in order if self.policy.must_wait(named[name], 0)]
        self.policy._demand(idle)
        return "".join(waits)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_loads_go_in_the_order_of_service_and_only_the_first_may_evict_what_is_needed_sooner(world: World) -> None:
    assert world.step("bca") == "bca"
    assert world.tier.loaded == [("b0", True), ("c0", False)], "as many at once as `COPY_JOBS`"
    world.tier.under_way.clear()
    assert world.step("a") == "a" and world.tier.loaded[2:] == [("a0", True)]


def test_a_request_behind_others_does_not_lose_its_patience(world: World) -> None:
    world.tier.has_room = False
    for _ in range(5):
        assert "ca" in world.step("bca")
        world.now += 8.0
    assert [live.computes for live in world.requests] == [False, True, False], "only the first has waited for room"


def test_who_waits_for_a_load_too_long_computes(world: World) -> None:
    world.step("a")
    assert world.step("a") == "a"
    world.now = 10.1
    assert world.step("a") == "" and world.requests[0].computes


def test_the_first_computes_when_there_is_no_room_for_long_or_nothing_else_to_do(world: World) -> None:
    world.tier.has_room = False
    assert world.step("ab") == "ab"
    world.now = 10.1
    assert world.step("ab") == "ab" and [live.computes for live in world.requests] == [True, False, False]
    world.step("b", idle=True)
    assert world.requests[1].computes, "an idle engine waits for nothing"


def test_blocks_that_are_evicted_again_are_loaded_again_but_not_for_ever(world: World) -> None:
    for _ in range(5):
        assert world.step("a") == world.step("a") == "a"
        world.tier.under_way.clear()
        world.now += 2.1
    world.step("a")
    assert world.step("a") == "" and len(world.tier.loaded) == 6


def test_a_load_that_does_not_pay_is_not_waited_for_but_a_prefetch_under_way_is(world: World) -> None:
    world.tier.pays = False
    assert world.step("a") == "a" and world.step("a") == "" and not world.tier.loaded
    world.tier.under_way = {"a0"}
    assert world.step("a") == "a"
