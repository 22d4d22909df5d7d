"""What the plug-in counts, for vLLM's log line and its `/metrics`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from prometheus_client import Counter as PromCounter
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

COUNTERS = {
    "evictions_varying": "Device blocks evicted that followed a fixed prompt.",
    "evictions_labelled": "Device blocks of fixed prompts evicted.",
    "evictions_unlabelled": "Device blocks evicted that belonged to no agent.",
    "host_evictions": "Host blocks evicted.",
    "blocks_loaded": "Blocks copied from the host to the device.",
    "blocks_offloaded": "Blocks copied from the device to the host.",
    "prefetches_completed": "Prefetches that landed before anybody waited.",
    "prefetches_late": "Prefetches that a request waited for.",
    "prefetches_failed": "Prefetches whose copy failed.",
    "failed_copies": "Copies that failed; their blocks were computed.",
    "denied_loads": "Loads that found no room on the device.",
    "skipped_backups": "Fixed prompts that found no room on the host.",
    "loads_that_do_not_pay": "Loads that would have taken longer than computing.",
    "translated_tokens": "Prompt tokens whose KV was translated.",
    "ignored_hints": "Hints that could not be meant.",
    "ignored_labels": "Fixed prompts of agents that no forecast knows.",
    "ignored_forecasts": "Forecasts, or what they say of an agent, that were ignored.",
}
RECEIPTS = "receipts"
"""Where no count but receipts are told: those of requests that were ended from outside, by vLLM's ids."""
NEEDS = "needs"
"""And base prefills that are wanted: pairs of a tenant and tokens. The receipt would tell of them when the answer ends,
which is when the next agent calls that they would have been of use to."""


class KedgeStats(KVConnectorStats):
    """What was counted since the last report: names of `COUNTERS` to numbers; and `RECEIPTS` and `NEEDS`."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        told = {
            RECEIPTS: {**self.data.get(RECEIPTS, {}), **other.data.get(RECEIPTS, {})},
            NEEDS: [*self.data.get(NEEDS, ()), *other.data.get(NEEDS, ())],
        }
        self.data = dict(Counter(_counts(self.data)) + Counter(_counts(other.data)))
        self.data.update({name: value for name, value in told.items() if value})
        return self

    def reduce(self) -> dict[str, int | float]:
        return _counts(self.data)


class KedgePromMetrics(KVConnectorPromMetrics):
    """The same as `vllm:kedge_…` counters, one series for each engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters: Any = metric_types[PromCounter]
        self._series = {
            name: self._for_engines(counters(name=f"vllm:kedge_{name}", documentation=text, labelnames=labelnames))
            for name, text in COUNTERS.items()
        }

    def _for_engines(self, counter: Any) -> dict[int, Any]:
        return {engine: counter.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in _counts(transfer_stats_data).items():
            self._series[name][engine_idx].inc(count)


def _counts(data: dict[str, Any]) -> dict[str, int | float]:
    return {name: count for name, count in data.items() if name not in (RECEIPTS, NEEDS)}
