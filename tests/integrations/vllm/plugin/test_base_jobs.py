"""Base prefills by lanes: which tokens, rows and blocks they take, and what becomes of every one of them."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kedge.integrations.vllm.plugin.lanes import NOTHING, BaseJobs, HeldBlocks, PassLimits
from kedge.integrations.vllm.plugin.messages import Capture
from kedge.reuse.lanes import LaneBudget
from kedge.types import Namespace

BLOCK, LIMIT, BLOCKS, MOST = 4, 40, 12, 3
HERE = Namespace("default")


class Stage:
    """Base prefills over a pool of vLLM's."""

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=BLOCK)
        self.held = HeldBlocks(1)
        self.held.pool = self.pool
        self.captures: list[Capture] = []
        self.jobs = BaseJobs(self.held, self.captures.append)
        self.jobs.open(PassLimits(LIMIT, 100, BLOCK), MOST)

    def step(self, tokens: int, rows: int = 1, spare: int = 0, *, idle: bool = False) -> list[range]:
        most = tokens if idle else tokens // 2
        taken = self.jobs.grant(LaneBudget(tokens, rows), spare, most=most, idle=idle)
        spans = [lane.span for lane in self.jobs.granted]
        assert taken == LaneBudget(sum(map(len, spans)), len(spans))
        return spans

    def report(self) -> None:
        for capture in self.captures:
            assert capture.capture_id is not None
            self.held.on_captured(capture.capture_id, 1)
        self.captures.clear()


def test_the_latest_goes_first_in_pieces_and_is_captured_with_the_last() -> None:
    stage = Stage()
    stage.jobs.add(HERE, (1,) * 10)
    stage.jobs.add(HERE, (2,) * 9)
    assert stage.step(12) == [range(6)] and not stage.captures
    stage.jobs.add(HERE, (2,) * 9)
    assert len(stage.jobs) == 2, "the one under way is not queued again"
    assert stage.step(12) == [range(6, 9)]
    (capture,) = stage.captures
    assert capture.request.tokens == (2,) * 9 and capture.request.namespace == HERE and len(capture.blocks) == 3
    assert stage.step(50, idle=True) == [range(10)]
    stage.report()
    assert stage.jobs.counters() == {"base_prefills_queued": 2, "base_prefills_done": 2}
    assert not stage.jobs and stage.pool.get_num_free_blocks() == BLOCKS


@pytest.mark.parametrize(("tokens", "rows", "spare"), [(1, 1, 0), (-4, 1, 0), (40, 0, 0), (40, 1, BLOCKS - 1)])
def test_without_room_beside_requests_they_wait(tokens: int, rows: int, spare: int) -> None:
    stage = Stage()
    stage.jobs.add(HERE, (1,) * 10)
    assert not stage.step(tokens, rows, spare) and len(stage.jobs) == 1
    assert stage.pool.get_num_free_blocks() == BLOCKS


def test_one_that_an_idle_engine_has_no_room_for_is_dropped() -> None:
    stage = Stage()
    blocks = stage.pool.get_new_blocks(BLOCKS - 1)
    stage.jobs.add(HERE, (1,) * 10)
    assert not stage.step(40, idle=True) and not stage.jobs, "else the engine would step for ever"
    stage.pool.free_blocks(blocks)
    assert stage.jobs.counters()["base_prefills_dropped"] == 1


def test_blocks_that_requests_need_are_given_up_after_the_pass() -> None:
    stage = Stage()
    stage.jobs.add(HERE, (1,) * 10)
    assert stage.step(4) == [range(2)]
    assert not stage.step(0, spare=BLOCKS) and not stage.jobs
    (capture,) = stage.captures
    assert capture.request is NOTHING and stage.pool.get_num_free_blocks() == BLOCKS - 3
    stage.report()
    assert stage.pool.get_num_free_blocks() == BLOCKS


def test_several_are_computed_in_a_step_as_far_as_it_goes() -> None:
    stage = Stage()
    for token in (1, 2, 3):
        stage.jobs.add(HERE, (token,) * 10)
    assert stage.step(25, rows=3, idle=True) == [range(10), range(10), range(5)]
    assert [capture.request.tokens[0] for capture in stage.captures] == [3, 2]


def test_what_a_request_waits_for_goes_first_and_takes_all_that_is_left() -> None:
    stage = Stage()
    stage.jobs.add(HERE, (1,) * 10)
    assert stage.step(4, rows=9) == [range(2)]
    for token in (2, 3):
        stage.jobs.add_awaited(HERE, (token,) * 10)
    stage.jobs.add(HERE, (4,) * 10)
    assert stage.step(14, rows=9) == [range(10), range(4)]
    (capture,) = stage.captures
    assert capture.request.tokens == (2,) * 10
    assert not stage.jobs.is_awaited(HERE, (2,) * 10) and stage.jobs.is_awaited(HERE, (3,) * 10)
    stage.jobs.add_awaited(HERE, (1,) * 10)
    assert stage.step(20, rows=9) == [range(4, 10), range(2, 10), range(6)], "one that was begun goes on"
    assert len(stage.jobs) == 1


def test_one_that_is_awaited_and_finds_no_blocks_is_dropped_so_that_its_request_goes_on() -> None:
    stage = Stage()
    stage.jobs.add_awaited(HERE, (1,) * 10)
    assert not stage.step(40, spare=BLOCKS) and not stage.jobs.is_awaited(HERE, (1,) * 10) and not stage.jobs


@pytest.mark.parametrize("tokens", [(), (1,) * LIMIT, (100,)])
def test_nobody_waits_for_what_cannot_be_computed(tokens: tuple[int, ...]) -> None:
    stage = Stage()
    stage.jobs.add_awaited(HERE, tokens)
    assert not stage.jobs.is_awaited(HERE, tokens) and not stage.jobs


class Machine(RuleBasedStateMachine):
    """Requests for base prefills, steps of all sizes, neighbours that take blocks, pauses and lost caches."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()
        self.others: list[KVCacheBlock] = []

    @rule(token=st.integers(0, 110), length=st.integers(0, LIMIT + 2))
    def add(self, token: int, length: int) -> None:
        self.stage.jobs.add(HERE, (token,) * length)

    @rule(token=st.integers(0, 110), length=st.integers(0, LIMIT + 2))
    def add_awaited(self, token: int, length: int) -> None:
        self.stage.jobs.add_awaited(HERE, (token,) * length)

    @rule(tokens=st.integers(-5, 60), rows=st.integers(-1, 3), spare=st.integers(0, BLOCKS), idle=st.booleans())
    def step(self, tokens: int, rows: int, spare: int, idle: bool) -> None:
        before = self.stage.pool.get_num_free_blocks()
        spans = self.stage.step(tokens, rows, spare, idle=idle)
        assert sum(map(len, spans)) <= max(0, tokens)
        assert len(spans) <= max(0, rows)
        assert self.stage.pool.get_num_free_blocks() >= min(before, spare)

    @rule(count=st.integers(1, BLOCKS))
    def take(self, count: int) -> None:
        if count <= self.stage.pool.get_num_free_blocks():
            self.others += self.stage.pool.get_new_blocks(count)

    @rule()
    def leave(self) -> None:
        self.stage.pool.free_blocks(self.others)
        self.others = []

    @rule()
    def report(self) -> None:
        self.stage.report()

    @rule()
    def pause(self) -> None:
        self.stage.jobs.stop()
        assert not self.stage.jobs

    @rule()
    def lose(self) -> None:
        self.stage.captures.clear()
        self.stage.jobs.give_up()
        self.stage.held.give_up()

    @invariant()
    def everything_is_accounted_for(self) -> None:
        held = self.stage.held.block_ids
        assert len(held) == len(set(held))
        assert self.stage.pool.get_num_free_blocks() + len(held) + len(self.others) == BLOCKS
        counts = self.stage.jobs.counters()
        ended = counts["base_prefills_done"] + counts["base_prefills_dropped"]
        assert counts["base_prefills_queued"] - ended == len(self.stage.jobs)
        assert len(self.stage.jobs._wanted) <= MOST and len(self.stage.jobs) <= MOST + 1 + len(self.stage.jobs._awaited)
        assert all(len(key[1]) > job.computed for key, job in self.stage.jobs._begun.items())


TestMachine = Machine.TestCase
