"""Arrivals replayed through `CacheManager` in virtual time: one "token" is a 512-token block, blocks have one token.

Service takes no virtual time, as in the baselines, whose figures are only comparable so: a request's blocks enter the
cache when it arrives, its lease and its answer end at once. The time that the recorded server took is a part
of the pause before the session's next request.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from time import perf_counter
from typing import Protocol

from kedge.bench.sessions.baselines import hit_rate
from kedge.bench.sessions.composing import Arrival
from kedge.cache import CacheManager, Readiness
from kedge.errors import OutOfBlocks
from kedge.types import Namespace, RequestId, TenantId

SPACE = Namespace(TenantId("trace"))
MAX_PUMPS = 1000
"""Rounds in which all copies that one event asks for are made."""


class ReplayHooks(Protocol):
    """What happens with a request besides the cache, at the arrivals' times."""

    def arrived(self, arrival: Arrival) -> None:
        """Take note of a request before it is admitted."""

    def answered(self, arrival: Arrival) -> None:
        """Take note of a request that has been answered, whose blocks are cached."""


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
    """A cache that serves arrivals one after the other, and hooks that are called for each."""

    def __init__(self, cache: CacheManager, hooks: Sequence[ReplayHooks] = ()) -> None:
        self.cache = cache
        self.hook_time, self.cache_time = Stopwatch(), Stopwatch()
        """Time in the hooks; time to allocate, cache and release blocks."""
        self._hooks = hooks
        self._ids = count()

    def hit_rate(self, arrivals: Sequence[Arrival]) -> float:
        """Serve all arrivals. Returns hit blocks over blocks of all prompts, in either tier."""
        return hit_rate(sum(map(self.serve, arrivals)), arrivals)

    def serve(self, arrival: Arrival) -> int:
        """Serve a request. Returns how many blocks hit.

        A prompt longer than the cache is cut to it; one that finds no room hits nothing and is not cached.
        """
        with self.hook_time:
            for hooks in self._hooks:
                hooks.arrived(arrival)
        hits = self._serve(RequestId(str(next(self._ids))), arrival.chain[: self.cache.num_blocks])
        with self.hook_time:
            for hooks in self._hooks:
                hooks.answered(arrival)
        self._copy()
        return hits

    def _serve(self, request: RequestId, chain: tuple[int, ...]) -> int:
        while self.cache.demand(request, SPACE, chain) is Readiness.LOADING:
            self._copy()
        try:
            with self.cache_time:
                lease = self.cache.admit(request, SPACE, chain, len(chain), len(chain))
                self.cache.finish(request, chain)
        except OutOfBlocks:
            self.cache.withdraw(request)
            return 0
        return lease.exact_tokens

    def _copy(self) -> None:
        """Make all copies between the tiers, which take no virtual time."""
        for _ in range(MAX_PUMPS):
            self.cache.pump()
            if not self.cache.transferring:
                return
