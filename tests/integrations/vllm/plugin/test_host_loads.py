"""Which loads requests get, in which order, what these may evict, and how long a request waits."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.integrations.vllm.plugin import host_loads
from kedge.integrations.vllm.plugin.host_loads import HostLoads
from kedge.integrations.vllm.plugin.requests import LiveRequest
from kedge.settings import TierSettings

SIZE = 16
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


def test_a_load_that_does_not_pay_is_not_waited_for(world: World) -> None:
    world.tier.pays = False
    assert world.step("a") == "a" and world.step("a") == "" and not world.tier.loaded


def test_a_prefetch_under_way_is_waited_for_though_a_load_of_its_own_would_not_pay(world: World) -> None:
    world.tier.pays = False
    world.step("a")
    world.tier.under_way = {"a0"}
    assert world.step("a") == "a"
