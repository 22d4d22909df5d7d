"""Sessions: which are there, and how much the KV of each is worth until it returns.

A session is a chain of blocks that grows, pauses and comes back: one agent's reasoning with its tools, or a chat.
"""

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

from kedge.policies.sessions.turns import (
    MAX_SESSIONS,
    NO_HINTS,
    RECENT,
    UNKNOWN_END,
    Chain,
    SessionHints,
    SessionKey,
    SessionLinks,
    TurnEnd,
)
from kedge.structures.bounded import BoundedDict
from kedge.structures.heaps import LazyHeap
from kedge.types import Namespace

EDGES = tuple(0.5 * (2.0**step - 1) for step in range(19))
"""Seconds at which the bins begin; the last one has no end."""
BORROWED = 5.0
"""How many observations of its own outweigh what a class takes over from the wider one."""
HALF_LIFE = 20_000.0
"""Observations of a class after which older ones count half."""
PRIOR = 0.12
"""Share that returns in any bin, before anything was seen. The same in every bin, which widen: as under LRU, the value
of a session falls with its idle time."""
REFRESH = 1.1
"""Growth of the observations of a class after which its values are computed anew."""

Kind = tuple[Hashable, ...]
_WIDTHS = (*(after - before for before, after in zip(EDGES, EDGES[1:], strict=False)), EDGES[-1])


def bin_of(idle: float) -> int:
    """Return the bin that holds an idle time in seconds."""
    return max(0, bisect_right(EDGES, idle) - 1)


class _Survival:
    """Per bin, how many were idle in it, and how many of them returned in it.

    A session that is still in a bin counts half there (the actuarial estimate). Counting only sessions that have left
    it would be biased: the first to leave a bin are the ones that return.
    """

    def __init__(self) -> None:
        self.exposed, self.returned = [0.0] * len(EDGES), [0.0] * len(EDGES)
        self.seen = self.expires = 0.0
        self.rates: list[float] = []
        """Values by bin, computed anew once `seen` has reached `expires`"""

    def observe(self, at: int, returned: bool) -> None:
        self.exposed[at] += 0.5
        if returned:
            self.returned[at] += 1
        else:
            self.exposed[at + 1] += 0.5
        self.seen += 1
        if self.seen > HALF_LIFE:
            self.seen, self.expires = self.seen / 2, self.expires / 2
            self.exposed = [count / 2 for count in self.exposed]
            self.returned = [count / 2 for count in self.returned]

    def shares(self, wider: Sequence[float]) -> list[float]:
        """Return the share that returns in each bin, near `wider` where little was seen."""
        return [
            (returned + BORROWED * general) / (exposed + BORROWED)
            for returned, exposed, general in zip(self.returned, self.exposed, wider, strict=True)
        ]


class ReturnTimes:
    """When sessions come back, and what holding their KV until then is worth: survival histograms of idle times.

    Every turn of a session ends with an idle time: a tool runs, or a person reads. Idle times of alike sessions go into
    one histogram, with bins that widen with time: in each bin some of those that were still idle returned. So a session
    that has not returned yet counts for as long as it has been idle, and no run has to be known to be over. A class is
    a path from the widest feature to the narrowest.
    """

    def __init__(self) -> None:
        self._classes: BoundedDict[Kind, _Survival] = BoundedDict()

    def begin(self, kind: Kind) -> None:
        """Count a session of class `kind` that is idle from now on."""
        for depth in range(len(kind) + 1):
            self._classes.use(kind[:depth], _Survival).exposed[0] += 0.5

    def observe(self, kind: Kind, at: int, returned: bool) -> None:
        """Count a session of class `kind` that returned in bin `at`, or else stayed idle and is now in the next one.

        The last bin has no end.
        """
        for depth in range(len(kind) + 1):
            self._classes.use(kind[:depth], _Survival).observe(at, returned)

    def rate(self, kind: Kind, at: int) -> float:
        """Return the worth of holding KV for a session of class `kind` that has been idle up to bin `at`.

        It is the greatest P(return within t | idle so far) per expected second of holding, over all t (as in Gittins'
        index), in 1/s.
        """
        own = self._classes.use(kind, _Survival)
        if own.seen >= own.expires:
            shares = [PRIOR] * len(EDGES)
            for depth in range(len(kind) + 1):
                if survival := self._classes.get(kind[:depth]):
                    shares = survival.shares(shares)
            own.rates = [best_rate(shares, start) for start in range(len(EDGES))]
            own.expires = REFRESH * own.seen + 8
        return own.rates[at]


def best_rate(shares: Sequence[float], start: int) -> float:
    """Return the greatest probability of return per expected second held, from bin `start` on.

    `shares` says of each bin how many of those that reach it return in it.
    """
    best = returned = held = 0.0
    alive = 1.0
    for at in range(start, len(shares)):
        now = alive * shares[at]
        returned += now
        held += _WIDTHS[at] * (alive - now / 2)
        if returned > best * held:
            best = returned / held
        alive -= now
        if alive < 1e-3:
            break
    return best


PACE = 4
"""Last idle times of a session that make its pace."""
KEPT = 64.0
"""How much likelier a session returns than alike ones whose clients did not ask that they are kept. Those that are kept
are ordered by what was learned, and go before others that were idle for a while; new traffic still gets room."""
SHRINK = 0.9
"""A session whose time of return is given is ranked again each time that this share of it is left."""


class SessionState(StrEnum):
    """What a session is doing."""

    UNKNOWN = "unknown"
    IDLE = "idle"
    IN_FLIGHT = "in flight"


@dataclass(eq=False, slots=True)
class _Session:
    """One session: in flight, or idle since a moment."""

    key: SessionKey
    hints: SessionHints
    gaps: dict[str, deque[float]] = field(default_factory=dict)
    """Its last idle times by what its answers ended with"""
    ending: str = ""
    blocks: int = 0
    """Length of its chain after its last turn"""
    shared: int = 0
    """Blocks, at most, that other sessions began with as well; 0 where none was known to"""
    in_flight: int = 0
    idle_since: float = math.inf
    kind: tuple[Hashable, ...] = ()
    at: int = 0
    """The bin of return times that it has been idle up to"""
    due: float | None = None
    """When it returns, if that was given"""
    keep_for: float | None = None
    """For how long from its answer on its KV is to be kept, if that was given; 0: it may go first"""
    timer: float = math.inf
    """When it is ranked again"""
    rank: float = 0.0

    @property
    def pace(self) -> int:
        """Mean of its last idle times after alike answers, on a logarithmic scale; -1 before the first."""
        gaps = self.gaps.get(self.ending)
        return min(7, int(sum(math.log2(1 + gap) for gap in gaps) / len(gaps))) if gaps else -1


class SessionTracker:
    """Finds the session of every request and ranks idle sessions. One thread owns it.

    A rank is in expected seconds of holding per return: the least is worth the most, 0 while a turn waits or runs, and
    infinity where no return is expected. Ranks change with time; `advance` returns the ones that did.
    """

    def __init__(self, capacity: int = MAX_SESSIONS) -> None:
        """Begin without sessions; at most `capacity` are remembered."""
        tenant = attrgetter("namespace.tenant")
        self._sessions: BoundedDict[SessionKey, _Session] = BoundedDict(capacity, self._forgotten, tenant)
        self._links, self._returns = SessionLinks(), ReturnTimes()
        self._timers: LazyHeap[_Session] = LazyHeap(lambda one: (one.timer,), lambda one: one.timer < math.inf)
        self._changed: dict[SessionKey, float | None] = {}
        self._calls: BoundedDict[Hashable, Counter[bool]] = BoundedDict(MAX_SESSIONS, owner=tenant)
        self._numbers = 0
        self.returning = 0.0
        """Share of the last requests that an idle session came back with"""

    def __contains__(self, key: SessionKey) -> bool:
        """Return whether a session is remembered."""
        return key in self._sessions

    # turns ----------------------------------------------------------------------------------------------------

    def arrive(self, namespace: Namespace, chain: Chain, now: float, hints: SessionHints = NO_HINTS) -> SessionKey:
        """Return the session of a request that arrives at `now` (seconds of a clock that does not go back)."""
        continued = self._links.find(namespace, chain)
        session = self._of(namespace, continued, hints)
        session.in_flight += 1
        if hints.flow is not None:
            self._calls.use(hints.flow, Counter)[session.key == continued] += 1
        returns = session.idle_since <= now
        self.returning += RECENT * (returns - self.returning)
        if returns:
            self._cross(session, now)
            self._returns.observe(session.kind, session.at, returned=True)
            session.gaps.setdefault(session.ending, deque(maxlen=PACE)).append(now - session.idle_since)
        session.idle_since, session.due = math.inf, None
        self._rank(session, 0.0)
        return session.key

    def answered(self, key: SessionKey, chain: Chain, now: float, end: TurnEnd = UNKNOWN_END) -> None:
        """Take the end of a turn at `now`; `chain` is the whole history that is cached.

        A session that was forgotten meanwhile is ignored.
        """
        session = self._sessions.get(key)
        if session is None:
            return
        if end.is_last:
            self.end(key)
            return
        if not session.blocks:
            session.shared = self._links.begin(key.namespace, chain)
        self._links.put(key, key.namespace, chain, session.shared or session.blocks or len(chain) - 1)
        session.blocks, session.ending = len(chain), end.ending
        session.kind = (end.ending, (session.pace, bool(session.hints.parent)))
        session.due = None if end.returns_in is None else now + end.returns_in
        session.keep_for = end.keep_for
        self._ended(session, now)

    def cancelled(self, key: SessionKey, now: float) -> None:
        """Take the end of a turn without an answer."""
        if session := self._sessions.get(key):
            self._ended(session, now)

    def end(self, key: SessionKey) -> None:
        """Forget a session that will not return."""
        if session := self._sessions.pop(key, None):
            self._forgotten(key, session)

    def expect(self, key: SessionKey, now: float, seconds: float) -> None:
        """Set when an idle session is needed, in seconds from `now`; infinite: not any more. Ignores other sessions."""
        session = self._sessions.get(key)
        if session and not session.in_flight:
            session.due = now + seconds
            self._look(session, now)

    def keep(self, key: SessionKey, now: float, seconds: float) -> None:
        """Set for how long an idle session's KV is kept, in seconds from `now`; 0: it may go first."""
        session = self._sessions[key]
        session.keep_for = now + seconds - session.idle_since if seconds else 0.0
        if not seconds or session.due == math.inf:
            session.due = None
        self._look(session, now)

    def state(self, key: SessionKey) -> SessionState:
        """Return what a session is doing."""
        if key not in self._sessions:
            return SessionState.UNKNOWN
        return SessionState.IN_FLIGHT if self._is_in_flight(key) else SessionState.IDLE

    def _of(self, namespace: Namespace, continued: Hashable, hints: SessionHints) -> _Session:
        self._numbers += 1
        key = SessionKey(namespace, hints.session or self._numbers)
        if not hints.session and isinstance(continued, SessionKey) and not self._is_in_flight(continued):
            key = continued
        return self._sessions.use(key, lambda: _Session(key, hints))

    def _is_in_flight(self, key: SessionKey) -> bool:
        """Return whether a session has a turn that has not ended: another request at once is another session's."""
        return key in self._sessions and self._sessions[key].in_flight > 0

    def _ended(self, session: _Session, now: float) -> None:
        session.in_flight = max(0, session.in_flight - 1)
        if not session.in_flight:
            session.idle_since, session.at = now, 0
            self._returns.begin(session.kind)
            self._look(session, now)

    def _forgotten(self, key: SessionKey, session: _Session) -> None:
        session.timer = math.inf
        self._links.drop(key)
        self._changed[key] = None

    # agents of workflows --------------------------------------------------------------------------------------

    def continues(self, flow: Hashable) -> float:
        """Return the share of an agent's calls that continued an earlier prompt; 0 before its first call."""
        calls = self._calls.get(flow)
        return calls[True] / calls.total() if calls else 0.0

    # ranks ----------------------------------------------------------------------------------------------------

    def rank(self, key: SessionKey) -> float:
        """Return the rank of a session as of the last `advance`; infinity for one that is not known."""
        session = self._sessions.get(key)
        return math.inf if session is None else session.rank

    def advance(self, now: float) -> dict[SessionKey, float | None]:
        """Return the ranks that have changed since the last call; None for a session that was forgotten."""
        while (session := self._timers.peek()) and session.timer <= now:
            self._timers.pop()
            self._look(session, now)
        changed, self._changed = self._changed, {}
        return changed

    def _look(self, session: _Session, now: float) -> None:
        """Rank an idle session, and set the time at which it is ranked again."""
        if session.due == math.inf or (session.due is None and session.keep_for == 0):  # its client said it is over
            self._rank(session, math.inf)
        elif session.due is not None:
            left = abs(session.due - now)
            self._rank(session, left)
            self._set_timer(session, now + max(0.25, (1 - SHRINK) * left))
        else:
            self._estimate(session, now)

    def _estimate(self, session: _Session, now: float) -> None:
        """Rank a session by when alike ones returned, and by how long it is to be kept."""
        self._cross(session, now)
        rate = self._returns.rate(session.kind, session.at)
        kept_until = session.idle_since + (session.keep_for or 0.0)
        rate *= KEPT if kept_until > now else 1.0
        self._rank(session, 1 / rate if rate else math.inf)
        bin_ends = [session.idle_since + EDGES[session.at + 1]] if session.at + 1 < len(EDGES) else []
        if upcoming := [*bin_ends, *([kept_until] if kept_until > now else [])]:
            # Rounded, a bin may begin now and not be reached: a timer that is due at once would be set for ever.
            self._set_timer(session, max(min(upcoming), math.nextafter(now, math.inf)))

    def _cross(self, session: _Session, now: float) -> None:
        """Count the bins in which the session has not returned."""
        for at in range(session.at, bin_of(now - session.idle_since)):
            self._returns.observe(session.kind, at, returned=False)
            session.at = at + 1

    def _rank(self, session: _Session, rank: float) -> None:
        session.timer = math.inf
        if rank != session.rank or session.key not in self._changed:
            session.rank = self._changed[session.key] = rank

    def _set_timer(self, session: _Session, when: float) -> None:
        session.timer = when
        self._timers.push(session)
