"""What a rank measures of a step: its pass, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.cache import Copied, Copy, Direction
from kedge.integrations.vllm.plugin import worker_side
from kedge.integrations.vllm.plugin.messages import Orders, TranslationWrite
from kedge.integrations.vllm.plugin.worker_side import WorkerSide
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


class Device:
    """A GPU whose clock the test moves, with the events that it was given."""

    def __init__(self) -> None:
        self.given: list[Event] = []
        self.done = 0
        """Events that it has come by"""

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)

    def work(self, *seconds: float) -> None:
        """Come by an event after so many seconds each."""
        now = self.given[self.done - 1].at if self.done else 0.0
        for each in seconds:
            now += each
            self.given[self.done].at = now
            self.done += 1


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self.at = device, 0.0

    def record(self) -> None:
        self._device.given.append(self)

    def query(self) -> bool:
        return self in self._device.given[: self._device.done]

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query()
        return 1e3 * (end.at - self.at)


def test_passes_on_a_gpu_are_measured_by_its_events_once_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    device, clock, costs = Device(), Clock(), Costs()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
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
    device.work(1.0, 2.0, 4.0, 0.5)  # the step, its writes, the first pass, and the second step
    side.begin_step()
    side.after_pass(Orders(scheduled=50, rows=1))
    assert costs.seen == [(100, 1, 4.0)] and side.take_reports().computed == (100, 4.0)
    device.work(*[8.0] * (len(device.given) - device.done))
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
