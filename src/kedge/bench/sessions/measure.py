"""Hit rates of traces in virtual time: Kedge's own cache, evicting by sessions or what was used least recently.

One "token" is a 512-token block, and blocks have one token. Hit rates are hit blocks over blocks of all prompts; a
prompt longer than the cache is cut to it. Service takes no virtual time: a request's blocks enter the cache when it
arrives, its lease and its answer end at once. The time that the recorded server took is a part of the pause before the
session's next request.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from kedge.bench.sessions.arrivals import Arrival, Conversation, SessionBenchSettings, traffic_of
from kedge.cache import CacheManager, Copied, Copier, Copy, Lease, Readiness
from kedge.engine.local.sessions import SessionCaching
from kedge.errors import OutOfBlocks
from kedge.policies.eviction import policy_of
from kedge.policies.sessions import SessionHints, Turn, TurnEnd
from kedge.settings import TierSettings
from kedge.structures.prefixes import cached_length
from kedge.types import Namespace, RequestId, TenantId

SPACE = Namespace(TenantId("trace"))


def hit_rate(hits: int, arrivals: Sequence[Arrival]) -> float:
    """Return hit blocks over blocks of all prompts; 0 where these have none."""
    return hits / max(1, sum(len(one.chain) for one in arrivals))


def ceiling(arrivals: Sequence[Arrival]) -> float:
    """Return the hit rate of an infinite cache."""
    seen: set[int] = set()
    hits = 0
    for one in arrivals:
        hits += cached_length(one.chain, seen)
        seen.update(one.chain)
    return hit_rate(hits, arrivals)


class NoCopier(Copier):
    """A copier whose copies end at once without copying."""

    def __init__(self) -> None:
        self._ended: list[Copied] = []

    def submit(self, copy: Copy) -> None:
        self._ended.append(Copied(copy.copy_id, ok=True))

    def hurry(self, copy_id: int) -> None:
        """Do nothing: the copy has ended already."""

    def drain(self) -> list[Copied]:
        ended, self._ended = self._ended, []
        return ended


class CacheReplay:
    """A cache that serves arrivals one after the other. Unless it has no sessions, these are found, learned and ranked
    as in the embedded engine, on the arrivals' clock; clients say nothing.
    """

    def __init__(self, cache: CacheManager, *, has_sessions: bool = True) -> None:
        self.cache, self._now, self._ids = cache, 0.0, count()
        self._sessions = SessionCaching(cache, clock=lambda: self._now) if has_sessions else None
        self._turn: Turn | None = None

    def hit_rate(self, arrivals: Sequence[Arrival]) -> float:
        """Serve all arrivals. Returns hit blocks over blocks of all prompts, in either tier."""
        return hit_rate(sum(map(self.serve, arrivals)), arrivals)

    def serve(self, arrival: Arrival) -> int:
        """Serve a request. Returns how many blocks hit; one that finds no room hits nothing and is not cached."""
        request, chain, hits = RequestId(str(next(self._ids))), arrival.chain[: self.cache.num_blocks], 0
        self.arrived(arrival, chain)
        while self.cache.demand(request, SPACE, chain) is Readiness.LOADING:
            self._copy()
        try:
            hits = self.cached(request, chain).exact_tokens
        except OutOfBlocks:
            self.cache.withdraw(request)
        self.answered(arrival, chain)
        self._copy()
        return hits

    def arrived(self, arrival: Arrival, chain: tuple[int, ...]) -> None:
        """Find the session of a request before it is admitted."""
        if self._sessions:
            self._now = arrival.at
            self._turn = self._sessions.begin(SPACE, chain, SessionHints())

    def answered(self, arrival: Arrival, chain: tuple[int, ...]) -> None:
        """End the turn with what its recorded answer ended with; its blocks are cached."""
        if self._sessions and self._turn:
            self._sessions.answered(self._turn, chain, TurnEnd(arrival.turn.record.stop))

    def cached(self, request: RequestId, chain: tuple[int, ...]) -> Lease:
        """Allocate a request's blocks, for which others are evicted, and cache them. Raises `OutOfBlocks`."""
        lease = self.cache.admit(request, SPACE, chain, len(chain), len(chain))
        self.cache.finish(request, chain)
        return lease

    def _copy(self) -> None:
        """Make all copies between the tiers, which take no virtual time."""
        self.cache.pump()
        while self.cache.transferring:
            self.cache.pump()


def tiered_cache(capacity: int, host_times: int = 0) -> CacheManager:
    """Return an empty cache of `capacity` device blocks, and `host_times` as many in a host tier."""
    tiers = TierSettings(host_memory=f"{host_times * capacity} blocks")
    return CacheManager(capacity, 1, policy_of(tiers), tiers, NoCopier())


def lru_hit_rate(arrivals: Sequence[Arrival], capacity: int) -> float:
    """Return the hit rate of `capacity` blocks by least recent use; of one request's blocks the last goes first."""
    return CacheReplay(CacheManager(capacity, 1), has_sessions=False).hit_rate(arrivals)


def kedge_hit_rate(arrivals: Sequence[Arrival], capacity: int, host_times: int = 0) -> float:
    """Return the hit rate of Kedge's cache, in either tier, where clients say nothing of their sessions."""
    return CacheReplay(tiered_cache(capacity, host_times)).hit_rate(arrivals)


Columns = Mapping[str, Callable[[Sequence[Arrival], int], float]]
"""Name -> hit rate of arrivals with a cache of so many blocks."""
COLUMNS: Columns = {
    "lru": lru_hit_rate,
    "kedge": kedge_hit_rate,
    "kedge_host3": lambda arrivals, capacity: kedge_hit_rate(arrivals, capacity, host_times=3),
}
Progress = Callable[[str], None]


def measure(
    settings: SessionBenchSettings,
    traces: Mapping[str, Sequence[Conversation]],
    columns: Columns = COLUMNS,
    progress: Progress = lambda _: None,
) -> dict[str, dict[str, Any]]:
    """Replay traces by name. Returns for each, as written to a file of results, and by live sessions: hit rates by
    capacity and column, the blocks of the working set, and the hit rate of an infinite cache.
    """
    results: dict[str, dict[str, Any]] = {}
    for trace, conversations in traces.items():
        open_loop, blocks, ceilings = {}, {}, {}
        for traffic in traffic_of(conversations, settings):
            blocks[traffic.live] = round(traffic.working_set, 1)
            ceilings[traffic.live] = round(ceiling(traffic.arrivals), 4)
            cells: dict[str, dict[str, float]] = {}
            for share in settings.capacities:
                progress(f"{trace}, {traffic.live} live, {share:g} of the working set")
                capacity = traffic.capacity(share)
                cells[f"{share:g}"] = {
                    name: round(rate(traffic.arrivals, capacity), 4) for name, rate in columns.items()
                }
            open_loop[traffic.live] = cells
        results[trace] = {"open": open_loop, "working_set_blocks": blocks, "ceiling": ceilings}
    return results
