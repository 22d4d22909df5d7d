"""The plug-in's counters, for vLLM's log line and its `/metrics`."""

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

REPORT_SECONDS = 1.0
"""Seconds between two reports of counts while requests run"""
COUNTERS = {
    "evictions_varying": "Device blocks evicted that followed a fixed prompt.",
    "evictions_labelled": "Device blocks of fixed prompts evicted.",
    "evictions_unlabelled": "Device blocks evicted that belonged to no agent.",
    "host_evictions": "Host blocks evicted.",
    "host_evictions_over_quota": "Host blocks evicted as their tenant held as much as it may.",
    "blocks_loaded": "Blocks copied from the host to the device.",
    "blocks_offloaded": "Blocks copied from the device to the host.",
    "prefetches_completed": "Prefetches that landed before a request waited for them.",
    "prefetches_late": "Prefetches that a request waited for.",
    "prefetches_failed": "Prefetches whose copy failed.",
    "failed_copies": "Copies that failed; their blocks were computed.",
    "denied_loads": "Loads that found no room on the device.",
    "skipped_backups": "Fixed prompts that found no room on the host.",
    "loads_that_do_not_pay": "Loads that would have taken longer than computing.",
    "translated_tokens": "Prompt tokens whose KV was translated.",
    "base_prefills_queued": "Base prefills that the scheduler has been asked for.",
    "base_prefills_done": "Base prefills that it has computed.",
    "base_prefills_dropped": "Base prefills that it has given up: for want of blocks, or as too many waited.",
    "ignored_hints": "Hints with a name or value that is not accepted.",
    "ignored_labels": "Fixed prompts of agents without a forecast.",
    "ignored_forecasts": "Forecasts, or their entries for single agents, that were ignored.",
}


class KedgeStats(KVConnectorStats):
    """Counts since the last report by names of `COUNTERS`."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return self.data


class KedgePromMetrics(KVConnectorPromMetrics):
    """The counters as `vllm:kedge_…` in Prometheus, one series for each engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters: Any = metric_types[PromCounter]
        self._series: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            counter = counters(name=f"vllm:kedge_{name}", documentation=text, labelnames=labelnames)
            self._series[name] = {one: counter.labels(*values) for one, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._series[name][engine_idx].inc(count)
