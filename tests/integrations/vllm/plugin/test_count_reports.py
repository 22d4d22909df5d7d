"""When counters are added up and sent."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.integrations.vllm.plugin.metrics import COUNTS_SECONDS, CountReports


class Engine:
    """Counters, a clock, and how often the counters were looked at."""

    def __init__(self) -> None:
        self.now, self.looks = 100.0, 0
        self.counts: Counter[str] = Counter()
        self.reports = CountReports(self.totals, lambda: self.now)

    def totals(self) -> Counter[str]:
        self.looks += 1
        return self.counts

    def count(self, **counts: int) -> None:
        self.counts = self.counts + Counter(counts)


def test_each_count_is_reported_once() -> None:
    engine = Engine()
    engine.count(a=2, b=1)
    assert engine.reports.take() == {"a": 2, "b": 1} and engine.reports.take() == {}
    engine.count(a=3)
    assert engine.reports.take() == {"a": 3}


def test_while_requests_run_it_is_looked_now_and_then() -> None:
    engine = Engine()
    engine.reports.began()
    engine.count(a=1)
    assert engine.reports.take() == {"a": 1}
    engine.count(a=1)
    for _ in range(50):
        assert engine.reports.take() == {}
    assert engine.looks == 1
    engine.now += COUNTS_SECONDS
    assert engine.reports.take() == {"a": 1} and engine.looks == 2


def test_the_end_of_the_last_request_is_reported_at_once() -> None:
    engine = Engine()
    for _ in range(2):
        engine.reports.began()
    assert engine.reports.take() == {}
    engine.count(a=1)
    engine.reports.ended()
    assert engine.reports.take() == {}, "another one runs"
    engine.reports.ended()
    assert engine.reports.take() == {"a": 1}
    engine.count(a=1)
    assert engine.reports.take() == {"a": 1}, "copies may go on when no request is left"
