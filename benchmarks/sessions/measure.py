"""All that is measured of sessions: hit rates in every column, the closed loop, and costs (`kedge bench sessions`)."""

import gc
import heapq
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf
from time import perf_counter
from typing import Any

from benchmarks.sessions.closed import ClosedSettings, Leaves, closed_loop
from kedge.bench.sessions import measure as open_loop
from kedge.bench.sessions.arrivals import Arrival, Conversation, SessionBenchSettings, traffic_of
from kedge.bench.sessions.measure import CacheReplay, Columns, Progress, hit_rate, tiered_cache
from kedge.cache import CacheManager, Lease
from kedge.structures.prefixes import cached_length
from kedge.types import RequestId


def belady_hit_rate(arrivals: Sequence[Arrival], capacity: int) -> float:
    """Return the hit rate of `capacity` blocks that evict what is used again last, of equals the deepest."""
    cache = _BeladyCache(capacity)
    hits = sum(
        cache.serve(one.chain[:capacity], uses) for one, uses in zip(arrivals, _next_uses(arrivals), strict=True)
    )
    return hit_rate(hits, arrivals)


def _next_uses(arrivals: Sequence[Arrival]) -> Iterator[list[float]]:
    """Yield when each block of each chain is used next, `inf` for never."""
    following: dict[int, float] = {}
    uses = []
    for one in reversed(arrivals):
        uses.append([following.get(block, inf) for block in one.chain])
        following.update(dict.fromkeys(one.chain, one.at))
    return reversed(uses)


_Entry = tuple[float, int, int]
"""Negative time of next use, negative depth, block: the least is evicted first."""


class _BeladyCache:
    """Blocks with the times of their next use. The heap keeps outdated entries until they surface."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._cached: dict[int, _Entry] = {}
        self._heap: list[_Entry] = []

    def serve(self, chain: Sequence[int], uses: Sequence[float]) -> int:
        """Serve a prompt whose blocks are used next at `uses`. Returns how many blocks hit."""
        hits = cached_length(chain, self._cached)
        new = sum(block not in self._cached for block in chain)
        self._evict(len(self._cached) + new - self._capacity, set(chain))
        for depth, (block, use) in enumerate(zip(chain, uses, strict=False)):
            entry = (-use, -depth, block)
            if self._cached.get(block) != entry:
                self._cached[block] = entry
                heapq.heappush(self._heap, entry)
        return hits

    def _evict(self, count: int, kept: set[int]) -> None:
        spared = []
        while count > 0:
            entry = heapq.heappop(self._heap)
            if self._cached.get(entry[2]) != entry:
                continue
            if entry[2] in kept:
                spared.append(entry)
                continue
            del self._cached[entry[2]]
            count -= 1
        for entry in spared:
            heapq.heappush(self._heap, entry)


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
    seconds, ns_per_block = _times(TimedReplay(tiered_cache(capacity)), arrivals)
    _, ns_per_block_lru = _times(TimedReplay(CacheManager(capacity, 1), has_sessions=False), arrivals)
    return SessionCost(seconds * 1e6, ns_per_block * 1e9, ns_per_block_lru * 1e9)


class TimedReplay(CacheReplay):
    """A replay that counts the real seconds for sessions, and those to allocate, cache and release blocks."""

    session_seconds = cache_seconds = 0.0

    def arrived(self, arrival: Arrival, chain: tuple[int, ...]) -> None:
        began = perf_counter()
        super().arrived(arrival, chain)
        self.session_seconds += perf_counter() - began

    def answered(self, arrival: Arrival, chain: tuple[int, ...]) -> None:
        began = perf_counter()
        super().answered(arrival, chain)
        self.session_seconds += perf_counter() - began

    def cached(self, request: RequestId, chain: tuple[int, ...]) -> Lease:
        began = perf_counter()
        try:
            return super().cached(request, chain)
        finally:
            self.cache_seconds += perf_counter() - began

    def spent(self, arrival: Arrival) -> tuple[float, float]:
        """Serve a request. Returns seconds for its session and in the cache."""
        sessions, cache = self.session_seconds, self.cache_seconds
        self.serve(arrival)
        return self.session_seconds - sessions, self.cache_seconds - cache


def _times(replay: TimedReplay, arrivals: Sequence[Arrival]) -> tuple[float, float]:
    """Return median seconds per request for its session, and per block of the probes in the cache."""
    sessions, cached = [], []
    unused = count(1 + max(max(one.chain, default=0) for one in arrivals), PROBE_BLOCKS)
    with _no_garbage_collection():
        for number, arrival in enumerate(arrivals):
            sessions.append(replay.spent(arrival)[0])
            if number % PROBE_EVERY == 0:
                cached.append(replay.spent(_probe(arrival, next(unused)))[1])
    return statistics.median(sessions), statistics.median(cached) / min(PROBE_BLOCKS, replay.cache.num_blocks)


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


COST_SHARE = 0.25
"""Capacity over the working set at which costs are measured."""
COLUMNS: Columns = {"belady": belady_hit_rate, **open_loop.COLUMNS}
ClosedLoop = Callable[[Sequence[Conversation], Progress], Leaves]


def measure(
    settings: SessionBenchSettings,
    traces: Mapping[str, Sequence[Conversation]],
    closed: ClosedLoop | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Return the figures of all traces as written to a file of results.

    Costs are measured on the first one, with as many live sessions as it is replayed with.
    """
    closed = closed or partial(closed_loop, settings.live, ClosedSettings(seed=settings.seed))
    found = open_loop.measure(settings, traces, COLUMNS, progress)

    def noted(name: str) -> Progress:
        return lambda what: progress(f"{name}, {what}")

    for name, trace in traces.items():
        found[name]["closed"] = closed(trace, noted(name))
    progress("cost")
    *_, most = traffic_of(next(iter(traces.values())), settings)
    return {"traces": found, "cost": measure_cost(most.arrivals, most.capacity(COST_SHARE)).as_json()}
