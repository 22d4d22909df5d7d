"""Base prefills, which lanes compute in held blocks: which tokens, rows and blocks they take, and what becomes of every
one of them. And requests that wait for lanes.
"""

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

from kedge.integrations.vllm.plugin import lanes, requests
from kedge.integrations.vllm.plugin.hints import read_hints
from kedge.integrations.vllm.plugin.lanes import NOTHING, BasePrefills, HeldBlocks, HeldLane, LaneGrants, PassLimits
from kedge.integrations.vllm.plugin.requests import NEAR, Capture, LiveRequest, TranslationVerdict
from kedge.integrations.vllm.plugin.translations import Translations
from kedge.reuse.costs import PATIENCE
from kedge.reuse.holes import Holes
from kedge.reuse.lanes import LaneBudget
from kedge.settings import GuardSettings
from kedge.types import Namespace, ReuseMode
from tests.reuse.test_holes import SIZE, layouts, positions

BLOCK, LIMIT, BLOCKS, RANKS, MOST = 4, 40, 12, 2, 3
HERE = Namespace("default")


@pytest.fixture(autouse=True, scope="module")
def few_may_wait() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lanes, "MAX_PENDING", MOST)
        yield


class Stage:
    """Held jobs over a pool of vLLM's."""

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=BLOCK)
        self.held = HeldBlocks(RANKS)
        self.held.pool = self.pool
        self.captures: list[Capture] = []
        self.jobs = BasePrefills(self.held, self.captures.append)
        self.jobs.model = PassLimits(LIMIT, 100, BLOCK)

    def step(self, tokens: int, rows: int = 1, spare: int = 0, *, idle: bool = False) -> list[range]:
        """Grant base prefills in a step."""
        most = tokens if idle else tokens // 2
        taken = self.jobs.grant(LaneBudget(tokens, rows), spare, most=most, idle=idle)
        spans = [lane.span for lane in self.jobs.granted]
        assert taken == LaneBudget(sum(map(len, spans)), len(spans))
        return spans

    def report(self, ranks: int = RANKS) -> None:
        for capture in self.captures:
            assert capture.capture_id is not None
            self.held.on_captured(capture.capture_id, ranks)
        self.captures.clear()


# base prefills --------------------------------------------------------------------------------------------------------


def test_the_latest_goes_first_in_pieces_and_is_captured_with_the_last() -> None:
    stage = Stage()
    stage.jobs.add(HERE, (1,) * 10)
    stage.jobs.add(HERE, (2,) * 9)
    assert stage.step(12) == [range(6)] and not stage.captures
    stage.jobs.add(HERE, (2,) * 9)
    assert len(stage.jobs) == 2, "the one under way is not queued again"
    assert stage.step(12, rows=2) == [range(6, 9), range(3)], "each once in a step, and both within the share"
    (capture,) = stage.captures
    assert capture.request.tokens == (2,) * 9 and capture.request.namespace == HERE and len(capture.blocks) == 3
    assert stage.step(50, idle=True) == [range(3, 10)]
    stage.report()
    assert stage.jobs.counts == Counter(base_prefills_queued=2, base_prefills_done=2)
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
    assert stage.jobs.counts["base_prefills_dropped"] == 1


def test_blocks_that_requests_need_are_given_up_after_the_pass() -> None:
    stage = Stage()
    stage.jobs.add(HERE, (1,) * 10)
    assert stage.step(4) == [range(2)]
    assert not stage.step(8, spare=BLOCKS) and not stage.jobs
    (capture,) = stage.captures
    assert capture.request is NOTHING and stage.pool.get_num_free_blocks() == BLOCKS - 3
    stage.report()
    assert stage.pool.get_num_free_blocks() == BLOCKS


def test_what_a_request_waits_for_goes_first_and_takes_all_that_is_left() -> None:
    stage = Stage()
    stage.jobs.add(HERE, (1,) * 10)
    assert stage.step(4, rows=9) == [range(2)]
    for token, is_awaited in ((2, True), (3, True), (3, False), *((token, False) for token in range(4, 4 + MOST))):
        stage.jobs.add(HERE, (token,) * 10, is_awaited=is_awaited)
    assert stage.step(14, rows=9) == [range(10), range(4)]
    (capture,) = stage.captures
    assert capture.request.tokens == (2,) * 10
    assert not stage.jobs.is_awaited(HERE, (2,) * 10) and stage.jobs.is_awaited(HERE, (3,) * 10)
    assert not stage.jobs.is_awaited(Namespace("other"), (3,) * 10)
    stage.jobs.add(HERE, (1,) * 10, is_awaited=True)
    assert stage.step(20, rows=9) == [range(4, 10), range(2, 10), range(6)], "one that was begun goes on"
    assert len(stage.jobs) == MOST


def test_a_tenant_with_ever_new_wishes_passes_over_no_other() -> None:
    stage, other = Stage(), Namespace("other")
    stage.jobs.add(other, (9,) * 4)
    for token in range(10, 30):
        stage.jobs.add(HERE, (token,) * 4)
        stage.step(8 if token > 20 else 0)
    assert [one.request.tenant for one in stage.captures] == ["other", *["default"] * 8]


@pytest.mark.parametrize("tokens", [(), (1,) * LIMIT, (100,)])
def test_nobody_waits_for_what_cannot_be_computed(tokens: tuple[int, ...]) -> None:
    stage = Stage()
    stage.jobs.add(HERE, tokens, is_awaited=True)
    assert not stage.jobs.is_awaited(HERE, tokens) and not stage.jobs


class Machine(RuleBasedStateMachine):
    """Wishes for base prefills, steps of all sizes, captures by rank, neighbours that take blocks, pauses and lost
    caches: blocks are free or held, never both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()
        self.others: list[KVCacheBlock] = []
        self.reported: Counter[int] = Counter()

    @rule(token=st.integers(0, 110), length=st.integers(0, LIMIT + 2), is_awaited=st.booleans())
    def add(self, token: int, length: int, is_awaited: bool) -> None:
        self.stage.jobs.add(HERE, (token,) * length, is_awaited=is_awaited)

    @rule(tokens=st.integers(-5, 60), rows=st.integers(-1, 3), spare=st.integers(0, BLOCKS), idle=st.booleans())
    def step(self, tokens: int, rows: int, spare: int, idle: bool) -> None:
        before, jobs = self.stage.pool.get_num_free_blocks(), self.stage.jobs
        spans = self.stage.step(tokens, rows, spare, idle=idle)
        assert sum(map(len, spans)) <= max(0, tokens) and len(spans) <= max(0, rows)
        assert self.stage.pool.get_num_free_blocks() >= min(before, spare)
        for lane in jobs.granted:
            assert all(self.stage.pool.blocks[block].ref_cnt == 1 for block in lane.blocks)
            assert lane.span.stop < len(lane.tokens) <= LIMIT, "the runner draws nothing within the prompt"
            assert len(lane.blocks) * BLOCK >= lane.span.stop

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
        self.stage.jobs.give_up()
        self.stage.held.give_up()
        self.stage.report()  # of what nothing is held any more

    @invariant()
    def everything_is_accounted_for(self) -> None:
        held, jobs = self.stage.held.block_ids, self.stage.jobs
        assert len(held) == len(set(held))
        assert all(self.stage.held.blocks_of(one.capture_id) for one in self.stage.captures), "until all have read them"
        assert self.stage.pool.get_num_free_blocks() + len(held) + len(self.others) == BLOCKS
        counts = jobs.counts
        ended = counts["base_prefills_done"] + counts["base_prefills_dropped"]
        assert counts["base_prefills_queued"] - ended == len(jobs)
        assert sum(not (job.is_awaited or jobs._has_begun(job)) for job in jobs._jobs) <= MOST
        assert all(len(job.tokens) > job.computed for job in jobs._jobs)

    def teardown(self) -> None:
        self.stage.jobs.stop()
        for _ in range(RANKS):
            self.report_of_one_rank()
        assert self.stage.pool.get_num_free_blocks() + len(self.others) == BLOCKS


TestMachine = Machine.TestCase


# requests that wait for lanes: planned, granted, held back, and in the end admitted with what is left ----------------

HOLES: Holes = (range(10, 20), range(30, 31), range(40, 42), range(59, 60))


def candidate(name: str = "r", tokens: int = SIZE) -> LiveRequest:
    prompt = tuple(range(tokens))
    hinted = read_hints(name, prompt, None, {"kedge": {}}, ReuseMode.TRANSLATE)
    assert hinted is not None
    request: Any = SimpleNamespace(request_id=name, num_tokens=tokens, num_prompt_tokens=tokens, num_preemptions=0)
    return LiveRequest(request, hinted)


def lane_grants(candidates: dict[str, LiveRequest]) -> LaneGrants:
    """Without base prefills."""
    return LaneGrants(candidates, BasePrefills(HeldBlocks(1), lambda _: None))


def judged(holes: Holes = HOLES, name: str = "r") -> LiveRequest:
    found = candidate(name)
    found.take_verdict(TranslationVerdict(holes))
    return found


def test_near_holes_are_one_and_too_many_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged((range(5, 6), range(6 + NEAR - 1, 12), range(59, 60))).holes == (range(5, 12), range(59, 60))
    assert judged((range(5, 6), range(6 + NEAR, 12), range(59, 60))).holes[0] == range(5, 6)
    found = judged((range(30, 31), range(59, 60)))
    found.exact = 20
    found.lose(10)
    assert found.holes == (range(10, 20), range(30, 31), range(59, 60)) and found.exact == 10, "some was evicted since"
    monkeypatch.setattr(requests, "MAX_LANES", 2)
    assert judged().holes == (range(10, 20), range(30, 42), range(59, 60))


def test_a_step_without_gaps_or_base_prefills_wants_no_lanes() -> None:
    candidates = {"r": judged((range(59, 60),))}
    lanes = lane_grants(candidates)
    assert not lanes.is_wanted
    candidates["s"] = judged(name="s")
    assert lanes.is_wanted
    assert lanes.holes_of(candidates["s"]) is None and lanes.holes_of(candidates["r"]) == (range(59, 60),)
    del candidates["s"]
    assert not lanes.is_wanted
    lanes.prefills._jobs.append(SimpleNamespace())  # type: ignore[arg-type]
    assert lanes.is_wanted


@given(layouts(), st.integers(0, SIZE + 5))
def test_a_plan_accounts_for_every_token_behind_the_exact_prefix(holes: Holes, computed: int) -> None:
    found = judged(holes)
    claimed = found.plan(found.holes, computed)
    assert positions(found.planned) | positions(found.written) == set(range(computed, SIZE))
    assert positions(found.planned).isdisjoint(positions(found.written))
    assert positions(found.planned) >= {position for position in positions(holes) if position >= computed}
    assert computed + claimed == (found.planned[-1].start if found.written else computed)
    hashed: list[int] = []
    translations = Translations(None, 1, GuardSettings())
    translations.requests[found.request_id] = found
    translations.guard(SimpleNamespace(cache_blocks=lambda _, count: hashed.append(count)), lambda _: ())
    for tokens in (SIZE, 7):
        translations._guarded(found.request, tokens)
    first = found.written[0].start if found.written else SIZE
    assert hashed == [first, min(first, 7)], "nothing is hashed from the first translated token on"


class Queue:
    """Lanes with a queue of waiting requests, all of which have been judged."""

    def __init__(self, *names: str) -> None:
        self.candidates = {name: judged(name=name) for name in names}
        self.lanes = lane_grants(self.candidates)
        self.held_back = 0
        self.lanes.open(self.hold_back, PassLimits(100, 100, 16))

    def hold_back(self) -> None:
        self.held_back += 1

    def grant(self, tokens: int, rows: int, demand: int = 0, deferred: Any = ()) -> LaneBudget:
        waiting: Any = [one.request for one in self.candidates.values()]
        return self.lanes.grant(waiting, deferred, LaneBudget(tokens, rows), demand)


def test_without_room_a_request_is_held_back_and_then_cut() -> None:
    queue = Queue("r")
    found = queue.candidates["r"]
    for step in range(PATIENCE):
        assert queue.grant(30, 9, demand=20) == LaneBudget(0, 0)
        assert queue.lanes.holes_of(found) is None and queue.held_back == step + 1
    assert queue.grant(30, 9, demand=20) == LaneBudget(0, 0)
    assert queue.lanes.holes_of(found) == (range(10, 60),)
    assert queue.grant(30, 9, demand=16) == LaneBudget(13, 3), "unless there is room meanwhile"
    found.plan(queue.lanes.holes_of(found) or (), 0)
    queue.lanes.admit(found)
    queue.lanes.prefills.granted.append(lane := HeldLane([1, 2, 2], [0], range(2)))
    assert queue.lanes.taken == LaneBudget(15, 4) and not found.holes
    assert queue.lanes.take() == ({"r": HOLES[:-1]}, [lane]) and queue.lanes.take() == ({}, [])
    assert queue.grant(30, 9) == LaneBudget(0, 0)


def test_a_request_that_was_not_ready_takes_nothing() -> None:
    queue = Queue("r")
    other = candidate("other", 500)
    queue.candidates = {"other": other, **queue.candidates}
    queue.lanes = lane_grants(queue.candidates)
    assert queue.grant(30, 9) == LaneBudget(0, 0), "one with 500 tokens goes first"
    assert queue.grant(30, 9, deferred={id(other.request): other.request}.values()) == LaneBudget(13, 3)
