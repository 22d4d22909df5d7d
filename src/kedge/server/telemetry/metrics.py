"""What a server counts, by tenant, and its exposition for Prometheus. Names follow vLLM's, as `kedge:…`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kedge.metrics import Counter, Gauge, Histogram, Registry
from kedge.server.hints import Ignored
from kedge.types import Completion, ReuseMode, Source, TenantId
from kedge.workflow.forecast import ForecastBoard

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)
TENANT = ("tenant",)


class ServerMetrics:
    """The metrics of one server. Only the event loop's thread updates them, any may read."""

    def __init__(self, model_name: str, board: ForecastBoard) -> None:
        self._registry, self._model_name, self._board = Registry(), model_name, board
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        self.running = gauge("num_requests_running", "Generations whose first token has come.")
        self.waiting = gauge("num_requests_waiting", "Generations that wait for their first token.")
        self.runs = gauge("num_runs_running", "Workflow runs that go on.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished generations.")
        self._generation_tokens = counter("generation_tokens", "Generated tokens.")
        self._by_source = counter("prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "source")
        self._queries = counter("prefix_cache_queries", "Prompt tokens that were looked up in the cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens whose exact KV was found.")
        self._success = counter("request_success", "Finished generations.", "finished_reason")
        self._errors = counter("request_errors", "Calls that were answered with an error.", "status")
        self._ended_runs = counter("runs", "Ended workflow runs.", "status")
        self._ignored = counter("ignored_hints", "Hints that were ignored.", "dialect", "reason")
        self._snapshots = counter("snapshots", "Snapshots of what the engine has learned.", "status")
        self._snapshot_time = gauge("last_snapshot_timestamp_seconds", "When the last complete snapshot was taken.")
        self._ttft = histogram("time_to_first_token_seconds", "From arrival in the engine to the first token.")
        self._latency = histogram("e2e_request_latency_seconds", "From arrival in the engine to the last token.")
        self._per_token = histogram("time_per_output_token_seconds", "Mean time between two tokens of a generation.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return self._registry.register(Counter(f"kedge:{name}", text, TENANT + labels))

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._registry.register(Gauge(f"kedge:{name}", text, TENANT))

    def _histogram(self, name: str, text: str) -> Histogram:
        return self._registry.register(Histogram(f"kedge:{name}", text, TENANT, SECONDS))

    def finished(self, tenant: TenantId, completion: Completion) -> None:
        """Counts a generation that ended with a completion, cancelled ones too."""
        said = completion.receipt
        self._success.inc(tenant=tenant, finished_reason=completion.finish_reason)
        self._prompt_tokens.inc(said.prompt_tokens, tenant=tenant)
        self._generation_tokens.inc(len(completion.tokens), tenant=tenant)
        for source in Source:
            self._by_source.inc(said.tokens(source), tenant=tenant, source=source)
        if said.mode is not ReuseMode.OFF:
            self._queries.inc(said.prompt_tokens, tenant=tenant)
            self._hits.inc(said.exact, tenant=tenant)
        if completion.tokens:
            self._ttft.observe(completion.ttft_ms / 1e3, tenant=tenant)
            self._latency.observe(completion.total_ms / 1e3, tenant=tenant)
        if len(completion.tokens) > 1:
            between = (completion.total_ms - completion.ttft_ms) / 1e3 / (len(completion.tokens) - 1)
            self._per_token.observe(between, tenant=tenant)

    def failed(self, tenant: TenantId, status: int) -> None:
        """Counts a call that was answered with an error; with no known key it is nobody's."""
        self._errors.inc(tenant=tenant, status=str(status))

    def run_ended(self, tenant: TenantId, status: str) -> None:
        """Counts a workflow run."""
        self._ended_runs.inc(tenant=tenant, status=status)

    def ignored(self, tenant: TenantId, ignored: Ignored) -> None:
        """Counts hints that were ignored."""
        for (dialect, reason), count in ignored.items():
            if count:
                self._ignored.inc(count, tenant=tenant, dialect=dialect, reason=reason)

    def snapshot(self, status: str) -> None:
        """Count a snapshot (`saved`, `failed`), one that was not loaded (`refused`), or a file of one (`damaged`).

        They are no tenant's.
        """
        self._snapshots.inc(tenant="", status=status)
        if status == "saved":
            self._snapshot_time.set(time.time(), tenant="")

    def exposition(self, tenant: TenantId | None) -> bytes:
        """Prometheus' text format: a tenant's own series, or everything if None."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Exporter(self._registry, self._model_name, self._board, tenant))
        return generate_latest(registry)


class _Exporter(Collector):
    def __init__(self, registry: Registry, model_name: str, board: ForecastBoard, tenant: TenantId | None) -> None:
        self._registry, self._model_name, self._board, self._tenant = registry, model_name, board, tenant

    def collect(self) -> Iterator[Metric]:
        for name, snapshot in self._registry.snapshot().items():
            samples = [one for one in snapshot["samples"] if self._tenant in (None, one["labels"]["tenant"])]
            yield _family(name, snapshot["kind"], snapshot["help"], samples, self._model_name)
        if self._tenant is None:
            yield self._forecast()

    def _forecast(self) -> Metric:
        family = CounterMetricFamily(
            "kedge:ignored_forecasts", "Forecasts, or what they say of an agent, that were ignored.", labels=["reason"]
        )
        for reason, count in self._board.ignored.items():
            family.add_metric([reason], count)
        return family


def _family(name: str, kind: str, text: str, samples: list[dict[str, Any]], model_name: str) -> Metric:
    labels = [*(samples[0]["labels"] if samples else ()), "model_name"]
    if kind == "histogram":
        histogram = HistogramMetricFamily(name, text, labels=labels)
        for sample in samples:
            histogram.add_metric([*sample["labels"].values(), model_name], _buckets(sample), sample["sum"])
        return histogram
    scalar = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, text, labels=labels)
    for sample in samples:
        scalar.add_metric([*sample["labels"].values(), model_name], sample["value"])
    return scalar


def _buckets(sample: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(str(bound), count) for bound, count in sample["buckets"].items()] + [("+Inf", sample["count"])]
