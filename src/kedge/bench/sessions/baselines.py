"""Baselines on plain sets of blocks: least recently used, and Belady's optimum with all future arrivals known.

Hit rates are hit blocks over blocks of all prompts. A request hits the leading blocks that are cached; the others enter
at once. Its own blocks are not evicted for it. A prompt longer than the cache is cut to it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from math import inf

from kedge.bench.sessions.composing import Arrival


def leading(chain: Iterable[int], cached: Container[int]) -> int:
    """Return how many blocks of a chain are cached before the first that is not."""
    count = 0
    for block in chain:
        if block not in cached:
            break
        count += 1
    return count


def hit_rate(hits: int, arrivals: Sequence[Arrival]) -> float:
    """Return hit blocks over blocks of all prompts; 0 where these have none."""
    return hits / max(1, sum(len(one.chain) for one in arrivals))


def ceiling(arrivals: Sequence[Arrival]) -> float:
    """Return the hit rate of an infinite cache."""
    seen: set[int] = set()
    hits = 0
    for one in arrivals:
        hits += leading(one.chain, seen)
        seen.update(one.chain)
    return hit_rate(hits, arrivals)


def lru_hit_rate(arrivals: Sequence[Arrival], capacity: int) -> float:
    """Return the hit rate of `capacity` blocks by least recent use; of one request's blocks the last goes first."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for one in arrivals:
        hits += leading(one.chain, cached)
        for block in reversed(one.chain[:capacity]):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hit_rate(hits, arrivals)


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
