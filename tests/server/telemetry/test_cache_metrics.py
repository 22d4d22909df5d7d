"""The engine's cache in `/metrics`: the operator's, and never waited for long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pytest

from kedge.cache import CacheStats
from kedge.engine.echo import EchoEngine
from kedge.errors import EngineClosed
from kedge.server import metrics as server_metrics
from kedge.server.metrics import COUNTERS, GAUGES, CacheMetrics, ServerMetrics
from kedge.server.threads import Threads
from kedge.types import Namespace, TenantId, Tokens

FIGURES = asdict(CacheStats(failed_copies=3, host_cached_blocks=7))


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
        return {"cache": FIGURES}

    def inspect_tenants(
        self, owns: Callable[[Namespace], bool], prompts: Sequence[tuple[Namespace, Tokens]]
    ) -> Mapping[str, Any]:
        raise NotImplementedError


def shown(metrics: CacheMetrics, tenant: TenantId | None = None) -> str:
    asyncio.run(metrics.refresh())
    return ServerMetrics("nano").exposition(tenant, metrics).decode()


def test_all_figures_are_there_and_a_tenant_sees_none() -> None:
    with Inspected() as engine:
        metrics = CacheMetrics(engine, Threads(engine, 4))
        text = shown(metrics)
        assert "kedge:cache_failed_copies_total 3.0" in text and "kedge:host_cached_blocks 7.0" in text
        assert all(f"\nkedge:{name} " in text for name in [*(f"cache_{name}_total" for name in COUNTERS), *GAUGES])
        assert "failed_copies" not in shown(metrics, TenantId("a"))


def test_names_are_those_of_the_cache() -> None:
    assert {*COUNTERS, *GAUGES} <= asdict(CacheStats()).keys()


def test_a_busy_engine_is_asked_once_and_shows_its_last_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    with Inspected() as engine:
        metrics = CacheMetrics(engine, Threads(engine, 4))
        shown(metrics)
        monkeypatch.setattr(server_metrics, "PATIENCE", 0.01)
        engine.gate.clear()
        for _ in range(3):
            assert "kedge:cache_failed_copies_total 3.0" in shown(metrics)
        assert engine.asked == 2
        engine.gate.set()


def test_an_engine_that_has_ended_or_cannot_tell_is_no_error() -> None:
    with Inspected() as engine:
        engine.over = True
        assert "failed_copies" not in shown(CacheMetrics(engine, Threads(engine, 4)))
    with EchoEngine() as plain:
        assert "failed_copies" not in shown(CacheMetrics(plain, Threads(plain, 4)))
