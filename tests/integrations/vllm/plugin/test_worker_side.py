"""What a rank measures of a step: its pass, and nothing else; and the views of its pages that it copies."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.cache import Copy, Direction
from kedge.integrations.vllm.plugin import worker_side
from kedge.integrations.vllm.plugin.requests import Capture, Orders, Reports, TranslationWrite
from kedge.integrations.vllm.plugin.worker_side import WorkerSide, pool_views
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
        self.waited: list[float] = []

    def observe_pass(self, tokens: int, sequences: int, seconds: float, waited: float = 0.0) -> None:
        self.seen.append((tokens, sequences, seconds))
        self.waited.append(waited)


@pytest.mark.parametrize("writes", [(), (WRITE,)])
def test_a_pass_is_measured_without_writes_whenever_these_are_made(
    writes: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, costs = Clock(), Costs()
    monkeypatch.setattr(worker_side, "time", clock)
    side: Any = WorkerSide(16, 1.0, LearningBudget(is_timed=False), costs)
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
    assert side.build_connector_worker_meta().computed == (100, 5.0)


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

    class Budget(LearningBudget):
        def spend(self, _: Any, seconds: float, **more: Any) -> None:  # noqa: ARG002
            spent.append(seconds)

    spent = list[float]()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(worker_side, "time", clock)
    side: Any = WorkerSide(16, 1.0, Budget(), costs)
    side._passes = worker_side.PassEvents()
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
    assert costs.seen == [(100, 1, 4.0)] and side.build_connector_worker_meta().computed == (100, 4.0)
    work(*[8.0] * (len(given) + 1 - len(passed)))
    side.begin_step()
    side.after_pass(Orders(scheduled=60, rows=2))
    assert costs.seen[1:] == [(200, 1, 8.0), (50, 1, 8.0)], "a step without a pass is none"
    assert costs.waited == [0.0, 0.5, 16.0], "from the end of one to the beginning of the next"
    assert spent == [0.0, 0.0, 0.0, 4.0, 16.0], "learning has a share of what the device has done"


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
        (Orders(scheduled=8, expected=(GenerateRequest(()),)), 1),
    ],
    ids=["quiet", "dropped", "ended", "expected"],
)
def test_a_learner_at_rest_is_left_alone_until_a_step_has_something_for_it(orders: Orders, asked: int) -> None:
    side: Any = WorkerSide(16, 1.0, LearningBudget(is_timed=False), EngineCosts())
    side._learner = learner = Resting(Clock())
    learner.drop = learner.end_run = learner.expect = lambda _: None
    side.begin_step()
    side.before_pass(orders)
    side.after_pass(orders)
    assert learner.asked == asked
    found = [side.build_connector_worker_meta() for _ in range(2)]
    assert found == [Reports() if orders.expected else None, None], "the scheduler steps on until it hears of the end"


def test_each_copy_is_started_once_and_no_prompt_that_cannot_be_captured_ends_the_step() -> None:
    """Its blocks are given back, as vLLM ends with an error of its connector's."""
    side: Any = WorkerSide(16, 1.0, LearningBudget(is_timed=False), EngineCosts())
    side._learner = learner = SlowLearner(Clock())
    read, copied = list[int](), list[Copy]()
    side._copier = SimpleNamespace(submit=copied.append, drain=list)

    def capture(order: Capture) -> None:
        read.append(order.capture_id)
        if order.capture_id == 1:
            raise torch.OutOfMemoryError("on purpose")

    learner.capture = capture  # type: ignore[attr-defined]
    captures = tuple(Capture(GenerateRequest(()), (1,), number) for number in (1, 2))
    copies = [Copy(number, one, (1,), (2,)) for number, one in enumerate((Direction.LOAD, Direction.OFFLOAD))]
    orders = Orders(scheduled=8, rows=1, captures=captures, copies=tuple(copies))
    side.before_pass(orders)
    assert copied == copies[:1]
    side.after_pass(orders)
    assert copied == copies and read == [1, 2] and side.build_connector_worker_meta().captured == {1: 1, 2: 1}


def test_what_is_asked_of_a_rank_is_answered_once_its_device_has_done_all() -> None:
    """A snapshot is read by another thread, whose stream waits for none."""
    side: Any = WorkerSide(16, 1.0, LearningBudget(is_timed=False), EngineCosts())
    done, pages = list[str](), SimpleNamespace(synchronize=lambda: done.append("all"))
    side._learner = SimpleNamespace(anchors=None, bases=None, pages=pages)
    assert side.ask(lambda *_: tuple(done)) == ("all",)


# views of a pool of blocks: what layers of several groups lie over is copied once, and all of it ---------------------

BLOCKS, PAGE = 6, 32


def memory() -> torch.Tensor:
    """Two regions of pages, one behind the other."""
    return torch.zeros(2 * BLOCKS * PAGE)


def filled(views: list[torch.Tensor]) -> torch.Tensor:
    """Memory with ones wherever a view has a number."""
    found = memory()
    for view in views:
        found.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(1)
    return found


PARTS = st.tuples(st.integers(0, 1), st.integers(1, PAGE), st.integers(1, 2))
"""A region, and the numbers of each of its pages that a layer has: so many, all or every other one"""


@given(st.lists(PARTS, min_size=1, max_size=6))
def test_no_byte_is_left_out_and_what_begins_alike_is_one_view(parts: list[tuple[int, int, int]]) -> None:
    pages = memory().view(2, BLOCKS, PAGE)
    views = [pages[number, :, :count:step] for number, count, step in parts]
    found = pool_views(views, BLOCKS)
    assert torch.equal(filled(views), filled(found))
    dense = {number for number, count, step in parts if step == 1 or count <= step}
    assert len([one for one in found if one[0].is_contiguous()]) == len(dense)
