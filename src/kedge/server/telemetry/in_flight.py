"""Generations of one call or one run in the gauges `num_requests_waiting` and `num_requests_running`."""

from __future__ import annotations

from collections.abc import Hashable

from prometheus_client import Gauge

from kedge.server.telemetry.metrics import ServerMetrics
from kedge.types import TenantId


class InFlight:
    """Generations of one call or run that wait for or have their first token. Belongs to the event loop."""

    def __init__(self, metrics: ServerMetrics, tenant: TenantId) -> None:
        self._metrics, self._tenant = metrics, tenant
        self._stages: dict[Hashable, Gauge] = {}

    def submitted(self, name: Hashable) -> None:
        """Count a generation as waiting."""
        self._move(name, self._metrics.waiting)

    def begun(self, name: Hashable) -> None:
        """Count a generation as running from its first token on; later ones change nothing."""
        if name in self._stages:
            self._move(name, self._metrics.running)

    def ended(self, name: Hashable) -> None:
        """Stop counting a generation; an unknown one changes nothing."""
        self._move(name, None)

    def clear(self) -> None:
        """Stop counting all of them."""
        for name in list(self._stages):
            self.ended(name)

    def _move(self, name: Hashable, to: Gauge | None) -> None:
        if left := self._stages.pop(name, None):
            left.labels(self._tenant).dec()
        if to is not None:
            self._stages[name] = to
            to.labels(self._tenant).inc()
