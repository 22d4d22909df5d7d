"""Metrics of the engine's cache and its guard, as they were when the engine last had time to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kedge.engine.base import Engine
from kedge.errors import EngineClosed
from kedge.server.telemetry.guard_metrics import guard_families
from kedge.server.threads import Threads

PATIENCE = 0.5
"""Longest wait for a busy engine, in seconds; then the figures of the last answer are shown."""
COUNTERS = {
    "hit_tokens": "Prompt tokens whose KV was on the device when their request was admitted.",
    "host_hit_tokens": "Those of them that a request had to wait for.",
    "evictions": "Blocks evicted from the device.",
    "host_evictions": "Blocks evicted from the host.",
    "blocks_loaded": "Blocks copied from the host to the device.",
    "blocks_offloaded": "Blocks copied from the device to the host.",
    "failed_copies": "Copies that failed; their blocks were computed.",
    "corrupt_blocks": "Host blocks with another content than was copied there; they were dropped and computed.",
    "skipped_backups": "Backups that found no room on the host.",
}
DISK_COUNTERS = {
    "written": "Blocks written to the disk.",
    "read": "Blocks read from the disk.",
    "evicted": "Blocks deleted from the disk to make room.",
    "skipped": "Blocks not written, as the disk was behind, had failed or had no room.",
    "failed": "Blocks not read, as a file was gone or unreadable, or the host had no room.",
    "corrupt": "Blocks not read, as their file was damaged.",
}
GAUGES = {
    "cached_blocks": "Blocks cached on the device.",
    "host_cached_blocks": "Blocks cached on the host.",
    "disk_blocks": "Blocks on disk.",
}


class CacheMetrics(Collector):
    """The figures of an engine's cache, of all tenants together. The event loop owns it."""

    def __init__(self, engine: Engine, threads: Threads) -> None:
        self._engine, self._threads = engine, threads
        self._look: Future[Mapping[str, Any]] | None = None
        self._seen: Mapping[str, Any] = {}

    async def refresh(self) -> None:
        """Ask the engine, unless it still owes an answer, and wait for it for `PATIENCE` seconds at most."""
        if self._look is None:
            self._look = self._threads.wait(self._ask)
        look = self._look
        await asyncio.wait([asyncio.wrap_future(look)], timeout=PATIENCE)
        if look.done():
            self._look = None if self._look is look else self._look
            self._seen = look.result() or self._seen

    def _ask(self) -> Mapping[str, Any]:
        try:
            return self._engine.inspect()
        except EngineClosed:
            return {}

    def collect(self) -> Iterator[Metric]:
        """Iterate over the families of the figures that the engine has."""
        cache = self._seen.get("cache", {})
        disk = cache.get("disk", {})
        counts = {f"cache_{name}": (text, cache.get(name)) for name, text in COUNTERS.items()}
        counts |= {f"disk_{name}_blocks": (text, disk.get(name)) for name, text in DISK_COUNTERS.items()}
        for name, (text, value) in counts.items():
            if value is not None:
                yield CounterMetricFamily(f"kedge:{name}", text, value=value)
        for name, text in GAUGES.items():
            if name in cache:
                yield GaugeMetricFamily(f"kedge:{name}", text, value=cache[name])
        yield from guard_families(self._seen.get("guard", {}))
