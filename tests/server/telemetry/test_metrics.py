"""What `/metrics` has of a server, by tenant, and of its engine's cache and guard, which is never waited for long."""

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kedge.cache.tiers import CacheStats
from kedge.engine.echo import EchoEngine
from kedge.errors import EngineClosed
from kedge.server import metrics as server_metrics
from kedge.server.metrics import COUNTERS, GAUGES, CacheMetrics, ServerMetrics
from kedge.server.threads import Threads
from kedge.types import Completion, FinishReason, Receipt, RequestId, ReuseMode, TenantId

A = TenantId("a")


def series(
    metrics: ServerMetrics, tenant: TenantId | None = None, of_all: CacheMetrics | None = None
) -> dict[tuple[str, ...], float]:
    """Values by the sample's name and its labels' values, which are sorted by the labels' names."""
    families = text_string_to_metric_families(metrics.exposition(tenant, of_all).decode())
    samples = [sample for family in families for sample in family.samples]
    return {(one.name, *(value for _, value in sorted(one.labels.items()))): one.value for one in samples}


def test_buckets_are_cumulative_and_inclusive() -> None:
    metrics, name = ServerMetrics("nano"), RequestId("r")
    receipt = Receipt(name, ReuseMode.OFF, ())
    for ttft_ms in (0.5, 1.0, 3.0):
        metrics.finished(A, Completion(name, "x", (1,), FinishReason.STOP, receipt, ttft_ms, total_ms=1e6))
    found = series(metrics, A)
    ttft = "kedge:time_to_first_token_seconds"
    assert [found[f"{ttft}_bucket", bound, "nano", "a"] for bound in ("0.001", "0.005", "+Inf")] == [2, 3, 3]
    assert found[f"{ttft}_sum", "nano", "a"] == pytest.approx(0.0045)
    assert found["kedge:e2e_request_latency_seconds_bucket", "60.0", "nano", "a"] == 0


# the engine's ---------------------------------------------------------------------------------------------------------

PROVED = {"rung": "moved", "mean": 0.001, "bound": None}
FIDELITY = [PROVED, {**PROVED, "mean": 0.0005, "bound": 0.002}, {"rung": "", "mean": None, "bound": None}, None]
FIGURES = {
    "cache": asdict(CacheStats(failed_copies=3, host_cached_blocks=7)),
    "guard": {
        "agents": [{"state": "on", "withheld": one is None, "fidelity": one} for one in FIDELITY],
        "checks_done": 0,
        "checks_dropped": 2,
        "suspicions": 1,
        "breaches": 0,
    },
}


class Inspected(EchoEngine):
    """An engine that answers with `FIGURES` while its gate is open, and `EngineClosed` once it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.asked, self.over = threading.Event(), 0, False
        self.gate.set()

    def inspect(self) -> Mapping[str, Any]:
        self.asked += 1
        assert self.gate.wait(60)
        if self.over:
            raise EngineClosed("engine", None, "over")
        return FIGURES


def shown(metrics: CacheMetrics, tenant: TenantId | None = None) -> dict[tuple[str, ...], float]:
    asyncio.run(metrics.refresh())
    return series(ServerMetrics("nano"), tenant, metrics)


def test_all_figures_are_there_and_a_tenant_sees_none() -> None:
    with Inspected() as engine:
        metrics = CacheMetrics(engine, Threads(engine, 4))
        found = shown(metrics)
        assert not shown(metrics, A)
    names = [*(f"kedge:{name}_total" for name in COUNTERS), *(f"kedge:{name}" for name in GAUGES)]
    assert {(name,) for name in names} <= found.keys()
    told = {
        ("kedge:cache_failed_copies_total",): 3,
        ("kedge:host_cached_blocks",): 7,
        ("kedge:guard_placeholders", "on"): 4,
        ("kedge:guard_placeholders", "shadow"): 0,
        ("kedge:guard_checks_total", "dropped"): 2,
        ("kedge:guard_withheld",): 1,
        ("kedge:guard_suspicions_total",): 1,
        ("kedge:guard_breaches_total",): 0,
        ("kedge:fidelity_proved",): 2,
        ("kedge:fidelity_mean",): 0.001,
        ("kedge:fidelity_bound",): 0.002,
    }
    assert found | told == found, "of proved agents the worst mean, and its bound"


def test_a_busy_engine_is_asked_once_and_shows_its_last_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    with Inspected() as engine:
        metrics = CacheMetrics(engine, Threads(engine, 4))
        shown(metrics)
        monkeypatch.setattr(server_metrics, "PATIENCE", 0.01)
        engine.gate.clear()
        for _ in range(3):
            assert shown(metrics)["kedge:cache_failed_copies_total",] == 3
        assert engine.asked == 2
        engine.gate.set()


def test_an_engine_that_has_ended_or_cannot_tell_is_no_error() -> None:
    with Inspected() as engine:
        engine.over = True
        assert not shown(CacheMetrics(engine, Threads(engine, 4)))
    with EchoEngine() as plain:
        assert not any("failed_copies" in name for name, *_ in shown(CacheMetrics(plain, Threads(plain, 4))))
