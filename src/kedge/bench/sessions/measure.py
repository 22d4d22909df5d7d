"""Hit rates of traces by capacity and number of live sessions: baselines, and Kedge's own cache (open loop)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kedge.bench.sessions.baselines import belady_hit_rate, ceiling, lru_hit_rate
from kedge.bench.sessions.cases import SessionBenchSettings, SessionTrace, Traffic, traffic_of
from kedge.bench.sessions.composing import Arrival
from kedge.bench.sessions.cost import SessionCost, measure_cost
from kedge.bench.sessions.product import PRODUCT_CASES, product_hit_rate
from kedge.bench.sessions.ttl import ttl_hit_rate
from kedge.bench.sessions.turns import Conversation

COST_SHARE = 0.25
"""Capacity over the working set at which costs are measured."""
COLUMNS: Mapping[str, Callable[[Sequence[Arrival], int], float]] = {
    "lru": lru_hit_rate,
    "belady": belady_hit_rate,
    "ttl": ttl_hit_rate,
    **{name: partial(product_hit_rate, case) for name, case in PRODUCT_CASES.items()},
}
"""Name -> hit rate of arrivals with a cache of so many blocks."""
Leaves = dict[str, dict[str, dict[str, float | None]]]
"""Live sessions -> capacity over the working set, or system -> name -> figure."""
Progress = Callable[[str], None]
ClosedLoop = Callable[[Sequence[Conversation], Progress], Leaves]


@dataclass(frozen=True)
class TraceResult:
    """All figures of a trace."""

    name: str
    open: Leaves = field(default_factory=dict)
    """Hit blocks over blocks of all prompts, by live sessions, capacity over the working set and column."""
    closed: Leaves = field(default_factory=dict)
    """Figures of the closed loop by live sessions and system."""
    working_sets: dict[str, float] = field(default_factory=dict)
    """Live sessions -> blocks."""
    ceilings: dict[str, float] = field(default_factory=dict)
    """Live sessions -> hit rate of an infinite cache."""

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        return {
            "open": self.open,
            "closed": self.closed,
            "working_set_blocks": {live: round(blocks, 1) for live, blocks in self.working_sets.items()},
            "ceiling": {live: round(rate, 4) for live, rate in self.ceilings.items()},
        }


@dataclass(frozen=True)
class SessionsResult:
    """The results of all traces, and what caching by session costs."""

    traces: Sequence[TraceResult]
    cost: SessionCost

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        return {"traces": {one.name: one.as_json() for one in self.traces}, "cost": self.cost.as_json()}


def measure(
    settings: SessionBenchSettings,
    traces: Sequence[SessionTrace],
    closed_loop: ClosedLoop | None = None,
    progress: Progress = lambda _: None,
) -> SessionsResult:
    """Replay all traces. Costs are measured on the first one, with as many live sessions as it is replayed with."""
    results = [_result(trace, settings, closed_loop, progress) for trace in traces]
    progress("cost")
    *_, most = traffic_of(traces[0], settings)
    return SessionsResult(results, measure_cost(most.arrivals, most.capacity(COST_SHARE)))


def _result(
    trace: SessionTrace, settings: SessionBenchSettings, closed_loop: ClosedLoop | None, progress: Progress
) -> TraceResult:
    result = TraceResult(trace.name)
    for traffic in traffic_of(trace, settings):
        result.working_sets[traffic.live] = traffic.working_set
        result.ceilings[traffic.live] = ceiling(traffic.arrivals)
        cells = result.open[traffic.live] = {}
        for share in settings.capacities:
            progress(f"{trace.name}, {traffic.live} live, {share:g} of the working set")
            cells[f"{share:g}"] = hit_rates(traffic, share)
    if closed_loop:
        result.closed.update(closed_loop(trace.conversations, lambda note: progress(f"{trace.name}, {note}")))
    return result


def hit_rates(traffic: Traffic, share: float) -> dict[str, float | None]:
    """Return the hit rate of every column with a cache of a share of the working set."""
    capacity = traffic.capacity(share)
    return {name: round(hit_rate(traffic.arrivals, capacity), 4) for name, hit_rate in COLUMNS.items()}
