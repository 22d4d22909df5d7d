"""Hit rates of traces whose sessions have no ids: of LRU, with each session's id as a hint, and without one."""

from __future__ import annotations

from collections.abc import Mapping

from kedge.bench.sessions.cases import Traffic
from kedge.bench.sessions.measure import COLUMNS

LANES = {"stock": "lru", "hinted": "kedge_ids", "plain": "kedge"}
"""Lane -> column of `kedge bench sessions`"""
SHARE = 0.25
"""Capacity over the working set"""


def measure_hits(traffic: Traffic) -> Mapping[str, float]:
    """Return the hit rate of each lane, in shares of all prompt blocks, with a cache of `SHARE` of the working set."""
    capacity = traffic.capacity(SHARE)
    return {lane: round(COLUMNS[column](traffic.arrivals, capacity), 4) for lane, column in LANES.items()}
