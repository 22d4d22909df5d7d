"""vLLM's waiting requests in the order of service: as its own where all fits, and on a real engine past that."""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from kedge.integrations.vllm.plugin import scheduler
from kedge.integrations.vllm.plugin.scheduler import StepScheduler
from tests.integrations.vllm.conftest import BLOCK, Driver, driver, prompt


@dataclass(eq=False)
class Call:
    """Of a request what the order of service looks at."""

    request_id: str
    block_hashes: list[int] = field(default_factory=list)
    num_tokens: int = 10
    num_output_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING


class Vllms(Scheduler):
    """Of vLLM's scheduler what queues and admits requests."""

    def __init__(self, **parts: Any) -> None:
        self.policy, self.waiting, self.deferred_waiting = SchedulingPolicy.FCFS, FCFSRequestQueue(), set[Any]()
        self.requests, self.running, self.current_step = dict[str, Any](), list[Any](), 0
        self.num_waiting_for_streaming_input = 0
        self.max_num_scheduled_tokens = self.max_num_active_reqs = 1000
        self.skips: set[str] = set()
        """Requests that are not ready"""
        vars(self).update(parts)

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def schedule(self, most: int = 1000) -> Any:
        self.current_step += 1
        skipped, started = deque[Any](), list[Any]()
        while self.waiting and len(started) < most:
            one = self.waiting.pop_request()
            if one.request_id in self.skips:
                self.deferred_waiting.add(one)
                skipped.appendleft(one)
            else:
                self.deferred_waiting.discard(one)
                started.append(one)
        self.running += started
        self.waiting.prepend_requests(skipped)
        new = [SimpleNamespace(req_id=one.request_id) for one in started]
        return SimpleNamespace(total_num_scheduled_tokens=0, num_scheduled_tokens={}, scheduled_new_reqs=new)

    def preempt(self, request: Any) -> None:
        self.running.remove(request)
        self.waiting.prepend_request(request)

    def finish(self, request: Any) -> None:
        self.running = [one for one in self.running if one is not request]
        self.waiting.remove_requests([request])
        self.deferred_waiting.discard(request)
        self._free_request(self.requests.pop(request.request_id))

    def _free_request(self, _: Any) -> None:
        pass


class Sorted(StepScheduler, Vllms):
    """Room for `capacity` tokens; `cached` and `on_host` are the blocks of both tiers."""

    def __init__(self, capacity: int = 0) -> None:
        self.cached, self.on_host, self.orders = set[int](), set[int](), list[list[str]]()
        self.judged, self.free, self.holes = list[str](), 0, tuple[range, ...]()
        lanes = SimpleNamespace(is_wanted=False, prefills=(), take=lambda: ({}, []))
        connector = SimpleNamespace(
            open_lanes=lambda _: None, judge_at_once=lambda one: self.judged.append(one.request_id),
            translations=SimpleNamespace(lanes=lanes, able=set()), cached_blocks=self.blocks, requests=self,
            on_order=lambda order: self.orders.append([one.request_id for one in order]),
            sessions=SimpleNamespace(ledger=SimpleNamespace(tracker=SimpleNamespace(returning=1.0))),
        )  # fmt: skip
        pool = SimpleNamespace(num_gpu_blocks=capacity, get_num_free_blocks=lambda: self.free)
        manager = SimpleNamespace(block_pool=pool, reasoner_cls=None)
        super().__init__(connector=connector, kv_cache_manager=manager, structured_output_manager=manager, block_size=1)

    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(session=None, holes=self.holes, awaits=name == "w")

    def blocks(self, hashes: list[int]) -> tuple[int, int]:
        """Return how many leading blocks are on the device, and how many after them on the host."""
        device = sum(1 for _ in itertools.takewhile(self.cached.__contains__, hashes))
        return device, sum(1 for _ in itertools.takewhile(self.on_host.__contains__, hashes[device:]))

    def add(self, *calls: Call) -> None:
        for one in calls:
            self.add_request(one)

    def step(self, most: int = 0) -> str:
        """Return what starts in a step with room for so many."""
        before = len(self.running)
        self.schedule(most)
        return " ".join(one.request_id for one in self.running[before:])


def names(vllm: Any) -> list[str]:
    return [one.request_id for one in vllm.waiting]


ROOMS = [(35, 4, [], "a w b"), (40, 4, [], "a w b c"), (40, 1, [], "a"), (9, 4, [], "a"), (40, 0, [], "")]
FULL = [(40, 4, [range(2)] * 2, "a w b"), (40, 4, [range(600)], "a w b")]


@pytest.mark.parametrize(("free", "rows", "holes", "judged"), [*ROOMS, *FULL])
def test_before_a_step_those_are_judged_that_may_start(free: int, rows: int, holes: list[range], judged: str) -> None:
    """The first in any case, as part of it may be cached. A hole takes a row and tokens, unless base KV is awaited."""
    vllm = Sorted()
    vllm.free, vllm.max_num_active_reqs, vllm.holes = free, rows, tuple(holes)
    loading = Call("loading", [], 99, status=RequestStatus.WAITING_FOR_REMOTE_KVS)
    vllm.add(loading, Call("a", [], 20), Call("w", [], 0), Call("b"), Call("c"))
    vllm.step()
    assert " ".join(vllm.judged) == judged and vllm.connector.translations.able == set(vllm.judged)


def test_what_is_cached_goes_first_where_live_contexts_do_not_fit() -> None:
    vllm = Sorted(100)
    vllm.cached, vllm.on_host = {1, 2, 3}, {4}
    vllm.add(Call("evicted", [7, 8, 9], 40), Call("host", [4], 10), Call("cached", [1, 2, 3], 40))
    vllm.step()
    assert names(vllm) == ["evicted", "host", "cached"] and not vllm.orders
    vllm.add(Call("new", [], 40))
    for _ in range(2):
        vllm.step()
    assert names(vllm) == ["cached", "host", "evicted", "new"]
    assert vllm.orders == [names(vllm)], "passed on once"
    vllm.finish(vllm.requests["new"])
    vllm.step()
    assert names(vllm) == ["evicted", "host", "cached"], "all fits again"


def test_who_was_preempted_or_skipped_goes_before_all_others_in_their_order() -> None:
    vllm = Sorted()
    vllm.cached, vllm.skips = {1}, {"a", "b"}
    vllm.add(Call("a", [5]), Call("b", [6]), Call("c", [1]))
    assert vllm.step(9) == "c" and names(vllm) == ["a", "b"]
    vllm.preempt(vllm.requests["c"])
    vllm.add(Call("d", [1]))
    vllm.step()
    assert names(vllm) == ["c", "a", "b", "d"]


def test_what_may_not_start_holds_up_those_behind_it_but_not_what_comes_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "may_start", lambda _, missing, *__: missing < 0.5)
    vllm, roomy = Sorted(), Sorted(1000)
    vllm.cached = {1}
    vllm.add(Call("cold", [5]))
    assert vllm.step(9) == "" and names(vllm) == ["cold"], "it waits, and is not lost"
    vllm.add(Call("cached", [1]), Call("colder", [7]))
    assert vllm.step(9) == "cached"
    vllm.preempt(vllm.requests["cached"])
    assert vllm.step(9) == "cached" and names(vllm) == ["cold", "colder"]
    roomy.add(Call("cold", [5]))
    assert roomy.step(9) == "cold", "without overload everything may start"


def test_those_that_start_in_a_step_count_for_those_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "may_start", lambda tokens, _, running, *__: running + tokens <= 25)
    vllm = Sorted()
    vllm.add(*(Call(name, [at]) for at, name in enumerate("abc")))
    assert vllm.step(9) == "a b" and names(vllm) == ["c"]


class AgainstVllms(RuleBasedStateMachine):
    """Where all fits, vLLM's own scheduler does the same; where nothing fits, the same requests wait."""

    capacity = 10**9

    def __init__(self) -> None:
        super().__init__()
        self.mine, self.twin, self.number = Sorted(self.capacity), Vllms(), 0

    @rule(blocks=st.lists(st.integers(0, 9), max_size=4))
    def add(self, blocks: list[int]) -> None:
        self.number += 1
        call = Call(f"{self.number}", blocks)
        self.mine.add_request(call)  # type: ignore[arg-type]
        self.twin.add_request(call)

    @rule(cached=st.sets(st.integers(0, 9)), data=st.data())
    def step(self, cached: set[int], data: st.DataObject) -> None:
        self.mine.cached, most = cached, data.draw(st.integers(0, 3))
        self.mine.skips = self.twin.skips = data.draw(st.sets(st.sampled_from(names(self.twin) or ["none"])))
        self.mine.schedule(most)
        if self.capacity:
            self.twin.schedule(most)
        self.twin.waiting.remove_requests(self.mine.running)
        self.twin.running = list(self.mine.running)

    @precondition(lambda self: self.mine.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.mine.running))
        for one in (self.mine, self.twin):
            one.preempt(call)

    @precondition(lambda self: self.mine.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(list(self.mine.requests.values())))
        for one in (self.mine, self.twin):
            one.finish(call)

    @invariant()
    def the_same_wait(self) -> None:
        mine, theirs = names(self.mine), names(self.twin)
        assert mine == theirs if self.capacity else sorted(mine) == sorted(theirs)
        assert len(self.mine._contexts) == len(self.mine.requests) and len(self.mine._order) <= len(mine)


class WithoutRoom(AgainstVllms):
    """All is overload."""

    capacity = 0


TestAgainstVllms = AgainstVllms.TestCase
TestWithoutRoom = WithoutRoom.TestCase


# a real engine --------------------------------------------------------------------------------------------------------

SESSIONS, TURNS, FIRST = 6, 6, 6 * BLOCK


@pytest.fixture(scope="module", params=[pytest.param("make_scheduler", marks=pytest.mark.slow), "AsyncStepScheduler"])
def flow(tiny_llama: Path, request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Room for about three of six sessions, one of which runs at a time."""
    scheduler = f"kedge.integrations.vllm.plugin.scheduler.{request.param}"
    with driver(tiny_llama, num_gpu_blocks_override=41, max_num_seqs=1, scheduler_cls=scheduler) as built:
        yield built


@pytest.fixture(scope="module")
def stock(tiny_llama: Path) -> tuple[dict[tuple[int, int], list[int]], int]:
    with driver(tiny_llama, plugged=False, num_gpu_blocks_override=41, max_num_seqs=1) as plain:
        return closed_loop(plain)


def closed_loop(engine: Driver) -> tuple[dict[tuple[int, int], list[int]], int]:
    """Every session asks its next turn as soon as its last one is answered. Returns answers and tokens that hit."""
    answers: dict[tuple[int, int], list[int]] = {}
    waiting = {engine.add(turn(session, 0)): (session, 0) for session in range(SESSIONS)}
    hits = 0
    while waiting:
        engine.run(until=lambda: any(name in engine.finished for name in waiting))
        for name in [name for name in waiting if name in engine.finished]:
            session, number = waiting.pop(name)
            output = engine.finished[name]
            answers[session, number] = list(output.outputs[0].token_ids)
            hits += output.num_cached_tokens
            if number + 1 < TURNS:
                waiting[engine.add(turn(session, number + 1))] = (session, number + 1)
    engine.run()
    return answers, hits


def turn(session: int, number: int) -> list[int]:
    return prompt(FIRST + TURNS * BLOCK, 77 + session)[: FIRST + number * BLOCK]


def test_sessions_past_the_cliff_hit_more_and_answer_the_same(
    stock: tuple[dict[tuple[int, int], list[int]], int], flow: Driver
) -> None:
    flow.reset()
    answers, hits = closed_loop(flow)
    assert answers == stock[0]
    assert hits > 2 * stock[1] + SESSIONS * FIRST
    flow.check_rest()
