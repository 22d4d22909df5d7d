"""The closed loop: a turn arrives when the one before has been answered and its recorded gap has passed.

So what a cache misses makes a queue, and the queue makes the cache miss. One engine in virtual time prefills one
request at a time, loads from the host beside nothing, and decodes all side by side; running requests hold their
blocks. Its cache, order of service and learning are Kedge's own. Sessions share nothing but what they repeat
themselves: every play of a conversation has blocks of its own.
"""

import heapq
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from kedge.bench.sessions.arrivals import BLOCK, Conversation, TraceTurn, is_traffic
from kedge.bench.sessions.measure import SPACE, NoCopier, Progress
from kedge.cache import CacheManager, Lease, Readiness
from kedge.engine.local.sessions import SessionCaching
from kedge.errors import OutOfBlocks
from kedge.policies.eviction import policy_of
from kedge.policies.service import LiveContexts, ServiceOrder, missing_share
from kedge.policies.sessions import SessionHints, Turn, TurnEnd
from kedge.settings import TierSettings
from kedge.types import RequestId, Source


@dataclass(slots=True, eq=False)
class ClosedSession:
    """A play of a conversation. Its blocks are numbered from `first_block`."""

    number: int
    turns: Conversation
    first_block: int
    at: int = 0
    """The turn that waits, runs or comes next."""
    arrived_at: float = 0.0

    @property
    def turn(self) -> TraceTurn:
        """The turn that waits, runs or comes next."""
        return self.turns[self.at]

    @property
    def request(self) -> RequestId:
        """The id of its request."""
        return RequestId(f"{self.number}:{self.at}")

    @property
    def is_over(self) -> bool:
        """Whether all its turns have been answered."""
        return self.at == len(self.turns)

    def chain(self, most: int) -> tuple[int, ...]:
        """Return at most `most` blocks of its prompt."""
        return tuple(self.first_block + block for block in self.turn.chain[:most])


Leaves = dict[str, dict[str, dict[str, float | None]]]
"""Live sessions -> system -> name -> figure"""
Admitted = tuple[ClosedSession, int, int]
"""Who was admitted, with blocks that it found on the device and on the host"""


class ServingSystem:
    """An engine that serves in the order of arrival and evicts what was used least recently."""

    def __init__(self, capacity: int, tiers: TierSettings) -> None:
        """Start with an empty cache of `capacity` device blocks."""
        self.cache = CacheManager(capacity, 1, policy_of(tiers), tiers, NoCopier())
        self.waiting: dict[ClosedSession, tuple[int, ...]] = {}
        """Chains of the requests that wait, in the order of arrival."""
        self.running: dict[ClosedSession, tuple[int, ...]] = {}

    def arrive(self, session: ClosedSession, now: float) -> None:  # noqa: ARG002
        """Queue a session's next request."""
        self.waiting[session] = session.chain(self.cache.num_blocks)

    def admit(self, now: float) -> Admitted | None:  # noqa: ARG002
        """Admit the request that is next. Returns None if there is none, or no room for it."""
        session = self.next()
        lease = self._lease(session, self.waiting[session]) if session else None
        if session is None or lease is None:
            return None
        self.running[session] = self.waiting.pop(session)
        on_host = sum(len(span) for span in lease.spans if span.source is Source.HOST)
        return session, lease.exact_tokens - on_host, on_host

    def answered(self, session: ClosedSession, now: float) -> None:  # noqa: ARG002
        """End a session's request; its prompt is cached."""
        self.cache.finish(session.request, self.running.pop(session))
        self._copy()

    def next(self) -> ClosedSession | None:
        """Return the request that is next, if any waits."""
        return next(iter(self.waiting), None)

    def _lease(self, session: ClosedSession, chain: tuple[int, ...]) -> Lease | None:
        self._copy()  # what is being copied is held
        answer = -(-session.turn.record.output_tokens // BLOCK)
        room = min(self.cache.num_blocks, len(chain) + answer)
        while self.cache.demand(session.request, SPACE, chain) is Readiness.LOADING:
            self._copy()
        try:
            return self.cache.admit(session.request, SPACE, chain, len(chain), room)
        except OutOfBlocks:
            return None

    def _copy(self) -> None:
        """Make all copies between the tiers; their time is the caller's."""
        while self.cache.pump():
            pass


class KedgeSystem(ServingSystem):
    """Kedge: order of service and eviction by session."""

    def __init__(self, capacity: int, tiers: TierSettings) -> None:
        super().__init__(capacity, tiers)
        self._now = 0.0
        self._sessions = SessionCaching(self.cache, clock=lambda: self._now)
        self._turns: dict[ClosedSession, Turn] = {}
        self._live = LiveContexts(lambda: self._now)
        self._order: ServiceOrder[ClosedSession] = ServiceOrder(self._missing)

    def arrive(self, session: ClosedSession, now: float) -> None:
        super().arrive(session, now)
        self._now = now
        chain = self.waiting[session]
        turn = self._turns[session] = self._sessions.begin(SPACE, chain, SessionHints())
        self._order.push(session, len(chain))
        self._live.began(session, turn.session, len(chain))

    def next(self) -> ClosedSession | None:
        overloaded = self._live.tokens() > self.cache.num_blocks
        order = self._order.order(self.cache.version, overloaded)
        if overloaded:
            self._sessions.ledger.waiting([self._turns[one] for one in order])
        return next(iter(order), None)

    def admit(self, now: float) -> Admitted | None:
        self._now = now
        self._sessions.advance()
        admitted = super().admit(now)
        if admitted:
            self._order.remove(admitted[0])
        return admitted

    def answered(self, session: ClosedSession, now: float) -> None:
        self._now = now
        chain, turn = self.running[session], self._turns.pop(session)
        super().answered(session, now)
        self._sessions.answered(turn, chain, TurnEnd(session.turn.record.stop))
        self._copy()
        self._live.ended(session, len(chain))

    def _missing(self, session: ClosedSession) -> float:
        chain = self.waiting[session]
        status = self.cache.status(SPACE, chain)
        return missing_share(len(chain), status.device_tokens, status.host_tokens)


def systems(capacity: int, host_times: int) -> Mapping[str, Callable[[], ServingSystem]]:
    """Return the systems to compare by name, with `capacity` device blocks."""
    host = TierSettings(host_memory=f"{host_times * capacity} blocks", backup_hits=0)
    return {
        "lru": partial(ServingSystem, capacity, TierSettings(policy="lru")),
        "kedge": partial(KedgeSystem, capacity, TierSettings()),
        f"kedge_host{host_times}": partial(KedgeSystem, capacity, host),
    }


START_SECONDS, PAUSE_SECONDS = 60.0, (1.0, 10.0)
"""The slots' first sessions begin within this time; the pause between two sessions of a slot."""
LEAST_TURNS = 9
"""Turns of the conversations that are played; shorter ones would be mostly first turns."""
UNKNOWN_GAP = 5.0
"""Seconds between two turns whose gap was not recorded."""


@dataclass(frozen=True)
class ClosedSettings:
    """One engine. Its speeds and its room are chosen: another engine's differ."""

    room_tokens: int = 1_200_000
    """Tokens of the device tier."""
    host_times: int = 4
    """Blocks of the host tier over those of the device, where there is one."""
    prefill_rate: float = 20_000.0
    """Tokens per second."""
    load_rate: float = 200_000.0
    """Tokens per second from the host."""
    decode_seconds: float = 0.015
    """Seconds per token of an answer."""
    cap: float = 60.0
    """Seconds at which gaps are cut."""
    warm_up: float = 900.0
    end: float = 3600.0
    """Seconds from the start; figures are of the time between the two."""
    seed: int = 0

    @property
    def room(self) -> int:
        """Blocks of the device tier."""
        return self.room_tokens // BLOCK


@dataclass
class ClosedFigures:
    """What was measured after the warm-up."""

    seconds: float
    hit_blocks: int = 0
    blocks: int = 0
    turns: int = 0
    waits: list[float] = field(default_factory=list)
    """Seconds from arrival to the first token; requests that still waited at the end count with what they waited."""

    def as_json(self) -> dict[str, float | None]:
        """Return the figures as written to a file of results; None where nothing was served."""
        return {
            "hit": round(self.hit_blocks / self.blocks, 4) if self.blocks else None,
            "turns_per_min": round(60 * self.turns / self.seconds, 2),
            "ttft_p50_s": _quantile(self.waits, 0.5),
            "ttft_p99_s": _quantile(self.waits, 0.99),
        }


def closed_loop(
    live: Sequence[int], engine: ClosedSettings, conversations: Sequence[Conversation], progress: Progress
) -> Leaves:
    """Return the figures of a trace by live sessions and system. Traffic of many users, in which no turn waits for
    an answer, and conversations that are all too short give none.
    """
    played = [] if is_traffic(conversations) else main_sessions(conversations)
    return {str(number): _figures(played, number, engine, progress) for number in live if played}


def _figures(
    played: Sequence[Conversation], live: int, settings: ClosedSettings, progress: Progress
) -> dict[str, dict[str, float | None]]:
    figures = {}
    for name, system in systems(settings.room, settings.host_times).items():
        progress(f"{live} live in a closed loop, {name}")
        figures[name] = ClosedReplay(played, live, settings, system()).run().as_json()
    return figures


def main_sessions(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Return the conversations without their sub-agents, as far as they are long enough."""
    main = [[turn for turn in one if turn.record.parent is None] for one in conversations]
    return [one for one in main if len(one) >= LEAST_TURNS]


class ClosedReplay:
    """The engine and its clients. Events are calls at their times."""

    def __init__(
        self, conversations: Sequence[Conversation], live: int, settings: ClosedSettings, system: ServingSystem
    ) -> None:
        self._conversations, self._settings, self._system = conversations, settings, system
        self._rng = random.Random(settings.seed)
        self._order = self._rng.sample(range(len(conversations)), len(conversations))
        self._stride = 1 + max(block for one in conversations for turn in one for block in turn.chain)
        self._plays, self._numbers = count(), count()
        self._events: list[tuple[float, int, Callable[[ClosedSession], None], ClosedSession]] = []
        self._now = 0.0
        self._is_prefilling = False
        self._figures = ClosedFigures(settings.end - settings.warm_up)
        for _ in range(live):
            self._play_next(self._rng.uniform(0, START_SECONDS))

    def run(self) -> ClosedFigures:
        """Serve until the end."""
        while self._events and self._events[0][0] <= self._settings.end:
            self._now, _, happen, session = heapq.heappop(self._events)
            happen(session)
            self._serve()
        self._figures.waits += [self._settings.end - one.arrived_at for one in self._system.waiting]
        return self._figures

    def _at(self, seconds: float, happen: Callable[[ClosedSession], None], session: ClosedSession) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), happen, session))

    def _play_next(self, pause: float) -> None:
        play = next(self._plays)
        turns = self._conversations[self._order[play % len(self._order)]]
        self._at(pause, self._arrive, ClosedSession(play, turns, play * self._stride))

    def _arrive(self, session: ClosedSession) -> None:
        session.arrived_at = self._now
        self._system.arrive(session, self._now)

    def _serve(self) -> None:
        """Admit the next request, if no other one is prefilled and there is room."""
        while not self._is_prefilling and (admitted := self._system.admit(self._now)):
            session, on_device, on_host = admitted
            self._is_prefilling = True
            record = session.turn.record
            computed = max(1, record.tokens - BLOCK * (on_device + on_host))
            seconds = computed / self._settings.prefill_rate + BLOCK * on_host / self._settings.load_rate
            self._at(seconds, self._prefilled, session)
            if self._is_measured:
                self._figures.hit_blocks += on_device + on_host
                self._figures.blocks += len(session.turn.chain)
                self._figures.turns += 1

    def _prefilled(self, session: ClosedSession) -> None:
        self._is_prefilling = False
        if self._is_measured:
            self._figures.waits.append(self._now - session.arrived_at)
        self._at(session.turn.record.output_tokens * self._settings.decode_seconds, self._answered, session)

    def _answered(self, session: ClosedSession) -> None:
        gap = session.turn.record.gap
        self._system.answered(session, self._now)
        session.at += 1
        if session.is_over:
            self._play_next(self._rng.uniform(*PAUSE_SECONDS))
        else:
            self._at(min(UNKNOWN_GAP if gap is None else gap, self._settings.cap), self._arrive, session)

    @property
    def _is_measured(self) -> bool:
        return self._now >= self._settings.warm_up


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Return the least value that at least a share of all values does not exceed; None of no values."""
    if not values:
        return None
    return round(sorted(values)[max(0, math.ceil(share * len(values)) - 1)], 3)
