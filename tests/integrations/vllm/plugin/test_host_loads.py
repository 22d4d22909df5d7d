"""Loads from the host: which, in which order, over what and how long a request waits; and prefetches by forecast."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kedge.cache import Copied, Copy
from kedge.cache.copies import Purpose
from kedge.integrations.vllm.plugin import host_loads
from kedge.integrations.vllm.plugin.block_pools import cached_block, cached_prefix, leading_blocks
from kedge.integrations.vllm.plugin.host_loads import HostLoads
from kedge.integrations.vllm.plugin.host_tier import HostTier
from kedge.integrations.vllm.plugin.requests import LiveRequest
from kedge.policies.prefetch import is_within
from kedge.settings import TierSettings
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
        self.prompts = SimpleNamespace(prompts={})
        self.loads = HostLoads(self.tier, self.prompts, self.settings, SIZE, lambda: self.trusted)  # type: ignore[arg-type]
        self.steps: dict[str, float] = {}
        self.sent: list[Copy] = []

    def set_step(self, name: str, step: float | None, probability: float = 1.0) -> None:
        if step is None:
            self.steps.pop(name, None)
        else:
            self.steps[name] = step
        self.queue.owners.on_forecast({name: None if step is None else (step, probability)})

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
        self.loads.finished(name, hashes)  # type: ignore[arg-type]
        self.pool.free_blocks(reversed(blocks))
        return self.land()

    def agent(self, name: str, length: int, step: float, probability: float = 1.0) -> None:
        """Run an agent, whose fixed prompt is needed again in so many steps, and is known as that."""
        self.turn(name, length, step)
        self.loads._forget(name)
        self.prompts.prompts[name] = prompt(name, length)
        self.set_step(name, step, probability)

    def land(self, ok: bool = True) -> None:
        land(self.tier, self.sent, ok)
        self.sent = []

    def prefetch(self, slots: int = 4, *, waiting: bool = False) -> list[str]:
        """Order prefetches; the first blocks' owners, in order."""
        before = set(self.tier.transfers.pending())
        self.loads.look_again()
        live: Any = SimpleNamespace(may_load=True, is_admitted=not waiting, session=None)
        self.loads.prefetcher.jobs = sum(one.purpose is Purpose.PREFETCH for one in before) + slots
        self.sent += self.loads.copies([live], idle=False)
        return [str(one.owner) for one in self.tier.transfers.pending() if one not in before]

    def on_device(self, name: str, length: int) -> int:
        return cached_prefix(self.pool, prompt(name, length))


def test_a_session_that_comes_near_is_loaded_before_its_request() -> None:
    engine = Engine()
    engine.turn("c", 4, 50.0)
    evicted(engine.pool)
    assert engine.prefetch() == [] and not engine.loads.prefetcher.due, "it is far away"
    engine.set_step("c", 1.5)
    assert engine.loads.prefetcher.due and engine.prefetch(waiting=True) == [], "a request waits"
    engine.trusted = False
    assert engine.prefetch() == [], "LRU rules"
    engine.trusted = True
    assert engine.prefetch() == ["c"]
    engine.land()
    assert engine.on_device("c", 4) == 4
    assert engine.prefetch() == []
    engine.set_step("c", 1.4)
    assert not engine.loads.prefetcher.due, "it is on the device"
    evicted(engine.pool)
    engine.loads.clear()
    assert engine.prefetch() == [] and not engine.loads._histories, "the host is empty"
    engine.loads.check_integrity()


def test_a_history_is_backed_up_as_it_grows_and_what_it_leaves_out_is_not_its_own() -> None:
    engine = Engine()
    for length in (3, 5, 5, 2):
        engine.turn("c", length, 1.0)
        assert engine.tier.queue.members_of("c") == length
    assert engine.tier.counters == {"blocks_offloaded": 5, "skipped_backups": 0}, "each once"
    found = leading_blocks(engine.tier.host, prompt("c", 5))
    assert [block.block_hash_num_tokens for block in found] == [SIZE * at for at in range(1, 6)]


def test_what_is_backed_up_in_part_goes_from_its_end_all_the_same() -> None:
    """As look-ups take it. Its beginning is held for longer."""
    engine = Engine()
    engine.turn("c", DEVICE, 1.0)
    for lost in (4, 8):
        evicted(engine.pool, lost)
        assert len(leading_blocks(engine.pool, prompt("c", DEVICE))) == engine.on_device("c", DEVICE) == DEVICE - lost


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
    engine.set_step("c", 1.0, 0.6)
    assert engine.prefetch() == ["c"]


def test_a_block_that_is_computed_while_it_is_loaded_is_owned_by_both() -> None:
    engine = Engine()
    engine.turn("aX", 1, 1.0)
    evicted(engine.pool)
    assert engine.prefetch() == ["aX"]
    engine.turn("aY", 1, 9.0)  # the load lands after aY has computed the same block
    evicted(engine.pool)
    assert engine.prefetch() == ["aX"]


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
            is_near = step >= 0 and is_within(step, engine.loads.prefetcher.window)
            if is_gone and is_near and name not in (*SHARING, *lost):
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


class Waiting(Engine):
    """Three requests that wait, on a clock. The host has their prompts, of two blocks, and the device none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now = 0.0
        monkeypatch.setattr(host_loads, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.tier.load_pays = lambda _: True  # type: ignore[method-assign]
        for name in "cde":
            self.turn(name, 2, 9.0)
        evicted(self.pool)
        self.requests = {name: self.request(name) for name in "cde"}

    @staticmethod
    def request(name: str) -> LiveRequest:
        tokens = 2 * SIZE + 1
        asked: Any = SimpleNamespace(num_tokens=tokens, num_prompt_tokens=tokens, block_hashes=prompt(name, 2))
        return LiveRequest(asked, turn=SimpleNamespace(session=name))  # type: ignore[arg-type]

    def step(self, order: str, idle: bool = False) -> str:
        """vLLM comes to these requests in this order. Returns those that wait."""
        waits = [name for name in order if self.loads.must_wait(self.requests[name], self.on_device(name, 2) * SIZE)]
        self.loads._demand(idle)
        self.sent += self.tier.take_copies()
        return "".join(waits)

    @property
    def under_way(self) -> list[str]:
        return [str(one.owner) for one in self.tier.transfers.pending()]

    @property
    def computing(self) -> str:
        return "".join(name for name, live in self.requests.items() if live.computes)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    return Waiting(monkeypatch)


def test_as_many_loads_go_at_once_as_copies_in_the_order_of_service(waiting: Waiting) -> None:
    assert waiting.step("dec") == "dec" and waiting.under_way == ["d", "e"]
    waiting.land()
    assert waiting.step("dec") == "c" and waiting.under_way == ["c"]
    waiting.land()
    assert waiting.step("dec") == "" and all(waiting.on_device(name, 2) == 2 for name in "cde")


def test_only_the_first_may_evict_what_is_needed_sooner(waiting: Waiting) -> None:
    waiting.turn("aX", DEVICE, -0.9)
    assert waiting.step("ced") == "ced" and waiting.under_way == ["c"]
    waiting.set_step("aX", 50.0)
    assert waiting.step("ced") == "ced" and waiting.under_way == ["c", "e"]


def test_a_request_behind_others_does_not_lose_its_patience(waiting: Waiting) -> None:
    waiting.pool.get_new_blocks(DEVICE)
    for _ in range(5):
        assert "ec" in waiting.step("dec")
        waiting.now += 8.0
    assert waiting.computing == "d", "only the first has waited for room"


def test_who_waits_for_a_load_too_long_computes(waiting: Waiting) -> None:
    waiting.step("c")
    assert waiting.step("c") == "c"
    waiting.now = 10.1
    assert waiting.step("c") == "" and waiting.computing == "c"


def test_without_room_an_idle_engine_waits_for_nothing(waiting: Waiting) -> None:
    waiting.pool.get_new_blocks(DEVICE)
    assert waiting.step("cd") == "cd" and waiting.computing == ""
    waiting.step("d", idle=True)
    assert waiting.computing == "d"


def test_blocks_that_are_evicted_again_are_loaded_again_but_not_for_ever(waiting: Waiting) -> None:
    for _ in range(5):
        assert waiting.step("c") == waiting.step("c") == "c"
        waiting.land()
        evicted(waiting.pool)
        waiting.now += 2.1
    waiting.step("c")
    assert waiting.step("c") == "" and waiting.computing == "c"


def test_what_cannot_be_loaded_is_computed_at_once_and_not_prefetched_without_end(waiting: Waiting) -> None:
    assert waiting.step("c") == "c" and waiting.step("c") == "c"
    waiting.land(ok=False)
    assert waiting.step("c") == "" and waiting.computing == "c"
    waiting.set_step("d", 1.0)
    assert waiting.prefetch() == ["d"]
    failed = Copied(waiting.sent.pop().copy_id, ok=False)
    waiting.loads.on_reports([failed], (0, 0.0))
    assert not waiting.loads.busy
    waiting.loads.look_again()
    assert waiting.loads.busy, "with the next request it is tried again"


def test_a_load_that_does_not_pay_is_not_waited_for_but_a_prefetch_under_way_is(waiting: Waiting) -> None:
    waiting.tier.load_pays = lambda _: False  # type: ignore[method-assign]
    assert waiting.step("c") == "c" and waiting.step("c") == "" and not waiting.under_way
    waiting.set_step("c", 1.0)
    assert waiting.prefetch() == ["c"] and waiting.step("c") == "c"
    waiting.land()
    assert waiting.tier.counters["prefetches_late"] == 1


def test_all_is_from_the_host_that_a_request_has_waited_for(waiting: Waiting) -> None:
    """A fixed prompt comes from its beginning on, then the rest."""
    for blocks in (1, 0, 1):
        assert waiting.loads.must_wait(waiting.requests["c"], blocks * SIZE)
    assert waiting.requests["c"].loaded == range(2 * SIZE + 1)
