from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kedge.server.metrics import NO_TENANT, ServerMetrics
from kedge.types import Completion, FinishReason, Receipt, RequestId, ReuseMode, TenantId

A, B = TenantId("a"), TenantId("b")


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics("nano")


def series(metrics: ServerMetrics, tenant: TenantId | None = None) -> dict[tuple[str, ...], float]:
    """Values by the sample's name and its labels' values, which are sorted by the labels' names."""
    families = text_string_to_metric_families(metrics.exposition(tenant).decode())
    samples = [sample for family in families for sample in family.samples]
    return {(one.name, *(value for _, value in sorted(one.labels.items()))): one.value for one in samples}


def test_a_tenant_sees_its_own_series_only(metrics: ServerMetrics) -> None:
    metrics.run_ended(A, "finished")
    metrics.run_ended(B, "failed")
    metrics.snapshot("failed")
    assert series(metrics, A) == {("kedge:runs_total", "nano", "finished", "a"): 1}
    assert series(metrics, TenantId("c")) == {}
    assert series(metrics) == {
        ("kedge:runs_total", "nano", "finished", "a"): 1,
        ("kedge:runs_total", "nano", "failed", "b"): 1,
        ("kedge:snapshots_total", "nano", "failed", NO_TENANT): 1,
    }


def test_buckets_are_cumulative_and_inclusive(metrics: ServerMetrics) -> None:
    name = RequestId("r")
    receipt = Receipt(name, ReuseMode.OFF, ())
    for ttft_ms in (0.5, 1.0, 3.0):
        metrics.finished(A, Completion(name, "x", (1,), FinishReason.STOP, receipt, ttft_ms, total_ms=1e6))
    found = series(metrics, A)
    ttft = "kedge:time_to_first_token_seconds"
    assert [found[f"{ttft}_bucket", bound, "nano", "a"] for bound in ("0.001", "0.005", "+Inf")] == [2, 3, 3]
    assert found[f"{ttft}_sum", "nano", "a"] == pytest.approx(0.0045)
    assert found["kedge:e2e_request_latency_seconds_bucket", "60.0", "nano", "a"] == 0
