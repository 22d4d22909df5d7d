"""Reports of plain traffic: seldom while the engine runs, and at its end."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.discovery import PlainRequests
from kedge.integrations.vllm.plugin.metrics import BUSY_SECONDS, IDLE_SECONDS, IDLE_SHARE, PlainReports
from kedge.settings import DiscoverySettings
from kedge.types import GenerateRequest, Namespace, RequestId, Segment

NAMESPACE = Namespace("default")
COST = 0.005


class Traffic:
    """Plain requests on a clock that stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.plain = PlainRequests(DiscoverySettings(), lambda: self.now)
        self.reports = PlainReports(self.plain, lambda: self.now)

    def arrive(self, name: str) -> None:
        segments = (Segment(tuple(range(40)), "prompt"),)
        self.plain.arrived(GenerateRequest(segments, request_id=RequestId(name), is_plain=True))

    def end(self, name: str) -> None:
        self.plain.ended(NAMESPACE, RequestId(name), (1, 2, 3))

    def requests(self, after: float = 0.0) -> object:
        """How many requests the report that is due tells of; None: no report is due."""
        self.now += after
        found = self.reports.take()
        return found and found["requests"]


def test_nothing_is_reported_before_anything_came() -> None:
    assert Traffic().requests() is None


def test_a_running_engine_reports_every_few_seconds_and_only_what_changed() -> None:
    traffic = Traffic()
    traffic.arrive("a")
    assert traffic.requests() == 1
    traffic.arrive("b")
    assert traffic.requests(BUSY_SECONDS - 0.1) is None
    assert traffic.requests(0.2) == 2
    assert traffic.requests(BUSY_SECONDS + 1) is None


def test_the_last_running_requests_end_is_reported_without_the_wait() -> None:
    traffic = Traffic()
    traffic.arrive("a")
    traffic.arrive("b")
    assert traffic.requests() == 2
    traffic.end("a")
    assert traffic.requests(IDLE_SECONDS) is None
    traffic.end("b")
    assert traffic.requests() == 2
    assert traffic.requests(BUSY_SECONDS + 1) is None


def test_every_end_of_a_client_that_is_alone_is_reported() -> None:
    traffic = Traffic()
    for number in range(20):
        traffic.arrive(str(number))
        traffic.end(str(number))
        assert traffic.requests(0.01) == number + 1


def test_reports_take_a_small_share_of_the_time_of_clients_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic, sent = Traffic(), 0
    report = traffic.plain.report

    def slow() -> dict[str, object]:
        traffic.now += COST
        return report()

    monkeypatch.setattr(traffic.plain, "report", slow)
    for number in range(1000):
        traffic.arrive(str(number))
        traffic.end(str(number))
        sent += traffic.requests(0.01) is not None
    assert 10 < sent <= traffic.now * IDLE_SHARE / COST + 1
