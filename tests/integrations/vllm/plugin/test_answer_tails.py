"""Ends of answers: which get a lane, within what of a step and of the pool, and who holds which blocks meanwhile."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import RequestStatus

from kedge.integrations.vllm.plugin.lanes import AnswerTails, EndedAnswer, HeldBlocks, PassLimits
from kedge.integrations.vllm.plugin.messages import Capture
from kedge.reuse.lanes import LaneBudget
from kedge.types import GenerateRequest, Segment, Tokens

BLOCK, LIMIT, VOCABULARY, BLOCKS, RANKS = 4, 40, 100, 24, 2
STOPPED, LENGTH = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED
AMPLE = LaneBudget(1000, 1000)


def ended(prompt: int, output: Tokens, *, computed: int | None = None, status: RequestStatus = LENGTH) -> EndedAnswer:
    known = prompt + len(output) - 1 if computed is None else computed
    request: Any = SimpleNamespace(
        prompt_token_ids=[1] * prompt,
        num_prompt_tokens=prompt,
        output_token_ids=list(output),
        num_computed_tokens=known,
        status=status,
    )
    asked = GenerateRequest((Segment((1,) * prompt, "p0"),))
    return EndedAnswer.of(asked, request)


class Stage:
    """Ends of answers over a pool of vLLM's."""

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=BLOCK)
        self.held = HeldBlocks(RANKS)
        self.held.pool = self.pool
        self.captures: list[Capture] = []
        self.tails = AnswerTails(self.held, self.captures.append)
        self.tails.open(PassLimits(LIMIT, VOCABULARY, BLOCK))

    def end(self, answer: EndedAnswer) -> None:
        """End a request that holds blocks for what it has computed, and frees them."""
        tokens = len(answer.prompt) + answer.computed
        blocks = self.pool.get_new_blocks(-(-tokens // BLOCK))
        self.tails.add(answer, [block.block_id for block in blocks])
        self.pool.free_blocks(blocks)


def test_the_end_is_the_last_token() -> None:
    stage = Stage()
    stage.end(ended(6, (7, 8)))
    assert stage.tails.grant(AMPLE, running=0) == LaneBudget(1, 1)
    (lane,), (capture,) = stage.tails.granted, stage.captures
    assert (lane.span, lane.tokens) == (range(7, 8), [1] * 6 + [7, 8, 8])
    assert len(lane.blocks) == 2 and list(capture.blocks) == lane.blocks
    assert capture.response == (7, 8)


def test_an_answer_whose_tokens_all_have_kv_needs_no_lane() -> None:
    stage = Stage()
    stage.end(ended(6, (7, 8, 2), status=STOPPED))
    assert stage.tails.grant(AMPLE, running=0) == LaneBudget(0, 0)
    assert stage.captures[0].response == (7, 8)


@pytest.mark.parametrize(
    ("budget", "running"),
    [(LaneBudget(0, 9), 0), (LaneBudget(99, 0), 0), (LaneBudget(-9, -9), 0), (AMPLE, BLOCKS)],
)
def test_without_room_what_is_there_is_captured(budget: LaneBudget, running: int) -> None:
    stage = Stage()
    stage.end(ended(7, (7, 8)))
    assert stage.tails.grant(budget, running) == LaneBudget(0, 0)
    assert [capture.response for capture in stage.captures] == [(7,)]


def test_of_an_answer_without_kv_nothing_is_held_where_there_is_no_room() -> None:
    stage = Stage()
    stage.end(ended(8, (7,)))
    assert stage.tails.grant(LaneBudget(0, 0), running=0) == LaneBudget(0, 0)
    assert not stage.captures and not stage.held


@given(st.integers(1, LIMIT - 1), st.integers(1, 8))
def test_no_lane_leaves_the_context(prompt: int, answer: int) -> None:
    stage = Stage()
    output = tuple(range(3, 3 + min(answer, LIMIT - prompt)))
    stage.end(ended(prompt, output))
    stage.tails.grant(AMPLE, running=0)
    for lane in stage.tails.granted:
        assert lane.span.stop < len(lane.tokens) <= LIMIT, "the runner draws nothing within the prompt"
        assert len(lane.blocks) * BLOCK >= lane.span.stop


class Machine(RuleBasedStateMachine):
    """Answers that end, steps of all sizes, captures by rank and lost ones: blocks are free or held, never both."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()
        self.reported: Counter[int] = Counter()

    @rule(
        prompt=st.integers(1, 20),
        output=st.integers(1, 6),
        status=st.sampled_from([STOPPED, LENGTH, RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR]),
    )
    def end(self, prompt: int, output: int, status: RequestStatus) -> None:
        if self.stage.pool.get_num_free_blocks() >= 7:
            self.stage.end(ended(prompt, tuple(range(3, 3 + output)), status=status))

    @rule(tokens=st.integers(-5, 60), rows=st.integers(-1, 3), running=st.integers(0, BLOCKS))
    def step(self, tokens: int, rows: int, running: int) -> None:
        free = self.stage.pool.get_num_free_blocks()
        taken = self.stage.tails.grant(LaneBudget(tokens, rows), running)
        granted = self.stage.tails.granted
        assert taken == LaneBudget(sum(len(lane.span) for lane in granted), len(granted))
        assert taken.tokens <= max(0, tokens) and taken.rows <= max(0, rows)
        now = self.stage.pool.get_num_free_blocks()
        assert now >= min(free, running)
        for lane in granted:
            assert all(self.stage.pool.blocks[block].ref_cnt == 1 for block in lane.blocks)

    @rule(ranks=st.integers(1, RANKS))
    def report(self, ranks: int) -> None:
        for capture in self.stage.captures:
            assert capture.capture_id is not None
            left = RANKS - self.reported[capture.capture_id]
            self.stage.held.on_captured(capture.capture_id, min(ranks, left))
            self.reported[capture.capture_id] += min(ranks, left)
        self.stage.captures[:] = [one for one in self.stage.captures if self.reported[one.capture_id or 0] < RANKS]

    @rule()
    def give_up(self) -> None:
        self.stage.captures.clear()
        self.stage.tails.give_up()
        self.stage.held.give_up()

    @invariant()
    def every_block_is_free_or_held_once(self) -> None:
        held = Counter(self.stage.held.block_ids)
        assert set(held.values()) <= {1}
        assert self.stage.pool.get_num_free_blocks() + len(held) == BLOCKS
        assert all(self.stage.pool.blocks[block].ref_cnt == 1 for block in held)

    def teardown(self) -> None:
        self.stage.tails.grant(LaneBudget(0, 0), 0)
        for _ in range(RANKS):
            self.report(1)
        assert self.stage.pool.get_num_free_blocks() == BLOCKS


TestMachine = Machine.TestCase
