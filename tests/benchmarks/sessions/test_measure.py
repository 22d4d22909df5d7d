"""All that is measured of sessions: Belady against a naive twin and a reference simulator, columns, loop and costs."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given

from benchmarks.sessions.measure import COLUMNS, belady_hit_rate, measure
from kedge.bench.sessions.arrivals import SLICE, Arrival, load_traces
from kedge.bench.sessions.measure import ceiling
from kedge.cli.bench_tables import SESSION_COLUMNS
from tests.bench.sessions.builders import shipped_traffic, traffic
from tests.bench.sessions.test_measure import CAPACITIES, SETTINGS, naive_hits, total
from tests.cli.commands import measured

REFERENCE = {0.1: 0.1760, 0.25: 0.5689, 0.5: 0.8852}
"""Belady by an independent simulator: 8 live, gaps cut at 3,600 s, 1,000 requests."""


def test_figures_are_those_of_the_reference() -> None:
    shipped = shipped_traffic()
    for share, expected in REFERENCE.items():
        capacity = shipped.capacity(share)
        assert belady_hit_rate(shipped.arrivals, capacity) == pytest.approx(expected, abs=1e-3)


def naive_belady(arrivals: list[Arrival], capacity: int) -> int:
    """Look through all that is to come for each victim, and remember depths of blocks as last used."""
    cached: list[int] = []
    depth: dict[int, int] = {}
    hits = 0
    for number, one in enumerate(arrivals):
        chain = one.chain[:capacity]
        hits += naive_hits(chain, cached)
        new = [block for block in chain if block not in cached]

        def next_use(block: int, future: list[Arrival] = arrivals[number:]) -> float:
            return next((later.at for later in future if block in later.chain), inf)

        while len(cached) + len(new) > capacity:
            others = [block for block in cached if block not in chain]
            cached.remove(max(others, key=lambda block: (next_use(block), depth[block], -block)))
        cached += new
        depth |= {block: at for at, block in enumerate(chain)}
    return hits


@given(traffic(), CAPACITIES)
def test_belady_is_its_naive_twin_and_room_for_everything_gives_the_ceiling(
    arrivals: list[Arrival], capacity: int
) -> None:
    assert belady_hit_rate(arrivals, capacity) == pytest.approx(naive_belady(arrivals, capacity) / total(arrivals))
    assert belady_hit_rate(arrivals, total(arrivals)) == ceiling(arrivals)


def test_every_cell_has_every_column_and_belady_is_the_bound() -> None:
    said: list[str] = []
    data = measure(replace(SETTINGS, live=(2, 4)), load_traces([SLICE]), lambda *_: {}, said.append)
    assert json.loads(json.dumps(data)) == data
    assert list(SESSION_COLUMNS) == list(COLUMNS)
    (trace,) = data["traces"].values()
    assert list(trace["open"]) == ["2", "4"] and trace["closed"] == {}
    for live in ("2", "4"):
        cell = trace["open"][live]["0.25"]
        assert list(cell) == list(COLUMNS)
        assert all(cell[name] <= cell["belady"] + 0.001 for name in ("lru", "kedge"))
        assert cell["belady"] <= cell["kedge_host3"] <= trace["ceiling"][live]
        assert trace["working_set_blocks"][live] > 0
    assert set(data["cost"]) == {"us_per_request", "ns_per_block", "ns_per_block_lru"}
    assert all(value > 0 for value in data["cost"].values())
    assert said[0] == "claude_code_slice, 2 live, 0.25 of the working set" and said[-1] == "cost"


def test_the_command_prints_and_writes_all_of_it(tmp_path: Path) -> None:
    asked = ["--live", "2", "--capacity", "0.5", "--requests", "60"]
    saved, shown = measured(tmp_path, "bench", "sessions", "--full", *asked)
    assert "claude_code_slice, closed loop" in shown and "cost: " in shown
    assert list(saved["traces"]["claude_code_slice"]["open"]["2"]["0.5"]) == list(COLUMNS)
