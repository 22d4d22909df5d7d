"""Arrivals replayed through `CacheManager` in virtual time: one "token" is a 512-token block, blocks have one token.

A request's blocks enter the cache when it arrives, and its lease ends at once, as in the baselines, whose figures are
only comparable so; what is learned of a session is told when the recorded server answered.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from time import perf_counter
from typing import Literal, Protocol

from kedge.bench.sessions.baselines import hit_rate
from kedge.bench.sessions.composing import Arrival
from kedge.cache import CacheManager, Readiness
from kedge.errors import OutOfBlocks
from kedge.types import Namespace, RequestId, TenantId

SPACE = Namespace(TenantId("trace"))
MAX_PUMPS = 1000
"""Rounds in which all copies that one event asks for are made."""


class ReplayHooks(Protocol):
    """What is told of requests besides the cache, at the arrivals' times."""

    def arrived(self, arrival: Arrival) -> None:
        """Take note of a request before it is admitted."""

    def cached(self, arrival: Arrival) -> None:
        """Take note of a request whose blocks are cached now."""

    def ended(self, arrival: Arrival) -> None:
        """Take note of a request that has been answered."""


class FixedPromptHints:
    """Hints as documented for agents with fixed prompts: every session is an agent that runs again in one step, its
    label is on the tool definitions and the system prompt, and it is withdrawn after its last request.
    """

    STEP = 1.0

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache

    def arrived(self, arrival: Arrival) -> None:
        self._cache.on_forecast({arrival.session: (self.STEP, 1.0)})

    def cached(self, arrival: Arrival) -> None:
        self._cache.on_label(SPACE, arrival.session, arrival.chain[: arrival.turn.fixed_blocks])

    def ended(self, arrival: Arrival) -> None:
        if arrival.is_last:
            self._cache.on_forecast({arrival.session: None})


class Stopwatch:
    """Real seconds spent inside its `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += perf_counter() - self._began


class CacheReplay:
    """A cache that serves arrivals one after the other, and tells hooks of their ends in order of time."""

    def __init__(self, cache: CacheManager, hooks: Sequence[ReplayHooks] = ()) -> None:
        self.cache = cache
        self.told, self.cached = Stopwatch(), Stopwatch()
        """Time in the hooks; time to allocate, cache and release blocks."""
        self._hooks = hooks
        self._ids = count()
        self._ends: list[tuple[float, int, Arrival]] = []

    def hit_rate(self, arrivals: Sequence[Arrival]) -> float:
        """Serve all arrivals. Returns hit blocks over blocks of all prompts, in either tier."""
        return hit_rate(sum(map(self.serve, arrivals)), arrivals)

    def serve(self, arrival: Arrival) -> int:
        """Serve a request after all ends before it. Returns how many blocks hit.

        A prompt longer than the cache is cut to it; one that finds no room hits nothing and is not cached.
        """
        self._end_until(arrival.at)
        number = next(self._ids)
        self._tell("arrived", arrival)
        hits = self._serve(RequestId(str(number)), arrival.chain[: self.cache.num_blocks])
        self._tell("cached", arrival)
        heapq.heappush(self._ends, (arrival.ends_at, number, arrival))
        return hits

    def _end_until(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, _, arrival = heapq.heappop(self._ends)
            self._tell("ended", arrival)
        self._copy()

    def _tell(self, event: Literal["arrived", "cached", "ended"], arrival: Arrival) -> None:
        with self.told:
            for hooks in self._hooks:
                getattr(hooks, event)(arrival)

    def _serve(self, request: RequestId, chain: tuple[int, ...]) -> int:
        while self.cache.demand(request, SPACE, chain) is Readiness.LOADING:
            self._copy()
        try:
            with self.cached:
                lease = self.cache.admit(request, SPACE, chain, len(chain), len(chain))
                self.cache.finish(request, chain)
        except OutOfBlocks:
            self.cache.withdraw(request)
            return 0
        self._copy()
        return lease.exact_tokens

    def _copy(self) -> None:
        """Make all copies between the tiers, which take no virtual time."""
        for _ in range(MAX_PUMPS):
            self.cache.pump()
            if not self.cache.transferring:
                return
