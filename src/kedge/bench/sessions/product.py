"""Kedge's own cache as the open loop drives it: which hints it is given, and whether it has a host tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kedge.bench.sessions.composing import Arrival
from kedge.bench.sessions.replay import SPACE, CacheReplay, ReplayHooks
from kedge.bench.workflow.cache import NoCopier
from kedge.cache import CacheManager
from kedge.engine.local.sessions import SessionCaching
from kedge.policies.eviction import policy_of
from kedge.policies.sessions import SessionHints, StopReason, Turn, TurnEnd
from kedge.settings import TierSettings
from kedge.types import AgentId, AgentKey, RunId

STOPS = {"tool": StopReason.TOOL, "user": StopReason.USER}
"""What an answer ended with, in traces; all else is unknown."""


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


class SessionHooks:
    """Sessions as the embedded engine finds, learns and ranks them, on the arrivals' clock."""

    def __init__(self, cache: CacheManager, case: ProductCase) -> None:
        self._blocks, self._case = cache.num_blocks, case
        self._now = 0.0
        self._caching = SessionCaching(cache, clock=lambda: self._now)
        self._turn: Turn | None = None

    @property
    def caching(self) -> SessionCaching:
        """The engine's part that finds sessions."""
        return self._caching

    def arrived(self, arrival: Arrival) -> None:
        """Find the session of a request, by its id where that is given."""
        self._now = arrival.at
        agent = agent_of(arrival) if self._case.gives_fixed else None
        hints = SessionHints(
            session=arrival.session if self._case.gives_ids else "",
            flow=(agent.namespace, "trace", agent.agent) if agent else None,
            agent=agent,
        )
        self._turn = self._caching.begin(SPACE, arrival.chain[: self._blocks], hints)

    def answered(self, arrival: Arrival) -> None:
        """End the turn with what its recorded answer ended with and, where that is given, when the next one begins."""
        assert self._turn
        stop = STOPS.get(arrival.turn.record.stop, StopReason.UNKNOWN)
        returns_in = arrival.next_at - arrival.at if self._case.gives_returns else None
        end = TurnEnd(stop, returns_in=returns_in)
        self._caching.answered(self._turn, arrival.chain[: self._blocks], end)


class FixedPromptHints:
    """Hints as documented for agents with fixed prompts: every session is the only agent of a run, which calls again in
    one step, and has a label on its tool definitions and system prompt; its run ends with its last request.
    """

    STEP = 1.0

    def __init__(self, cache: CacheManager, caching: SessionCaching) -> None:
        self._cache, self._caching = cache, caching

    def arrived(self, arrival: Arrival) -> None:
        self._forecast(arrival, (self.STEP, 1.0))

    def answered(self, arrival: Arrival) -> None:
        """Label the fixed prompt, now that it is cached, or withdraw the forecast."""
        if arrival.is_last:
            self._forecast(arrival, None)
        else:
            agent, fixed = agent_of(arrival), arrival.chain[: arrival.turn.fixed_blocks]
            self._cache.on_label(SPACE, agent, fixed)
            self._caching.labelled(agent, fixed)

    def _forecast(self, arrival: Arrival, next_run: tuple[float, float] | None) -> None:
        changes = {agent_of(arrival): next_run}
        self._caching.on_forecast(changes)


def agent_of(arrival: Arrival) -> AgentKey:
    """Return a session as the agent of a run of its own."""
    return AgentKey(SPACE, "", RunId(arrival.session), AgentId(arrival.turn.record.agent))


def product_replay(case: ProductCase, capacity: int) -> CacheReplay:
    """Return an empty cache of `capacity` device blocks, with the hints of the case."""
    tiers = TierSettings(host_blocks=case.host_times * capacity)
    cache = CacheManager(capacity, 1, policy_of(tiers), tiers, NoCopier())
    sessions = SessionHooks(cache, case)
    hints: list[ReplayHooks] = [FixedPromptHints(cache, sessions.caching)] if case.gives_fixed else []
    return CacheReplay(cache, [*hints, sessions])


def product_hit_rate(case: ProductCase, arrivals: Sequence[Arrival], capacity: int) -> float:
    """Return the hit rate of Kedge's cache, in either tier."""
    return product_replay(case, capacity).hit_rate(arrivals)
