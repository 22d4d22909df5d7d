"""The plug-in's counters, for vLLM's log line and its `/metrics`."""

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

from kedge.integrations.vllm.plugin.advice_calls import AdviceCalls

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
    "corrupt_blocks": "Host blocks with another content than was copied there; they were dropped and computed.",
    "denied_loads": "Loads that found no room on the device.",
    "skipped_backups": "Fixed prompts that found no room on the host.",
    "loads_that_do_not_pay": "Loads that would have taken longer than computing.",
    "translated_tokens": "Prompt tokens whose KV was translated.",
    "base_prefills_queued": "Base prefills that the scheduler has been asked for.",
    "base_prefills_done": "Base prefills that it has computed.",
    "base_prefills_dropped": "Base prefills that it has given up: for want of blocks, or as too many waited.",
    "snapshots_saved": "Snapshots of what a rank has learned that were written to its folder.",
    "snapshots_failed": "Snapshots that could not be written.",
    "snapshots_refused": "Starts of a rank at which its folder held the state of another model or rank.",
    "snapshots_damaged": "Damaged files of saved state; they were put aside.",
    "ignored_hints": "Hints with a name or value that is not accepted.",
    "ignored_labels": "Fixed prompts of agents without a forecast.",
    "ignored_forecasts": "Forecasts, or their entries for single agents, that were ignored.",
}
RECEIPTS = "receipts"
"""Key of the receipts of aborted requests, by vLLM's request ids: the outputs of those carry none."""
NEEDS = "needs"
"""Key of the base prefills that are wanted, as pairs of a namespace and tokens. A receipt carries them too, but comes
with the end of the answer, when the next agent already calls."""


ADVICE = "advice"
"""Key of what became of hints without a prompt, by the ids of their messages: those have no output either."""
REPORT = "report"
"""Key of the report of plain traffic (`PlainRequests.report`)."""
ADVICE_CALLS = AdviceCalls()
"""Hints that were sent by the middleware in the process of vLLM's server."""
REPORTS: dict[int, dict[str, Any]] = {}
"""Engine -> its last report, in the process of vLLM's server: `kedge.integrations.vllm.middleware` shows them."""


class KedgeStats(KVConnectorStats):
    """Counts since the last report by names of `COUNTERS`, with `RECEIPTS`, `ADVICE`, `NEEDS` and `REPORT`."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        others = {
            RECEIPTS: {**self.data.get(RECEIPTS, {}), **other.data.get(RECEIPTS, {})},
            ADVICE: {**self.data.get(ADVICE, {}), **other.data.get(ADVICE, {})},
            NEEDS: [*self.data.get(NEEDS, ()), *other.data.get(NEEDS, ())],
            REPORT: other.data.get(REPORT) or self.data.get(REPORT),
        }
        self.data = dict(Counter(_counts(self.data)) + Counter(_counts(other.data)))
        self.data.update({name: value for name, value in others.items() if value})
        return self

    def reduce(self) -> dict[str, int | float]:
        return _counts(self.data)


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
        self._series = {
            name: self._for_engines(counters(name=f"vllm:kedge_{name}", documentation=text, labelnames=labelnames))
            for name, text in COUNTERS.items()
        }

    def _for_engines(self, counter: Any) -> dict[int, Any]:
        return {engine: counter.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if report := transfer_stats_data.get(REPORT):
            REPORTS[engine_idx] = report
        ADVICE_CALLS.answered(transfer_stats_data.get(ADVICE, {}))
        for name, count in _counts(transfer_stats_data).items():
            self._series[name][engine_idx].inc(count)


def _counts(data: dict[str, Any]) -> dict[str, int | float]:
    return {name: count for name, count in data.items() if name not in (RECEIPTS, ADVICE, NEEDS, REPORT)}
