"""Metrics of the quality guard, of all tenants together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kedge.guard import GuardState

COUNTERS = {
    "suspicions": "Times that an answer changed, or a check was far off, and a placeholder was withheld.",
    "breaches": "Times that too many answers changed, and anchors were discarded.",
}


def guard_families(figures: Mapping[str, Any]) -> Iterator[Metric]:
    """Iterate over the families of an engine's figures of its guard; none where it has no guard."""
    if not figures:
        return
    states = Counter(one["state"] for one in figures["agents"])
    by_state = GaugeMetricFamily("kedge:guard_placeholders", "Placeholders of agents by state.", labels=["state"])
    for state in GuardState:
        by_state.add_metric([state], states[state])
    yield by_state
    withheld = sum(one["withheld"] for one in figures["agents"])
    yield GaugeMetricFamily("kedge:guard_withheld", "Those that are not translated as answers changed.", value=withheld)
    checks = CounterMetricFamily("kedge:guard_checks", "Checks by outcome.", labels=["outcome"])
    for outcome in ("done", "dropped"):
        checks.add_metric([outcome], figures[f"checks_{outcome}"])
    yield checks
    for name, text in COUNTERS.items():
        yield CounterMetricFamily(f"kedge:guard_{name}", text, value=figures[name])
