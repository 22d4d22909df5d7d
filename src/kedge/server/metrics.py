"""Prometheus metrics: of one server, by tenant, and of its engine's cache and guard, of all tenants together.

Names follow vLLM's, as `kedge:…`.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kedge.engine.base import Engine
from kedge.errors import EngineClosed
from kedge.guard import GuardState
from kedge.hints import IgnoredHints
from kedge.server.history import CallState, History
from kedge.server.threads import Threads
from kedge.types import Completion, Source, TenantId

M = TypeVar("M")
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)
NO_TENANT = ""
"""Label of what belongs to no tenant."""


class ServerMetrics:
    """Metrics of one server. Any thread may update and read them."""

    def __init__(self, model_name: str, history: History | None = None) -> None:
        """`history` has the generations in flight."""
        self._history = history or History()
        self._registry, self._model_name = CollectorRegistry(auto_describe=False), model_name
        counter, gauge = partial(self._made, Counter), partial(self._made, Gauge)
        histogram = partial(self._made, Histogram, buckets=SECONDS)
        self._running = gauge("num_requests_running", "Generations whose first token has come.")
        self._waiting = gauge("num_requests_waiting", "Generations that wait for their first token.")
        self.runs = gauge("num_runs_running", "Workflow runs that go on.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished generations.")
        self._generation_tokens = counter("generation_tokens", "Generated tokens.")
        self._by_source = counter("prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "source")
        self._success = counter("request_success", "Finished generations.", "finished_reason")
        self.errors = counter("request_errors", "Calls that were answered with an error.", "status")
        self.ended_runs = counter("runs", "Ended workflow runs.", "status")
        self._ignored = counter("ignored_hints", "Hints that were ignored.", "dialect", "reason")
        self._snapshots = counter("snapshots", "Snapshots of what the engine has learned.", "status")
        self._snapshot_time = gauge("last_snapshot_timestamp_seconds", "When the last complete snapshot was taken.")
        self._ttft = histogram("time_to_first_token_seconds", "From arrival in the engine to the first token.")
        self._latency = histogram("e2e_request_latency_seconds", "From arrival in the engine to the last token.")
        self._per_token = histogram("time_per_output_token_seconds", "Mean time between two tokens of a generation.")

    def _made(self, kind: Callable[..., M], name: str, text: str, *labels: str, **options: Any) -> M:
        return kind(f"kedge:{name}", text, ("tenant", *labels), registry=self._registry, **options)

    def finished(self, tenant: TenantId, completion: Completion) -> None:
        """Count a generation that ended with a completion, including cancelled ones."""
        receipt, tokens = completion.receipt, len(completion.tokens)
        self._success.labels(tenant, completion.finish_reason).inc()
        self._prompt_tokens.labels(tenant).inc(receipt.prompt_tokens)
        self._generation_tokens.labels(tenant).inc(tokens)
        for source in Source:
            self._by_source.labels(tenant, source).inc(receipt.tokens(source))
        if tokens:
            self._ttft.labels(tenant).observe(completion.ttft_ms / 1e3)
            self._latency.labels(tenant).observe(completion.total_ms / 1e3)
        if tokens > 1:
            between = (completion.total_ms - completion.ttft_ms) / 1e3 / (tokens - 1)
            self._per_token.labels(tenant).observe(between)

    def ignored(self, tenant: TenantId, ignored: IgnoredHints) -> None:
        """Count hints that were ignored."""
        for (dialect, reason), count in ignored.items():
            if count:
                self._ignored.labels(tenant, dialect, reason).inc(count)

    def snapshot(self, status: str) -> None:
        """Count a snapshot (`saved`, `failed`), one that was not loaded (`refused`), or a file of one (`damaged`)."""
        self._snapshots.labels(NO_TENANT, status).inc()
        if status == "saved":
            self._snapshot_time.labels(NO_TENANT).set(time.time())

    def exposition(self, tenant: TenantId | None, of_all: Collector | None = None) -> bytes:
        """Return the metrics in Prometheus' text format: one tenant's series, or for None all, with those `of_all`
        tenants together.
        """
        for name, states in self._history.in_flight().items():
            self._waiting.labels(name).set(states[CallState.WAITING])
            self._running.labels(name).set(states[CallState.RUNNING])
        families = list(self._registry.collect())
        for family in families:  # with the model's name as a label, and without creation times
            family.samples = [
                sample._replace(labels={**sample.labels, "model_name": self._model_name})
                for sample in family.samples
                if not sample.name.endswith("_created") and tenant in (None, sample.labels["tenant"])
            ]
        if tenant is None and of_all is not None:
            families += of_all.collect()
        return generate_latest(_Families(families))


class _Families(list[Metric], Collector):
    def collect(self) -> Iterable[Metric]:
        return self


PATIENCE = 0.5
"""Longest wait for a busy engine, in seconds; then the figures of the last answer are shown."""
COUNTERS = {
    "cache_evictions": "Blocks evicted from the device.",
    "cache_host_evictions": "Blocks evicted from the host.",
    "cache_blocks_loaded": "Blocks copied from the host to the device.",
    "cache_blocks_offloaded": "Blocks copied from the device to the host.",
    "cache_failed_copies": "Copies that failed; their blocks were computed.",
    "cache_skipped_backups": "Backups that found no room on the host.",
    "guard_suspicions": "Times that an answer changed, or a check was far off, and a placeholder was withheld.",
    "guard_breaches": "Times that too many answers changed, and anchors were discarded.",
}
GAUGES = {
    "cached_blocks": "Blocks cached on the device.",
    "host_cached_blocks": "Blocks cached on the host.",
    "guard_withheld": "Placeholders of agents that are not translated as answers changed.",
    "fidelity_proved": "Placeholders of agents that are proved to be within their budget of fidelity.",
    "fidelity_mean": "Highest mean divergence (KL, nats a token) of a proved agent from dense prefill.",
    "fidelity_bound": "Highest upper confidence bound of such a mean.",
}


class CacheMetrics(Collector):
    """The figures of an engine's cache, of all tenants together. The event loop owns it."""

    def __init__(self, engine: Engine, threads: Threads) -> None:
        self._engine, self._threads = engine, threads
        self._seen: Mapping[str, Any] = {}

    async def refresh(self) -> None:
        """Ask the engine, and wait for it for `PATIENCE` seconds at most."""

        def ask() -> Mapping[str, Any]:
            try:
                return self._engine.inspect()
            except EngineClosed:
                return {}

        with suppress(TimeoutError):
            self._seen = await asyncio.wait_for(self._threads.ask("metrics", ask), PATIENCE) or self._seen

    def collect(self) -> Iterator[Metric]:
        """Iterate over the families of the figures that the engine has."""
        cache, guard = self._seen.get("cache", {}), self._seen.get("guard")
        found = {**cache, **{f"cache_{name}": value for name, value in cache.items()}}
        if guard:
            proved = [one["fidelity"] for one in guard["agents"] if one["fidelity"] and one["fidelity"]["rung"]]
            found |= {f"guard_{name}": guard[name] for name in ("suspicions", "breaches")}
            found |= {"guard_withheld": sum(one["withheld"] for one in guard["agents"]), "fidelity_proved": len(proved)}
            for name in ("mean", "bound"):
                found[f"fidelity_{name}"] = max((one[name] for one in proved if one[name] is not None), default=0.0)
        for family, texts in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, text in texts.items():
                if name in found:
                    yield family(f"kedge:{name}", text, value=found[name])
        if guard:
            states = GaugeMetricFamily("kedge:guard_placeholders", "Placeholders of agents by state.", labels=["state"])
            for state in GuardState:
                states.add_metric([state], sum(one["state"] == state for one in guard["agents"]))
            checks = CounterMetricFamily("kedge:guard_checks", "Checks by outcome.", labels=["outcome"])
            for outcome in ("done", "dropped"):
                checks.add_metric([outcome], guard[f"checks_{outcome}"])
            yield from (states, checks)
