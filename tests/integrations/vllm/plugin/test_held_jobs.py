"""What is computed in held blocks by lanes, ends of answers and base prefills: which tokens, rows and blocks they take,
and what becomes of every one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import RequestStatus

from kedge.integrations.vllm.plugin import lanes as module
from kedge.integrations.vllm.plugin.lanes import NOTHING, HeldBlocks, HeldJobs, PassLimits
from kedge.integrations.vllm.plugin.requests import Capture
from kedge.reuse.lanes import LaneBudget
from kedge.types import GenerateRequest, Namespace, Segment, Tokens

BLOCK, LIMIT, BLOCKS, RANKS, MOST = 4, 40, 12, 2, 3
HERE = Namespace("default")
STOPPED, LENGTH = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED
AMPLE = LaneBudget(1000, 1000)


@pytest.fixture(autouse=True, scope="module")
def few_may_wait() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "MAX_PENDING", MOST)
        yield


class Stage:
    """Held jobs over a pool of vLLM's."""

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=BLOCK)
        self.held = HeldBlocks(RANKS)
        self.held.pool = self.pool
        self.captures: list[Capture] = []
        self.jobs = HeldJobs(self.held, self.captures.append)
        self.jobs.open(PassLimits(LIMIT, 100, BLOCK))

    def end(self, prompt: int, output: Tokens, status: RequestStatus = LENGTH) -> None:
        """End a request that holds blocks for what it has computed, all but the last token, and frees them."""
        computed = prompt + len(output) - 1
        blocks = self.pool.get_new_blocks(-(-computed // BLOCK))
        request: Any = SimpleNamespace(
            prompt_token_ids=[1] * prompt, num_prompt_tokens=prompt, output_token_ids=list(output),
            num_computed_tokens=computed, status=status,
        )  # fmt: skip
        asked = GenerateRequest((Segment((1,) * prompt, "p0"),))
        self.jobs.add_answer(asked, request, [block.block_id for block in blocks])
        self.pool.free_blocks(blocks)

    def step(self, tokens: int, rows: int = 1, spare: int = 0, *, idle: bool = False) -> list[range]:
        """Grant base prefills in a step without ends of answers."""
        assert self.jobs.grant_ends(LaneBudget(tokens, rows), spare) == LaneBudget(0, 0)
        return self.grant(tokens, rows, spare, idle=idle)

    def grant(self, tokens: int, rows: int, spare: int, *, idle: bool) -> list[range]:
        before, most = len(self.jobs.granted), tokens if idle else tokens // 2
        taken = self.jobs.grant(LaneBudget(tokens, rows), spare, most=most, idle=idle)
        spans = [lane.span for lane in self.jobs.granted[before:]]
        assert taken == LaneBudget(sum(map(len, spans)), len(spans))
        return spans

    def report(self, ranks: int = RANKS) -> None:
        for capture in self.captures:
            assert capture.capture_id is not None
            self.held.on_captured(capture.capture_id, ranks)
        self.captures.clear()


# ends of answers ------------------------------------------------------------------------------------------------------


def test_the_end_is_the_last_token() -> None:
    stage = Stage()
    stage.end(6, (7, 8))
    assert stage.jobs.has_ends and stage.jobs.grant_ends(AMPLE, 0) == LaneBudget(1, 1)
    (lane,), (capture,) = stage.jobs.granted, stage.captures
    assert (lane.span, lane.tokens) == (range(7, 8), [1] * 6 + [7, 8, 8])
    assert len(lane.blocks) == 2 and list(capture.blocks) == lane.blocks
    assert capture.response == (7, 8)
    stage.end(6, (7, 8, 2), STOPPED)
    assert not stage.jobs.has_ends and stage.captures[1].response == (7, 8), "all of its tokens have KV"


@pytest.mark.parametrize("budget", [LaneBudget(0, 9), LaneBudget(99, 0), LaneBudget(-9, -9)])
def test_an_end_without_room_holds_nothing_for_ever(budget: LaneBudget) -> None:
    stage = Stage()
    stage.end(7, (7, 8))
    assert stage.jobs.grant_ends(budget, 0) == LaneBudget(0, 0) and not stage.jobs
    assert [capture.response for capture in stage.captures] == [(7,)]


def test_without_blocks_what_is_there_is_captured() -> None:
    stage = Stage()
    stage.end(7, (7, 8))
    stage.end(8, (7,))
    assert stage.jobs.grant_ends(AMPLE, BLOCKS) == LaneBudget(0, 0)
    assert [capture.response for capture in stage.captures] == [(7,), ()]
    assert stage.captures[1].request is NOTHING, "of the second one nothing is there"


@given(st.integers(1, LIMIT - 1), st.integers(1, 8))
def test_no_lane_leaves_the_context(prompt: int, answer: int) -> None:
    stage = Stage()
    stage.end(prompt, tuple(range(3, 3 + min(answer, LIMIT - prompt))))
    stage.jobs.grant_ends(AMPLE, 0)
    for lane in stage.jobs.granted:
        assert lane.span.stop < len(lane.tokens) <= LIMIT, "the runner draws nothing within the prompt"
        assert len(lane.blocks) * BLOCK >= lane.span.stop


# base prefills --------------------------------------------------------------------------------------------------------


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
    assert stage.jobs.counters() == Counter(base_prefills_queued=2, base_prefills_done=2)
    assert not stage.jobs and stage.pool.get_num_free_blocks() == BLOCKS


@pytest.mark.parametrize(("tokens", "rows", "spare"), [(1, 1, 0), (-4, 1, 0), (40, 0, 0), (40, 1, BLOCKS - 1)])
def test_without_room_beside_requests_they_wait(tokens: int, rows: int, spare: int) -> None:
    stage = Stage()
    stage.jobs.add(HERE, (1,) * 10)
    assert not stage.step(tokens, rows, spare) and len(stage.jobs) == 1
    assert stage.pool.get_num_free_blocks() == BLOCKS


@pytest.mark.parametrize("idle", [True, False])
def test_one_without_blocks_is_dropped_where_the_engine_is_idle_or_a_request_waits_for_it(idle: bool) -> None:
    """Else the engine would step for ever, or the request wait."""
    stage = Stage()
    blocks = stage.pool.get_new_blocks(BLOCKS - 1)
    stage.jobs.add(HERE, (1,) * 10, is_awaited=not idle)
    assert not stage.step(40, idle=idle) and not stage.jobs and not stage.jobs.is_awaited(HERE, (1,) * 10)
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


def test_what_a_request_waits_for_goes_first_and_takes_all_that_is_left() -> None:
    stage = Stage()
    stage.jobs.add(HERE, (1,) * 10)
    assert stage.step(4, rows=9) == [range(2)]
    for token in (2, 3):
        stage.jobs.add(HERE, (token,) * 10, is_awaited=True)
    stage.jobs.add(HERE, (4,) * 10)
    assert stage.step(14, rows=9) == [range(10), range(4)]
    (capture,) = stage.captures
    assert capture.request.tokens == (2,) * 10
    assert not stage.jobs.is_awaited(HERE, (2,) * 10) and stage.jobs.is_awaited(HERE, (3,) * 10)
    stage.jobs.add(HERE, (1,) * 10, is_awaited=True)
    assert stage.step(20, rows=9) == [range(4, 10), range(2, 10), range(6)], "one that was begun goes on"
    assert len(stage.jobs) == 1


@pytest.mark.parametrize("tokens", [(), (1,) * LIMIT, (100,)])
def test_nobody_waits_for_what_cannot_be_computed(tokens: tuple[int, ...]) -> None:
    stage = Stage()
    stage.jobs.add(HERE, tokens, is_awaited=True)
    assert not stage.jobs.is_awaited(HERE, tokens) and not stage.jobs


class Machine(RuleBasedStateMachine):
    """Answers that end, wishes for base prefills, steps of all sizes, captures by rank, neighbours that take blocks,
    pauses and lost caches: blocks are free or held, never both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()
        self.others: list[KVCacheBlock] = []
        self.reported: Counter[int] = Counter()

    @rule(
        prompt=st.integers(1, 20),
        output=st.integers(1, 6),
        status=st.sampled_from([STOPPED, LENGTH, RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR]),
    )
    def end(self, prompt: int, output: int, status: RequestStatus) -> None:
        if self.stage.pool.get_num_free_blocks() >= 7:
            self.stage.end(prompt, tuple(range(3, 3 + output)), status)

    @rule(token=st.integers(0, 110), length=st.integers(0, LIMIT + 2), is_awaited=st.booleans())
    def add(self, token: int, length: int, is_awaited: bool) -> None:
        self.stage.jobs.add(HERE, (token,) * length, is_awaited=is_awaited)

    @rule(tokens=st.integers(-5, 60), rows=st.integers(-1, 3), spare=st.integers(0, BLOCKS), idle=st.booleans())
    def step(self, tokens: int, rows: int, spare: int, idle: bool) -> None:
        before, jobs = self.stage.pool.get_num_free_blocks(), self.stage.jobs
        ends = jobs.grant_ends(LaneBudget(tokens, rows), spare)
        assert ends == jobs.taken
        self.stage.grant(tokens - ends.tokens, rows - ends.rows, spare, idle=idle)
        assert jobs.taken.tokens <= max(0, tokens) and jobs.taken.rows <= max(0, rows)
        assert self.stage.pool.get_num_free_blocks() >= min(before, spare)
        for lane in jobs.granted:
            assert all(self.stage.pool.blocks[block].ref_cnt == 1 for block in lane.blocks)

    @rule(count=st.integers(1, BLOCKS))
    def take(self, count: int) -> None:
        if count <= self.stage.pool.get_num_free_blocks():
            self.others += self.stage.pool.get_new_blocks(count)

    @rule()
    def leave(self) -> None:
        self.stage.pool.free_blocks(self.others)
        self.others = []

    @rule()
    def report_of_one_rank(self) -> None:
        captures = list(self.stage.captures)
        self.stage.report(1)
        self.reported.update(one.capture_id for one in captures)
        self.stage.captures += [one for one in captures if self.reported[one.capture_id] < RANKS]

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
        held, jobs = self.stage.held.block_ids, self.stage.jobs
        assert len(held) == len(set(held))
        assert self.stage.pool.get_num_free_blocks() + len(held) + len(self.others) == BLOCKS
        counts = jobs.counters()
        ended = counts["base_prefills_done"] + counts["base_prefills_dropped"]
        assert counts["base_prefills_queued"] - ended == sum(not job.answer for job in jobs._jobs)
        assert sum(not (job.is_urgent or jobs._has_begun(job)) for job in jobs._jobs) <= MOST
        assert all(len(job.tokens) > job.computed for job in jobs._jobs)

    def teardown(self) -> None:
        self.stage.jobs.stop()
        for _ in range(RANKS):
            self.report_of_one_rank()
        assert self.stage.pool.get_num_free_blocks() + len(self.others) == BLOCKS


TestMachine = Machine.TestCase
