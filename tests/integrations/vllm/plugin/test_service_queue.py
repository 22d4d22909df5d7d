"""vLLM's waiting queue in the order of service: as its own where all fits, and on a real engine past that."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.integrations.vllm.plugin.service_queue import MAX_SESSIONS, CachedFirstQueue, RequestContexts, missing_of
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

    def get_cached_block(self, block: int, groups: list[int]) -> list[int] | None:  # noqa: ARG002
        return [block] if block in self.cached else None


@dataclass
class World:
    """A queue with room for 100 tokens, and a scheduler's step."""

    pool: Pool = field(default_factory=Pool)
    step: int = 0
    now: float = 0.0

    def queue(self, capacity: int = 100) -> Any:
        return CachedFirstQueue(cast(Any, self.pool), capacity, lambda: self.step, lambda: self.now)


def names(queue: Any) -> list[str]:
    return [one.request_id for one in queue]


def test_what_is_cached_goes_first_where_live_contexts_do_not_fit() -> None:
    world = World(Pool({1, 2, 3}))
    queue = world.queue()
    queue.add_request(Call("evicted", [7, 8, 9], 40))
    queue.add_request(Call("cached", [1, 2, 3], 40))
    assert names(queue) == ["evicted", "cached"]
    queue.add_request(Call("new", [], 40))
    assert names(queue) == ["cached", "evicted", "new"]


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


def test_a_prefix_is_found_by_its_end() -> None:
    for cached in range(9):
        assert missing_of(cast(Any, Pool(set(range(cached)))), cast(Any, Call("a", list(range(8))))) == 1 - cached / 8
    assert missing_of(cast(Any, Pool()), cast(Any, Call("a"))) == 1.0


def test_a_session_is_one_context_however_often_it_returns() -> None:
    now = 0.0
    contexts = RequestContexts(lambda: now)
    for turn in range(1, 6):
        call = cast(Any, Call(f"{turn}", list(range(2 * turn)), 20 * turn))
        contexts.began(call)
        contexts.began(call)
        assert contexts.tokens() == 20 * turn
        contexts.ended(call)
        contexts.ended(call)
        assert (contexts.tokens(), len(contexts)) == (20 * turn, 0)
    now = 1000.0
    assert contexts.tokens() == 0


def test_memory_of_sessions_is_bounded() -> None:
    contexts = RequestContexts(lambda: 0.0)
    for number in range(2 * MAX_SESSIONS):
        call = cast(Any, Call(f"{number}", [3 * number, 3 * number + 1, 3 * number + 2]))
        contexts.began(call)
        contexts.ended(call)
    assert len(contexts._sizes) == len(contexts._links._marks) == MAX_SESSIONS
    assert contexts.tokens() == 10 * MAX_SESSIONS


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
            self.queue.contexts.ended(call)

    @precondition(lambda self: self.twin)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        calls = data.draw(st.lists(st.sampled_from(list(self.twin)), unique=True))
        self.queue.remove_requests(calls)
        self.twin.remove_requests(calls)
        for call in calls:
            self.queue.contexts.ended(call)

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


@pytest.fixture(scope="module", params=["make_scheduler", "AsyncStepScheduler"])
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
