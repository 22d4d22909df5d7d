"""Whether the requests of a trace are given to the sessions that they continue, by the hashes of their blocks alone.

The sessions' ids in the trace are what they are compared with. Arrivals are composed of its conversations as in
`kedge bench sessions`, here in blocks as recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from time import perf_counter
from typing import Any

from kedge.bench.sessions.composing import Arrival
from kedge.bench.sessions.product import STOPS
from kedge.policies.sessions import SessionKey, SessionTracker, StopReason, TurnEnd
from kedge.types import Namespace, TenantId

SPACE = Namespace(TenantId("trace"))
USUAL_SECONDS = 1.0
"""Time to an answer where the trace has none; it always ends before the session's next request"""


@dataclass(frozen=True)
class LinkResult:
    """How many requests were given to which session, and what that took."""

    requests: int
    right: int
    """Given to the session that they continue, or to a new one where they begin one"""
    wrong: int
    """Given to the session of another; what is neither begins a session too many"""
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the shares of all requests as written to a file of results."""
        shares = {"right": self.right / self.requests, "wrong": self.wrong / self.requests}
        return {"requests": self.requests, **{name: round(share, 4) for name, share in shares.items()}}

    @property
    def us_per_request(self) -> float:
        """Microseconds to find a request's session and to learn from its turn."""
        return 1e6 * self.seconds / self.requests


def measure_links(arrivals: Sequence[Arrival], tracker: SessionTracker | None = None) -> LinkResult:
    """Give arrivals, in the order of time, to sessions, and compare these with the trace's."""
    finder = _Finder(SessionTracker() if tracker is None else tracker)
    owners: dict[SessionKey, str] = {}
    known: set[str] = set()
    counts: Counter[str] = Counter()
    for arrival in arrivals:
        key = finder.arrive(arrival)
        found, true = owners.get(key), arrival.session if arrival.session in known else None
        counts["right" if found == true else "missing" if found is None else "wrong"] += 1
        owners[key] = arrival.session
        known.add(arrival.session)
    return LinkResult(len(arrivals), counts["right"], counts["wrong"], finder.seconds)


class _Finder:
    """The product's session tracker, driven on the arrivals' clock, with the time that it takes."""

    def __init__(self, tracker: SessionTracker) -> None:
        self._tracker = tracker
        self._ends: list[tuple[float, int, SessionKey, Arrival]] = []
        self._count = 0
        self.seconds = 0.0

    def arrive(self, arrival: Arrival) -> SessionKey:
        """Return the session of a request, after the answers that ended before it."""
        began = perf_counter()
        for ended, key, earlier in self._answered(arrival.at):
            stop = STOPS.get(earlier.turn.record.stop, StopReason.UNKNOWN)
            self._tracker.answered(key, earlier.chain, ended, TurnEnd(stop))
        key = self._tracker.arrive(SPACE, arrival.chain, arrival.at)
        self._tracker.advance(arrival.at)
        self.seconds += perf_counter() - began
        self._count += 1
        heappush(self._ends, (_end_of(arrival), self._count, key, arrival))
        return key

    def _answered(self, now: float) -> Iterator[tuple[float, SessionKey, Arrival]]:
        while self._ends and self._ends[0][0] <= now:
            ended, _, key, arrival = heappop(self._ends)
            yield ended, key, arrival


def _end_of(arrival: Arrival) -> float:
    seconds = arrival.turn.record.seconds or USUAL_SECONDS
    return min(arrival.at + seconds, (arrival.at + arrival.next_at) / 2)
