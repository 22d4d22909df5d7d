"""All that is measured of sessions: hit rates in every column, the closed loop, and costs (`kedge bench sessions`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.sessions.baselines import belady_hit_rate, ttl_hit_rate
from benchmarks.sessions.closed import ClosedSettings, closed_loop
from benchmarks.sessions.product import PRODUCT_CASES, measure_cost, product_hit_rate
from kedge.bench.sessions import measure as open_loop
from kedge.bench.sessions.arrivals import SessionBenchSettings, SessionTrace, traffic_of
from kedge.bench.sessions.measure import Columns, Leaves, Progress
from kedge.bench.sessions.replay import lru_hit_rate
from kedge.bench.sessions.traces import Conversation

COST_SHARE = 0.25
"""Capacity over the working set at which costs are measured."""
COLUMNS: Columns = {
    "lru": lru_hit_rate,
    "belady": belady_hit_rate,
    "ttl": ttl_hit_rate,
    **{name: partial(product_hit_rate, case) for name, case in PRODUCT_CASES.items()},
}
ClosedLoop = Callable[[Sequence[Conversation], Progress], Leaves]


def measure(
    settings: SessionBenchSettings,
    traces: Sequence[SessionTrace],
    closed: ClosedLoop | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Return the figures of all traces as written to a file of results.

    Costs are measured on the first one, with as many live sessions as it is replayed with.
    """
    closed = closed or partial(closed_loop, settings.live, ClosedSettings(seed=settings.seed))
    results = open_loop.measure(settings, traces, COLUMNS, progress)
    found = {name: result.as_json() for name, result in results.items()}
    for trace in traces:

        def note(what: str, name: str = trace.name) -> None:
            progress(f"{name}, {what}")

        found[trace.name]["closed"] = closed(trace.conversations, note)
    progress("cost")
    *_, most = traffic_of(traces[0], settings)
    return {"traces": found, "cost": measure_cost(most.arrivals, most.capacity(COST_SHARE)).as_json()}
