"""Kedge's own cache in the open loop, by the hints that it is given, and what it costs on this machine."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter

from kedge.bench.sessions.arrivals import Arrival
from kedge.bench.sessions.replay import SPACE, CacheReplay, ReplayHooks, SessionHooks, tiered_cache
from kedge.cache import CacheManager, Lease
from kedge.engine.local.sessions import SessionCaching
from kedge.policies.sessions import SessionHints
from kedge.types import AgentId, AgentKey, RequestId, RunId

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

    def __init__(self, cache: CacheManager, caching: SessionCaching) -> None:
        self._cache, self._caching = cache, caching

    def arrived(self, arrival: Arrival) -> None:
        self._caching.on_forecast({agent_of(arrival): (self.STEP, 1.0)})

    def answered(self, arrival: Arrival) -> None:
        """Label the fixed prompt, now that it is cached, or withdraw the forecast."""
        if arrival.is_last:
            self._caching.on_forecast({agent_of(arrival): None})
        else:
            agent, fixed = agent_of(arrival), arrival.chain[: arrival.turn.fixed_blocks]
            self._cache.on_label(SPACE, agent, fixed)
            self._caching.labelled(agent, fixed)


def agent_of(arrival: Arrival) -> AgentKey:
    """Return a session as the agent of a run of its own."""
    return AgentKey(SPACE, "", RunId(arrival.session), AgentId(arrival.turn.record.agent))


def hooks_of(case: ProductCase, cache: CacheManager) -> list[ReplayHooks]:
    """Return the hooks that give a cache the hints of the case."""
    sessions = HintedHooks(cache, case)
    return [FixedPromptHints(cache, sessions.caching), sessions] if case.gives_fixed else [sessions]


def product_replay(case: ProductCase, capacity: int) -> CacheReplay:
    """Return an empty cache of `capacity` device blocks, with the hints of the case."""
    cache = tiered_cache(capacity, case.host_times)
    return CacheReplay(cache, hooks_of(case, cache))


def product_hit_rate(case: ProductCase, arrivals: Sequence[Arrival], capacity: int) -> float:
    """Return the hit rate of Kedge's cache, in either tier."""
    return product_replay(case, capacity).hit_rate(arrivals)


# what it costs --------------------------------------------------------------------------------------------------------


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
