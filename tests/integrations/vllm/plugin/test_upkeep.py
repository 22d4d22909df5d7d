"""What is put off until a pass: whatever is decided before it is as with all of it done at once."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.request import RequestStatus

from kedge.integrations.vllm.plugin.block_pools import leading_blocks
from kedge.integrations.vllm.plugin.scheduler_side import Upkeep
from tests.integrations.vllm.plugin.test_session_histories import ABORTED, STOPPED, Engine, chain

NAMES = ("a", "ab", "abc", "b", "c", "cd")


def test_tasks_are_carried_out_at_once_until_somebody_promises_to_catch_up() -> None:
    upkeep, done = Upkeep(), list[int]()
    upkeep.put_off(lambda: done.append(1))
    upkeep.is_open = True
    upkeep.put_off(lambda: done.append(2))
    upkeep.put_off(lambda: done.append(3))
    assert done == [1]
    upkeep.catch_up()
    upkeep.catch_up()
    assert done == [1, 2, 3]


def test_blocks_with_kv_are_not_handed_out_before_what_was_put_off() -> None:
    engine, done = Engine(), list[int]()
    engine.upkeep.is_open = True
    engine.turn(chain("a", 8))
    engine.upkeep.put_off(lambda: done.append(1))
    engine.pool.get_new_blocks(32)
    assert not done, "nothing was evicted"
    engine.pool.get_new_blocks(1)
    assert done == [1]


def owners(engine: Engine) -> list[Any]:
    """Return the owners of each block."""
    return [engine.queue.set_of[block.block_id].owners for block in engine.pool.blocks]


class Twins(RuleBasedStateMachine):
    """One engine does everything at once, the other puts off what it may."""

    def __init__(self) -> None:
        super().__init__()
        self.engines = (Engine(), Engine())
        self.engines[1].upkeep.is_open = True
        self.waiting: list[str] = []
        self.asked: dict[str, tuple[Any, ...]] = {}

    @rule(name=st.sampled_from(NAMES), length=st.integers(0, 12))
    def arrive(self, name: str, length: int) -> None:
        pair = tuple(engine.request(chain(name, length)) for engine in self.engines)
        self.waiting.append(pair[0].request_id)
        self.asked[pair[0].request_id] = pair

    @precondition(lambda self: self.waiting)
    @rule()
    def admit(self) -> None:
        pair = self.asked[self.waiting[0]]
        cached = [engine.admit(asked) for engine, asked in zip(self.engines, pair, strict=True)]
        assert cached[0] == cached[1]
        if cached[0] >= 0:
            self.waiting.pop(0)

    @precondition(lambda self: self.engines[0].running)
    @rule(data=st.data(), status=st.sampled_from([STOPPED, ABORTED]), share=st.floats(0, 1))
    def end(self, data: st.DataObject, status: RequestStatus, share: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.engines[0].running)))
        length = len(self.engines[0].running[name][1])
        for engine in self.engines:
            engine.end(name, status, length if status is STOPPED else int(share * length))

    @rule(seconds=st.sampled_from([0.0, 0.1, 3.0, 500.0, 1e6]))
    def step(self, seconds: float) -> None:
        for engine in self.engines:
            engine.upkeep.catch_up()
            engine.now += seconds
            engine.sessions.advance()

    @invariant()
    def alike(self) -> None:
        at_once, later = self.engines
        for name in NAMES:
            cached = [len(leading_blocks(engine.pool, chain(name, 12))) for engine in self.engines]
            assert cached[0] == cached[1]
        later.queue.check_integrity()
        if not later.upkeep._tasks:
            assert owners(at_once) == owners(later)


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
