"""The plug-in's statistics: what is reported when, and over several of vLLM's steps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kedge.discovery import PlainRequests
from kedge.integrations.vllm.plugin.metrics import (
    ANSWERS,
    REPORT,
    REPORT_SECONDS,
    REPORT_SHARE,
    KedgeStats,
    StatReports,
)
from kedge.settings import DiscoverySettings
from kedge.types import GenerateRequest, Namespace, RequestId, Segment

COST = 0.005


def test_stats_of_several_steps_are_merged() -> None:
    first = KedgeStats(data={"host_evictions": 1, ANSWERS: {"a": {}}})
    second = KedgeStats(data={"host_evictions": 2, "blocks_loaded": 5, ANSWERS: {"b": {}}})
    both = first.aggregate(second)
    assert both.reduce() == {"host_evictions": 3, "blocks_loaded": 5}
    assert both.data[ANSWERS] == {"a": {}, "b": {}}
    assert both.aggregate(KedgeStats(data={})).data["host_evictions"] == 3
    both.reset()
    assert both.is_empty()


class Engine:
    """Counters, plain requests, and a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now, self.looks = 100.0, 0
        self.counts: Counter[str] = Counter()
        self.plain = PlainRequests(DiscoverySettings(), lambda: self.now)
        self.reports = StatReports(self.totals, self.plain, lambda: self.now)

    def totals(self) -> Counter[str]:
        self.looks += 1
        return self.counts

    def arrive(self, name: str) -> None:
        segments = (Segment(tuple(range(40)), "prompt"),)
        self.plain.arrived(GenerateRequest(segments, request_id=RequestId(name), is_plain=True))

    def end(self, name: str) -> None:
        self.plain.ended(Namespace("default"), RequestId(name), (1, 2, 3))

    def take(self, after: float = 0.0, **counts: int) -> dict[str, Any]:
        """What is reported after some seconds with more counts; of the report, how many requests it tells of."""
        self.now += after
        self.counts = self.counts + Counter(counts)
        found = self.reports.take(idle=self.plain.is_idle)
        return {name: one["requests"] if name == REPORT else one for name, one in found.items()}


def test_each_count_is_reported_once_and_now_and_then_while_requests_run() -> None:
    engine = Engine()
    assert engine.take(a=2, b=1) == {"a": 2, "b": 1} and engine.take() == {}
    assert engine.take(a=3) == {"a": 3}, "copies may go on when no request is left"
    engine.arrive("a")
    assert engine.take(REPORT_SECONDS, a=1) == {"a": 1, REPORT: 1}
    engine.arrive("b")
    looks = engine.looks
    assert engine.take(a=1) == {} and all(engine.take() == {} for _ in range(50)) and engine.looks == looks
    assert engine.take(REPORT_SECONDS) == {"a": 1, REPORT: 2}
    assert engine.take(REPORT_SECONDS) == {}, "only what has changed"


def test_the_end_of_the_last_request_is_reported_at_once() -> None:
    engine = Engine()
    for name in "ab":
        engine.arrive(name)
    assert engine.take() == {REPORT: 2}
    engine.end("a")
    assert engine.take(a=1) == {}, "another one runs"
    engine.end("b")
    assert engine.take() == {"a": 1, REPORT: 2} and engine.take() == {}
    for number in range(20):
        engine.arrive(str(number))
        engine.end(str(number))
        assert engine.take(0.01) == {REPORT: number + 3}, "of a client that is alone, every end"


def test_reports_take_a_small_share_of_the_time_of_clients_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sent = Engine(), 0
    report = engine.plain.report

    def slow() -> dict[str, object]:
        engine.now += COST
        return report()

    monkeypatch.setattr(engine.plain, "report", slow)
    for number in range(1000):
        engine.arrive(str(number))
        engine.end(str(number))
        sent += bool(engine.take(0.01))
    assert 10 < sent <= (engine.now - 100.0) * REPORT_SHARE / COST + 1
