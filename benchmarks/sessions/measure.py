"""All that is measured of sessions: hit rates in every column, the closed loop, and costs (`kedge bench sessions`)."""

from __future__ import annotations

import gc
import heapq
import statistics
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count
from math import inf
from time import perf_counter
from typing import Any

from benchmarks.sessions.closed import ClosedSettings, Leaves, closed_loop
from kedge.bench.sessions import measure as open_loop
from kedge.bench.sessions.arrivals import Arrival, Conversation, SessionBenchSettings, SessionTrace, traffic_of
from kedge.bench.sessions.measure import (
    SPACE,
    CacheReplay,
    Columns,
    Progress,
    ReplayHooks,
    SessionHooks,
    hit_rate,
    leading,
    lru_hit_rate,
    tiered_cache,
)
from kedge.cache import CacheManager, Lease
from kedge.engine.local.sessions import SessionCaching
from kedge.policies.sessions import SessionHints
from kedge.types import AgentId, AgentKey, RequestId, RunId

QUANTILE = 0.9
_BINS, _LEAST, _GREATEST, _PRIOR = 56, 0.25, 1e5, 0.02
EDGES = (0.0, *(_LEAST * (_GREATEST / _LEAST) ** (at / (_BINS - 1)) for at in range(_BINS)))
"""Lower ends of the bins, in seconds; the last bin is open."""


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
        hits = leading(chain, self._cached)
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


class ToolTimes:
    """An online histogram of the seconds between an answer that ended with a tool call and the next request."""

    def __init__(self) -> None:
        self._counts = [_PRIOR] * len(EDGES)

    def add(self, seconds: float) -> None:
        """Count one pause."""
        self._counts[max(0, bisect_left(EDGES, seconds) - 1)] += 1

    def quantile(self, share: float) -> float:
        """Return the upper end of the bin that the quantile is in."""
        sums = list(accumulate(self._counts))
        return EDGES[min(bisect_left(sums, sums[-1] * share) + 1, len(EDGES) - 1)]


@dataclass(slots=True)
class _IdleSession:
    """What is kept of a session, and what its return is judged by."""

    number: int
    chain: list[int] = field(default_factory=list)
    at: float = 0.0
    answered_at: float = 0.0
    stop: str = "?"

    def key(self, now: float, ttl: float) -> tuple[bool, float, int]:
        """Return the key by which the least goes first: expired by LRU, then the longest time to live."""
        left = self.answered_at + (ttl if self.stop != "user" else 0.0) - now
        return (left > 0, self.at if left <= 0 else -left, -self.number)


def ttl_hit_rate(arrivals: Sequence[Arrival], capacity: int) -> float:
    """Return the hit rate of `capacity` blocks; what a session has left behind is evicted before all else."""
    cache = _TtlCache(capacity)
    return hit_rate(sum(cache.serve(one) for one in arrivals), arrivals)


class _TtlCache:
    """Blocks by the sessions whose chains they are in. Sessions lose blocks from the end."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._times = ToolTimes()
        self._cached: set[int] = set()
        self._uses: Counter[int] = Counter()
        """Block -> chains that it is in."""
        self._abandoned: OrderedDict[int, None] = OrderedDict()
        self._sessions: dict[str, _IdleSession] = {}

    def serve(self, arrival: Arrival) -> int:
        """Serve a request. Returns how many blocks hit."""
        chain = arrival.chain[: self._capacity]
        hits = leading(chain, self._cached)
        session = self._session(arrival)
        self._replace(session, chain)
        new = sum(block not in self._cached for block in chain)
        self._evict(len(self._cached) + new - self._capacity, session, arrival.at)
        self._cached.update(chain)
        session.at, session.answered_at, session.stop = arrival.at, arrival.ends_at, arrival.turn.record.stop
        return hits

    def _session(self, arrival: Arrival) -> _IdleSession:
        session = self._sessions.get(arrival.session)
        if session is None:
            session = self._sessions[arrival.session] = _IdleSession(len(self._sessions))
        elif session.stop == "tool":
            self._times.add(max(0.0, arrival.at - session.answered_at))
        return session

    def _replace(self, session: _IdleSession, chain: Sequence[int]) -> None:
        """Give a session its new chain; what no chain has any more is abandoned."""
        self._uses.subtract(session.chain)
        self._uses.update(chain)
        for block in session.chain:
            if not self._uses[block] and block in self._cached:
                self._abandoned[block] = None
        for block in chain:
            self._abandoned.pop(block, None)
        session.chain = list(chain)

    def _evict(self, count: int, served: _IdleSession, now: float) -> None:
        while count > 0 and self._abandoned:
            self._cached.discard(self._abandoned.popitem(last=False)[0])
            count -= 1
        victims = self._victims(served, now) if count > 0 else iter(())
        while count > 0 and (victim := next(victims, None)):
            count -= self._shorten(victim, count)

    def _victims(self, served: _IdleSession, now: float) -> Iterator[_IdleSession]:
        """Yield the sessions that have blocks, first those that go first."""
        ttl = self._times.quantile(QUANTILE)
        idle = [session for session in self._sessions.values() if session.chain and session is not served]
        keyed = [(session.key(now, ttl), session) for session in idle]
        heapq.heapify(keyed)
        while keyed:
            yield heapq.heappop(keyed)[1]

    def _shorten(self, session: _IdleSession, count: int) -> int:
        """Evict up to `count` blocks that only this session has, from its end. Returns how many."""
        evicted = 0
        while evicted < count and session.chain:
            block = session.chain.pop()
            self._uses[block] -= 1
            if not self._uses[block] and block in self._cached:
                self._cached.remove(block)
                evicted += 1
        return evicted


PROBE_BLOCKS, PROBE_EVERY = 256, 5
"""Blocks of a probe, a prompt that was never sent before; arrivals between two probes."""


@dataclass(frozen=True)
class ProductCase:
    """What Kedge knows of requests besides their tokens, and the size of its host tier."""

    gives_ids: bool = False
    gives_returns: bool = False
    """Whether the time of a session's next request is given as soon as one is cached."""
    gives_fixed: bool = False
    """Whether fixed prompts are labelled as documented for agents."""
    host_times: int = 0
    """Blocks of the host tier over those of the device."""


PRODUCT_CASES = {
    "kedge": ProductCase(),
    "kedge_ids": ProductCase(gives_ids=True),
    "kedge_perfect": ProductCase(gives_ids=True, gives_returns=True),
    "kedge_host3": ProductCase(host_times=3),
    "kedge_fixed": ProductCase(gives_fixed=True),
}


class HintedHooks(SessionHooks):
    """Sessions of which clients say what the case gives."""

    def __init__(self, cache: CacheManager, case: ProductCase) -> None:
        super().__init__(cache)
        self._case = case

    def hints(self, arrival: Arrival) -> SessionHints:
        agent = agent_of(arrival) if self._case.gives_fixed else None
        return SessionHints(
            session=arrival.session if self._case.gives_ids else "",
            flow=(agent.namespace, "trace", agent.agent) if agent else None,
            agent=agent,
        )

    def returns_in(self, arrival: Arrival) -> float | None:
        return arrival.next_at - arrival.at if self._case.gives_returns else None


class FixedPromptHints:
    """Hints as documented for agents with fixed prompts: every session is the only agent of a run, which calls again in
    one step, and has a label on its tool definitions and system prompt; its run ends with its last request.
    """

    STEP = 1.0

    def __init__(self, caching: SessionCaching) -> None:
        self._caching = caching

    def arrived(self, arrival: Arrival) -> None:
        self._caching.on_forecast({agent_of(arrival): (self.STEP, 1.0)})

    def answered(self, arrival: Arrival) -> None:
        """Label the fixed prompt, now that it is cached, or withdraw the forecast."""
        if arrival.next_at == inf:
            self._caching.on_forecast({agent_of(arrival): None})
        else:
            agent, fixed = agent_of(arrival), arrival.chain[: arrival.turn.fixed_blocks]
            self._caching.label(agent, fixed)


def agent_of(arrival: Arrival) -> AgentKey:
    """Return a session as the agent of a run of its own."""
    return AgentKey(SPACE, "", RunId(arrival.session), AgentId(arrival.turn.record.agent))


def hooks_of(case: ProductCase, cache: CacheManager) -> list[ReplayHooks]:
    """Return the hooks that give a cache the hints of the case."""
    sessions = HintedHooks(cache, case)
    return [FixedPromptHints(sessions.caching), sessions] if case.gives_fixed else [sessions]


def product_replay(case: ProductCase, capacity: int) -> CacheReplay:
    """Return an empty cache of `capacity` device blocks, with the hints of the case."""
    cache = tiered_cache(capacity, case.host_times)
    return CacheReplay(cache, hooks_of(case, cache))


def product_hit_rate(case: ProductCase, arrivals: Sequence[Arrival], capacity: int) -> float:
    """Return the hit rate of Kedge's cache, in either tier."""
    return product_replay(case, capacity).hit_rate(arrivals)


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
    cache = tiered_cache(capacity)
    seconds, ns_per_block = _times(TimedReplay(cache, hooks_of(PRODUCT_CASES["kedge"], cache)), arrivals)
    _, ns_per_block_lru = _times(TimedReplay(CacheManager(capacity, 1)), arrivals)
    return SessionCost(seconds * 1e6, ns_per_block * 1e9, ns_per_block_lru * 1e9)


class TimedReplay(CacheReplay):
    """A replay that counts the real seconds in the hooks, and those to allocate, cache and release blocks."""

    hook_seconds = cache_seconds = 0.0

    def arrived(self, arrival: Arrival) -> None:
        began = perf_counter()
        super().arrived(arrival)
        self.hook_seconds += perf_counter() - began

    def answered(self, arrival: Arrival) -> None:
        began = perf_counter()
        super().answered(arrival)
        self.hook_seconds += perf_counter() - began

    def cached(self, request: RequestId, chain: tuple[int, ...]) -> Lease:
        began = perf_counter()
        try:
            return super().cached(request, chain)
        finally:
            self.cache_seconds += perf_counter() - began

    def spent(self, arrival: Arrival) -> tuple[float, float]:
        """Serve a request. Returns seconds in the hooks and in the cache."""
        hooks, cache = self.hook_seconds, self.cache_seconds
        self.serve(arrival)
        return self.hook_seconds - hooks, self.cache_seconds - cache


def _times(replay: TimedReplay, arrivals: Sequence[Arrival]) -> tuple[float, float]:
    """Return median seconds per request in the hooks, and per block of the probes in the cache."""
    hooks, cached = [], []
    unused = count(1 + max(max(one.chain, default=0) for one in arrivals), PROBE_BLOCKS)
    with _no_garbage_collection():
        for number, arrival in enumerate(arrivals):
            hooks.append(replay.spent(arrival)[0])
            if number % PROBE_EVERY == 0:
                cached.append(replay.spent(_probe(arrival, next(unused)))[1])
    return statistics.median(hooks), statistics.median(cached) / min(PROBE_BLOCKS, replay.cache.num_blocks)


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
    found = open_loop.measure(settings, traces, COLUMNS, progress)

    def noted(name: str) -> Progress:
        return lambda what: progress(f"{name}, {what}")

    for trace in traces:
        found[trace.name]["closed"] = closed(trace.conversations, noted(trace.name))
    progress("cost")
    *_, most = traffic_of(traces[0], settings)
    return {"traces": found, "cost": measure_cost(most.arrivals, most.capacity(COST_SHARE)).as_json()}
