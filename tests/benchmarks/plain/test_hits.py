"""Hit rates of a small trace: sessions that pause are found in the cache, with ids and without."""

from __future__ import annotations

from benchmarks.plain.measure import measure_hits
from kedge.bench.sessions.arrivals import SLICE, SessionBenchSettings, load_traces, traffic_of
from kedge.bench.sessions.measure import lru_hit_rate


def test_what_is_found_without_ids_is_measured_beside_lru_and_ids() -> None:
    (trace,) = load_traces([SLICE])
    (traffic,) = traffic_of(trace, SessionBenchSettings(live=(6,), requests=300))
    found = measure_hits(traffic)
    assert found["stock"] == round(lru_hit_rate(traffic.arrivals, traffic.capacity(0.25)), 4)
    assert 0 < found["stock"] <= min(found["hinted"], found["plain"]) < 1
