"""The engines of the closed loop, on `CacheManager`: one "token" is a 512-token block, and blocks have one token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kedge.bench.sessions.product import STOPS
from kedge.bench.sessions.records import BLOCK
from kedge.bench.sessions.replay import SPACE
from kedge.bench.sessions.turns import Conversation, TraceTurn
from kedge.bench.workflow.cache import NoCopier
from kedge.cache import CacheManager, Lease, Readiness
from kedge.engine.local.sessions import SessionCaching
from kedge.errors import OutOfBlocks
from kedge.policies.eviction import policy_of
from kedge.policies.service import LiveContexts, ServiceOrder, missing_share
from kedge.policies.sessions import SessionHints, StopReason, Turn, TurnEnd
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

    def admit(self, now: float) -> Admitted | None:
        """Admit the request that is next. Returns None if there is none, or no room for it."""
        session = self.next(now)
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

    def next(self, now: float) -> ClosedSession | None:  # noqa: ARG002
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
        self._live = LiveContexts()
        self._order: ServiceOrder[ClosedSession] = ServiceOrder(self._missing)

    def arrive(self, session: ClosedSession, now: float) -> None:
        super().arrive(session, now)
        self._now = now
        chain = self.waiting[session]
        turn = self._turns[session] = self._sessions.begin(SPACE, chain, SessionHints())
        self._order.push(session, len(chain))
        self._live.began(turn.session, len(chain))

    def next(self, now: float) -> ClosedSession | None:
        overloaded = self._live.tokens(now) > self.cache.num_blocks
        order = self._order.order(self.cache.version, overloaded)
        if overloaded:
            self._sessions.waiting([self._turns[one] for one in order])
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
        end = TurnEnd(STOPS.get(session.turn.record.stop, StopReason.UNKNOWN))
        self._sessions.answered(turn, chain, end)
        self._copy()
        self._live.ended(turn.session, len(chain), len(chain), now)

    def _missing(self, session: ClosedSession) -> float:
        chain = self.waiting[session]
        status = self.cache.status(SPACE, chain)
        return missing_share(len(chain), status.device_tokens, status.host_tokens)


def systems(capacity: int, host_times: int) -> Mapping[str, Callable[[], ServingSystem]]:
    """Return the systems to compare by name, with `capacity` device blocks."""
    host = TierSettings(host_blocks=host_times * capacity, backup_hits=0)
    return {
        "lru": partial(ServingSystem, capacity, TierSettings(policy="lru")),
        "kedge": partial(KedgeSystem, capacity, TierSettings()),
        f"kedge_host{host_times}": partial(KedgeSystem, capacity, host),
    }
