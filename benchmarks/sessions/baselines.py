"""Baselines on plain sets of blocks: Belady's optimum with all future arrivals known, and time to live by session.

In both, a request hits the leading blocks that are cached, and the others enter at once; its own blocks are not evicted
for it. By session, what a tool call follows is kept for the 90th percentile of tool times, all else by LRU.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from kedge.bench.sessions.arrivals import Arrival
from kedge.bench.sessions.replay import hit_rate, leading

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
