"""Hit rates of traces by capacity and number of live sessions: least recently used, and Kedge's own cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kedge.bench.sessions.arrivals import Arrival, SessionBenchSettings, SessionTrace, Traffic, traffic_of
from kedge.bench.sessions.replay import ceiling, kedge_hit_rate, lru_hit_rate

Columns = Mapping[str, Callable[[Sequence[Arrival], int], float]]
"""Name -> hit rate of arrivals with a cache of so many blocks."""
COLUMNS: Columns = {
    "lru": lru_hit_rate,
    "kedge": kedge_hit_rate,
    "kedge_host3": lambda arrivals, capacity: kedge_hit_rate(arrivals, capacity, host_times=3),
}
Leaves = dict[str, dict[str, dict[str, float | None]]]
"""Live sessions -> capacity over the working set, or system -> name -> figure."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class TraceResult:
    """All figures of a trace."""

    open: Leaves = field(default_factory=dict)
    """Hit blocks over blocks of all prompts, by live sessions, capacity over the working set and column."""
    working_sets: dict[str, float] = field(default_factory=dict)
    """Live sessions -> blocks."""
    ceilings: dict[str, float] = field(default_factory=dict)
    """Live sessions -> hit rate of an infinite cache."""

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        return {
            "open": self.open,
            "working_set_blocks": {live: round(blocks, 1) for live, blocks in self.working_sets.items()},
            "ceiling": {live: round(rate, 4) for live, rate in self.ceilings.items()},
        }


def measure(
    settings: SessionBenchSettings,
    traces: Sequence[SessionTrace],
    columns: Columns = COLUMNS,
    progress: Progress = lambda _: None,
) -> dict[str, TraceResult]:
    """Replay all traces. The results are by the traces' names."""
    results = {trace.name: TraceResult() for trace in traces}
    for trace in traces:
        result = results[trace.name]
        for traffic in traffic_of(trace, settings):
            result.working_sets[traffic.live] = traffic.working_set
            result.ceilings[traffic.live] = ceiling(traffic.arrivals)
            cells = result.open[traffic.live] = {}
            for share in settings.capacities:
                progress(f"{trace.name}, {traffic.live} live, {share:g} of the working set")
                cells[f"{share:g}"] = hit_rates(traffic, share, columns)
    return results


def hit_rates(traffic: Traffic, share: float, columns: Columns) -> dict[str, float | None]:
    """Return the hit rate of every column with a cache of a share of the working set."""
    capacity = traffic.capacity(share)
    return {name: round(hit_rate(traffic.arrivals, capacity), 4) for name, hit_rate in columns.items()}
