"""What a rank measures of a step: its pass, and nothing else; and the views of its pages that it copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from kedge.cache import Copied, Copy, Direction
from kedge.errors import LayoutUnknown
from kedge.integrations.vllm.plugin import worker_side
from kedge.integrations.vllm.plugin.requests import Orders, TranslationWrite
from kedge.integrations.vllm.plugin.worker_side import BlockMemory, WorkerSide, distinct, pool_views
from kedge.reuse.costs import EngineCosts
from kedge.reuse.learning import LearningBudget
from kedge.types import GenerateRequest, RequestId

WRITE = TranslationWrite(RequestId("r"), (1,), (range(3),))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class SlowLearner:
    """Writes take two seconds."""

    is_learning = is_at_rest = False

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def write(self, _: object) -> None:
        self._clock.now += 2.0

    def learn(self) -> bool:
        return False


class Costs(EngineCosts):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, float]] = []

    def observe_pass(self, tokens: int, sequences: int, seconds: float) -> None:
        self.seen.append((tokens, sequences, seconds))


@pytest.mark.parametrize("writes", [(), (WRITE,)])
def test_a_pass_is_measured_without_writes_whenever_these_are_made(
    writes: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, costs = Clock(), Costs()
    monkeypatch.setattr(worker_side, "time", clock)
    side: Any = WorkerSide(16, 1.0, LearningBudget(is_timed=False))
    side.measure_passes(costs, is_cpu=True)
    side._learner = SlowLearner(clock)
    orders = Orders(scheduled=100, rows=3, writes=writes)
    side.begin_step()
    if writes:
        side.before_pass(orders)
    clock.now += 5.0
    if not writes:  # vLLM then calls it after the pass
        side.before_pass(orders)
    side.after_pass(orders)
    assert costs.seen == [(100, 3, 5.0)]
    assert side.take_reports().computed == (100, 5.0)


def test_passes_on_a_gpu_are_measured_by_its_events_once_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, costs, given, passed = Clock(), Costs(), list[Any](), [0.0]

    class Event:
        """Of a GPU that comes by its events when the test says."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            given.append(self)

        def query(self) -> bool:
            return given.index(self) + 1 < len(passed)

        def elapsed_time(self, end: Any) -> float:
            return 1e3 * (passed[given.index(end) + 1] - passed[given.index(self) + 1])

    def work(*seconds: float) -> None:
        """Come by an event after so many seconds each."""
        for each in seconds:
            passed.append(passed[-1] + each)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(worker_side, "time", clock)
    side: Any = WorkerSide(16, 1.0, LearningBudget(is_timed=False))
    side.measure_passes(costs, is_cpu=False)
    side._learner = SlowLearner(clock)
    for scheduled, writes in ((100, (WRITE,)), (200, ()), (0, ())):
        side.begin_step()
        side.before_pass(Orders(scheduled=scheduled, rows=1, writes=writes))
        clock.now += 1.0
        side.after_pass(Orders(scheduled=scheduled, rows=1))
    assert not costs.seen, "nothing has ended"
    work(1.0, 2.0, 4.0, 0.5)  # the step, its writes, the first pass, and the second step
    side.begin_step()
    side.after_pass(Orders(scheduled=50, rows=1))
    assert costs.seen == [(100, 1, 4.0)] and side.take_reports().computed == (100, 4.0)
    work(*[8.0] * (len(given) + 1 - len(passed)))
    side.begin_step()
    side.after_pass(Orders(scheduled=60, rows=2))
    assert costs.seen[1:] == [(200, 1, 8.0), (50, 1, 8.0)], "a step without a pass is none"


def test_copies_fail_on_a_rank_that_could_not_open_its_host_tier() -> None:
    """The scheduler, which has ordered them, would wait for ever."""
    side = WorkerSide(16, 1.0, LearningBudget(is_timed=False))
    copies = (Copy(1, Direction.LOAD, (1,), (2,)), Copy(2, Direction.OFFLOAD, (1, 2), (3, 4)))
    orders = Orders(copies=copies)
    side.begin_step()
    side.before_pass(orders)
    side.after_pass(orders)
    reports = side.take_reports()
    assert reports is not None and reports.copies == [Copied(1, ok=False), Copied(2, ok=False)]


class Resting(SlowLearner):
    """Has nothing to learn; counts how often it is asked to."""

    asked, is_at_rest = 0, True

    def learn(self) -> bool:
        self.asked += 1
        return super().learn()


@pytest.mark.parametrize(
    ("orders", "asked"),
    [
        (Orders(scheduled=8), 0),
        (Orders(scheduled=8, dropped=(RequestId("r"),)), 1),
        (Orders(scheduled=8, ended_runs=(GenerateRequest(()).run_key,)), 1),
    ],
    ids=["quiet", "dropped", "ended"],
)
def test_a_learner_at_rest_is_left_alone_until_a_step_has_something_for_it(orders: Orders, asked: int) -> None:
    side: Any = WorkerSide(16, 1.0, LearningBudget(is_timed=False))
    side._learner = learner = Resting(Clock())
    learner.writes = SimpleNamespace(drop=lambda _: None)
    learner.end_run = lambda _: None
    side.begin_step()
    side.before_pass(orders)
    side.after_pass(orders)
    assert learner.asked == asked


# views of a pool of blocks: what layers of several groups lie over is copied once, and all of it ---------------------

BLOCKS, PAGE = 6, 32


def memory() -> torch.Tensor:
    """Two regions of pages, one behind the other."""
    return torch.zeros(2 * BLOCKS * PAGE)


def region(pool: torch.Tensor, number: int, *shape: int) -> torch.Tensor:
    return pool[number * BLOCKS * PAGE : (number + 1) * BLOCKS * PAGE].view(BLOCKS, *shape)


PARTS = st.tuples(st.integers(0, 1), st.integers(0, PAGE - 1), st.integers(1, PAGE), st.integers(1, 2))
"""A region, and a part of each of its pages: all of it, or every other number"""


@given(st.lists(PARTS, min_size=1, max_size=6))
def test_no_byte_is_left_out_and_no_view_lies_in_another(parts: list[tuple[int, int, int, int]]) -> None:
    pool = memory()
    views = [region(pool, number, PAGE)[:, start : start + count : step] for number, start, count, step in parts]
    wanted, found = memory(), memory()
    for view, filled in ((one, wanted) for one in views):
        filled.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(1)
    for view in distinct(views):
        found.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(1)
    assert torch.equal(wanted, found)
    memories = [BlockMemory.of(view) for view in distinct(views)]
    assert not any(one is not other and one.covers(other) for one in memories for other in memories)


def kv_config(spec: Any) -> KVCacheConfig:
    return KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


def test_states_have_a_block_each() -> None:
    config = kv_config(MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align"))
    both = [region(memory(), 0, PAGE)[:, :4], region(memory(), 0, PAGE)[:, 4:9]]
    assert len(pool_views({"layer": both}, {}, config, torch.float32)) == 2
    with pytest.raises(LayoutUnknown, match="does not count 6 blocks"):
        pool_views({"layer": torch.zeros(BLOCKS + 1, 4)}, {}, config, torch.float32)


def test_pages_of_an_op_that_fails_are_refused() -> None:
    config = kv_config(FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype=torch.float32))
    layer = SimpleNamespace(head_size=4, num_kv_heads=1, impl=SimpleNamespace())
    with pytest.raises(LayoutUnknown, match="failed"):
        pool_views({"layer": region(memory(), 0, PAGE)}, {"layer": layer}, config, torch.float32)
