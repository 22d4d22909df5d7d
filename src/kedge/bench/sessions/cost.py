"""What caching by session costs on this machine: per request for what is learned, per block in the cache."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count

from kedge.bench.sessions.composing import Arrival
from kedge.bench.sessions.product import PRODUCT_CASES, product_replay
from kedge.bench.sessions.replay import CacheReplay
from kedge.cache import CacheManager

PROBE_BLOCKS, PROBE_EVERY = 256, 5
"""Blocks of a probe, a prompt that was never sent before; arrivals between two probes."""


@dataclass(frozen=True)
class SessionCost:
    """Medians on the real clock."""

    us_per_request: float
    """Microseconds per request to find its session, to learn from it and to keep ranks up to date."""
    ns_per_block: float
    """Nanoseconds per block to allocate blocks, for which others are evicted, and to cache them."""
    ns_per_block_lru: float
    """The same in a cache that evicts the least recently used."""

    def as_json(self) -> dict[str, float]:
        """Return the figures as written to a file of results."""
        names = ("us_per_request", "ns_per_block", "ns_per_block_lru")
        return {name: round(getattr(self, name), 1) for name in names}


def measure_cost(arrivals: Sequence[Arrival], capacity: int) -> SessionCost:
    """Replay arrivals through caches of `capacity` blocks, by session and by LRU, with probes between them."""
    by_session, by_recency = product_replay(PRODUCT_CASES["kedge"], capacity), CacheReplay(CacheManager(capacity, 1))
    seconds, ns_per_block = _times(by_session, arrivals)
    _, ns_per_block_lru = _times(by_recency, arrivals)
    return SessionCost(seconds * 1e6, ns_per_block * 1e9, ns_per_block_lru * 1e9)


def _times(replay: CacheReplay, arrivals: Sequence[Arrival]) -> tuple[float, float]:
    """Return median seconds per request in the hooks, and per block of the probes in the cache."""
    hooks, cached = [], []
    unused = count(1 + max(max(one.chain, default=0) for one in arrivals), PROBE_BLOCKS)
    with _no_garbage_collection():
        for number, arrival in enumerate(arrivals):
            hooks.append(_spent(replay, arrival)[0])
            if number % PROBE_EVERY == 0:
                cached.append(_spent(replay, _probe(arrival, next(unused)))[1])
    return statistics.median(hooks), statistics.median(cached) / min(PROBE_BLOCKS, replay.cache.num_blocks)


def _spent(replay: CacheReplay, arrival: Arrival) -> tuple[float, float]:
    """Serve a request. Returns seconds in the hooks and in the cache."""
    hooks, cache = replay.hook_time.seconds, replay.cache_time.seconds
    replay.serve(arrival)
    return replay.hook_time.seconds - hooks, replay.cache_time.seconds - cache


def _probe(arrival: Arrival, first: int) -> Arrival:
    """Return the only request of a new session, at the time of another one; its blocks are numbered from `first`."""
    chain = tuple(range(first, first + PROBE_BLOCKS))
    turn = replace(arrival.turn, chain=chain, fixed_blocks=0)
    return Arrival(arrival.at, f"probe-{first}", turn, chain)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
