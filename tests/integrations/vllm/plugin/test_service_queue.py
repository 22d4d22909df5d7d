"""vLLM's waiting queue in the order of service: as its own where all fits, and on a real engine past that."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kedge.integrations.vllm.plugin.scheduler import CachedFirstQueue, missing_of
from tests.integrations.vllm.conftest import BLOCK, Driver, driver, prompt


@dataclass(eq=False)
class Call:
    """Of a request what the queue looks at."""

    request_id: str
    block_hashes: list[int] = field(default_factory=list)
    num_tokens: int = 10


@dataclass
class Pool:
    """Of a pool of blocks what the queue looks at."""

    cached: set[int] = field(default_factory=set)
    on_host: set[int] = field(default_factory=set)

    def blocks(self, hashes: list[int]) -> tuple[int, int]:
        """Return how many leading blocks are on the device, and how many after them on the host."""
        device = sum(1 for _ in itertools.takewhile(self.cached.__contains__, hashes))
        return device, sum(1 for _ in itertools.takewhile(self.on_host.__contains__, hashes[device:]))


class Queue(CachedFirstQueue):
    """The queue of a scheduler, which begins the context of every request that it adds."""

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        self.contexts.began(request.request_id, None, request.num_tokens)


@dataclass
class World:
    """A queue with room for 100 tokens, and a scheduler's step."""

    pool: Pool = field(default_factory=Pool)
    step: int = 0
    now: float = 0.0
    orders: list[Any] = field(default_factory=list)
    """The orders that were passed on"""
    holds_back: float = 2.0
    """The missing share from which on requests do not start"""

    def queue(self, capacity: int = 100) -> Any:
        return Queue(
            cast(Any, lambda hashes: self.pool.blocks(hashes)), capacity, lambda: self.step, self.orders.append,
            lambda _, missing: missing < self.holds_back, lambda: self.now,
        )  # fmt: skip


def names(queue: Any) -> list[str]:
    return [one.request_id for one in queue]


def test_what_is_cached_goes_first_where_live_contexts_do_not_fit() -> None:
    world = World(Pool({1, 2, 3}, {4}))
    queue = world.queue()
    queue.add_request(Call("evicted", [7, 8, 9], 40))
    queue.add_request(Call("host", [4], 10))
    queue.add_request(Call("cached", [1, 2, 3], 40))
    assert names(queue) == ["evicted", "host", "cached"]
    queue.add_request(Call("new", [], 40))
    assert names(queue) == ["cached", "host", "evicted", "new"]


def test_what_was_peeked_at_is_popped_though_the_cache_has_changed() -> None:
    world = World(Pool({1}))
    queue = world.queue(0)
    queue.add_request(Call("a", [2]))
    queue.add_request(Call("b", [1]))
    assert queue.peek_request().request_id == "b"
    world.pool.cached, world.step = {2}, 1
    assert queue.pop_request().request_id == "b"
    assert queue.pop_request().request_id == "a"
    with pytest.raises(IndexError):
        queue.pop_request()


def test_who_was_preempted_or_skipped_goes_before_all_others_in_their_order() -> None:
    world = World(Pool({1}))
    queue = world.queue(0)
    for name, block in (("a", 5), ("b", 6), ("c", 1)):
        queue.add_request(Call(name, [block]))
    skipped: deque[Call] = deque()
    for _ in range(2):
        queue.peek_request()
        skipped.appendleft(queue.pop_request())
    queue.prepend_requests(skipped)
    queue.prepend_request(Call("preempted"))
    assert names(queue) == ["preempted", "c", "a", "b"]
    queue.remove_requests([skipped[0], Call("unknown")])
    assert (names(queue), len(queue), bool(queue)) == (["preempted", "c", "b"], 3, True)


def test_what_may_not_start_holds_up_those_behind_it_but_not_what_comes_before_it() -> None:
    world = World(Pool({1}), holds_back=0.5)
    queue = world.queue(0)
    queue.add_request(Call("cold", [5]))
    assert (bool(queue), len(queue), names(queue)) == (False, 1, ["cold"])
    with pytest.raises(IndexError):
        queue.peek_request()
    queue.add_request(Call("cached", [1]))
    assert queue.pop_request().request_id == "cached"
    assert not queue
    queue.prepend_request(Call("preempted", [6]))
    assert queue.pop_request().request_id == "preempted"
    world.holds_back = 2.0
    assert queue.pop_request().request_id == "cold"
    roomy = World(holds_back=0.0).queue(capacity=1000)
    roomy.add_request(Call("cold", [5]))
    assert roomy.pop_request().request_id == "cold", "without overload everything may start"


def test_what_is_on_neither_tier_is_missing() -> None:
    def missing(pool: Pool, hashes: list[int]) -> float:
        return missing_of(cast(Any, Call("a", hashes)), cast(Any, pool.blocks))

    assert [missing(Pool(set(range(cached))), list(range(8))) for cached in (0, 2, 8)] == [1.0, 0.75, 0.0]
    assert missing(Pool(), []) == 1.0
    assert missing(Pool({0, 1}, set(range(8))), list(range(8))) == pytest.approx(0.1 * 6 / 8)


def test_the_order_is_passed_on_when_it_changes_under_overload() -> None:
    world = World(Pool({1}))
    queue = world.queue(0)
    queue.add_request(Call("a", [2]))
    queue.add_request(Call("b", [1]))
    for _ in range(2):
        queue.peek_request()
    assert [[one.request_id for one in order] for order in world.orders] == [["b", "a"]]


class AgainstVllms(RuleBasedStateMachine):
    """Where all fits, vLLM's own queue does the same; where nothing fits, the same requests wait."""

    capacity = 10**9

    def __init__(self) -> None:
        super().__init__()
        from vllm.v1.core.sched.request_queue import FCFSRequestQueue

        self.world, self.twin = World(), cast(Any, FCFSRequestQueue())
        self.queue = self.world.queue(self.capacity)
        self.number = 0

    @rule(blocks=st.lists(st.integers(0, 9), max_size=4))
    def add(self, blocks: list[int]) -> None:
        self.number += 1
        call = Call(f"{self.number}", blocks)
        self.queue.add_request(call)
        self.twin.add_request(call)

    @rule(cached=st.sets(st.integers(0, 9)))
    def take_a_step(self, cached: set[int]) -> None:
        self.world.pool.cached = cached
        self.world.step += 1

    @precondition(lambda self: self.twin)
    @rule(comes_back=st.booleans())
    def pop(self, comes_back: bool) -> None:
        call = self.queue.peek_request()
        assert self.queue.pop_request() is call
        self.twin.remove_request(call)
        if comes_back:
            self.queue.prepend_request(call)
            self.twin.prepend_request(call)
        else:
            self.queue.contexts.ended(call.request_id, call.num_tokens)

    @precondition(lambda self: self.twin)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        calls = data.draw(st.lists(st.sampled_from(list(self.twin)), unique=True))
        self.queue.remove_requests(calls)
        self.twin.remove_requests(calls)
        for call in calls:
            self.queue.contexts.ended(call.request_id, call.num_tokens)

    @invariant()
    def the_same_wait(self) -> None:
        mine, theirs = names(self.queue), names(self.twin)
        assert sorted(mine) == sorted(theirs) and len(self.queue) == len(theirs) and bool(self.queue) == bool(theirs)
        assert len(self.queue.contexts) == len(theirs)
        if self.capacity:
            assert mine == theirs


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
    contexts = flow.scheduler.waiting.contexts
    assert len(contexts) == 0 and not flow.scheduler.waiting


def test_aborts_leave_nothing_behind(flow: Driver) -> None:
    flow.reset()
    names = [flow.add(turn(session, 2)) for session in range(SESSIONS)]
    flow.step()
    flow.engine.abort_request(names[::2])
    flow.run()
    assert all(name in flow.finished for name in names[1::2])
    assert len(flow.scheduler.waiting.contexts) == 0
    assert flow.pool.get_num_free_blocks() == flow.pool.num_gpu_blocks - 1
