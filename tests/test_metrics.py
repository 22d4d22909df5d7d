from __future__ import annotations

import threading

import pytest

from kedge.errors import ConfigError
from kedge.metrics import Counter, Gauge, Histogram, Registry


def test_snapshot_is_plain_data() -> None:
    registry = Registry()
    requests = registry.register(Counter("requests_total", "Requests.", ["tenant"]))
    blocks = registry.register(Gauge("blocks", "Free blocks."))
    requests.inc(tenant="a")
    requests.inc(2, tenant="a")
    requests.inc(tenant="b")
    blocks.set(7)
    blocks.inc(-2)
    assert registry.snapshot() == {
        "requests_total": {
            "kind": "counter",
            "help": "Requests.",
            "samples": [{"labels": {"tenant": "a"}, "value": 3.0}, {"labels": {"tenant": "b"}, "value": 1.0}],
        },
        "blocks": {"kind": "gauge", "help": "Free blocks.", "samples": [{"labels": {}, "value": 5.0}]},
    }


def test_histogram_buckets_are_cumulative_and_inclusive() -> None:
    ttft = Histogram("ttft_ms", "Time to first token.", buckets=(1, 10))
    for value in (0.5, 1, 5, 10, 11):
        ttft.observe(value)
    assert ttft.snapshot()["samples"] == [{"labels": {}, "count": 5, "sum": 27.5, "buckets": {1: 2, 10: 4}}]


def test_bad_use_is_refused() -> None:
    registry = Registry()
    counter = registry.register(Counter("n", "N.", ["tenant"]))
    with pytest.raises(ConfigError, match="metric='n'"):
        registry.register(Gauge("n", "N."))
    with pytest.raises(ConfigError, match="n=-1"):
        counter.inc(-1, tenant="a")
    with pytest.raises(ConfigError, match="labels of n"):
        counter.inc(model="a")
    with pytest.raises(ConfigError, match="buckets of h"):
        Histogram("h", "H.", buckets=(2, 1))


def test_threads_lose_no_count() -> None:
    counter = Counter("n", "N.")
    threads = [threading.Thread(target=lambda: [counter.inc() for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.snapshot()["samples"][0]["value"] == 2000
