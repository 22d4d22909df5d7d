"""Counters, gauges and histograms with labels, and no dependency. `Registry.snapshot` feeds any exporter."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

from kedge.errors import ConfigError

LATENCY_MS = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10000.0)
LabelValues = tuple[str, ...]
Sample = tuple[LabelValues, dict[str, Any]]


class Metric(ABC):
    """A named family of series, one for each combination of label values. Any thread may update it."""

    kind: ClassVar[str]

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.name, self.text, self.labels = name, text, tuple(labels)
        self._lock = threading.Lock()
        self._series: dict[LabelValues, Any] = {}

    def snapshot(self) -> dict[str, Any]:
        """Kind, help text and samples as plain data."""
        with self._lock:
            samples = [{"labels": dict(zip(self.labels, key, strict=True)), **data} for key, data in self._samples()]
        return {"kind": self.kind, "help": self.text, "samples": samples}

    @abstractmethod
    def _samples(self) -> list[Sample]: ...

    def _key(self, labels: dict[str, str]) -> LabelValues:
        if labels.keys() != set(self.labels):
            raise ConfigError(f"labels of {self.name}", sorted(labels), f"expected {sorted(self.labels)}")
        return tuple(str(labels[label]) for label in self.labels)


class _Scalar(Metric):
    def inc(self, amount: float = 1.0, **labels: str) -> None:
        """Adds `amount`."""
        key = self._key(labels)
        with self._lock:
            self._series[key] = self._series.get(key, 0.0) + amount

    def _samples(self) -> list[Sample]:
        return [(key, {"value": value}) for key, value in self._series.items()]


class Counter(_Scalar):
    """A number that only grows."""

    kind = "counter"

    def inc(self, amount: float = 1.0, **labels: str) -> None:
        """Adds `amount`; `ConfigError` if it is negative."""
        if amount < 0:
            raise ConfigError(self.name, amount, "a counter only grows")
        super().inc(amount, **labels)


class Gauge(_Scalar):
    """A number that goes up and down."""

    kind = "gauge"

    def set(self, value: float, **labels: str) -> None:
        """The series' value from now on."""
        with self._lock:
            self._series[self._key(labels)] = value


class Histogram(Metric):
    """How observations are spread: cumulative counts at `buckets` (upper bounds, inclusive, ascending), sum, count."""

    kind = "histogram"

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = LATENCY_MS) -> None:
        super().__init__(name, text, labels)
        if list(buckets) != sorted(set(buckets)):
            raise ConfigError(f"buckets of {name}", buckets, "must ascend")
        self.buckets = tuple(buckets)

    def observe(self, value: float, **labels: str) -> None:
        """Counts one observation."""
        key = self._key(labels)
        with self._lock:
            counts, total = self._series.get(key) or ([0] * (len(self.buckets) + 1), 0.0)
            counts[bisect_left(self.buckets, value)] += 1
            self._series[key] = (counts, total + value)

    def _samples(self) -> list[Sample]:
        return [(key, self._spread(*series)) for key, series in self._series.items()]

    def _spread(self, counts: list[int], total: float) -> dict[str, Any]:
        *below, count = accumulate(counts)
        return {"count": count, "sum": total, "buckets": dict(zip(self.buckets, below, strict=True))}


AnyMetric = TypeVar("AnyMetric", bound=Metric)


class Registry:
    """Metrics by name."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def register(self, metric: AnyMetric) -> AnyMetric:
        """Adds `metric` and returns it. Raises `ConfigError` if its name is taken."""
        if self._metrics.setdefault(metric.name, metric) is not metric:
            raise ConfigError("metric", metric.name, "registered twice")
        return metric

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Every metric's snapshot by name."""
        return {name: metric.snapshot() for name, metric in self._metrics.items()}
