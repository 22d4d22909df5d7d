"""Sessions and agents of workflows on one scale: steps until their KV is needed, as caches order it.

Forecasts go before what is learned: an agent's steps-to-execution (KVFlow) say when its next call comes. Where no
forecast says anything, the session's own rank does.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from kedge.policies.sessions.links import Chain
from kedge.policies.sessions.tracker import SessionTracker
from kedge.policies.sessions.turns import NO_HINTS, UNKNOWN_END, SessionHints, SessionKey, TurnEnd
from kedge.types import AgentKey, Namespace

NextRuns = Mapping[SessionKey, tuple[float, float] | None]
"""Steps until a session returns, with a probability (always 1); None: nothing is expected of it any more."""
START_PACE = 1.0
"""Seconds that a step of a workflow takes, until one was observed."""
WEIGHT = 0.1
"""Share of a new observation in the pace."""
WAITING = -1.0
"""The step of a session with a request in flight: sooner than all that is idle."""


class SessionSteps:
    """Steps of sessions: from the forecast of their agent where it has one, else from when they tend to return.

    An agent's prompts are a session only if they were seen to continue one another: what varies behind a fixed prompt
    is not needed again, and gets no step at all.
    """

    def __init__(self, tracker: SessionTracker | None = None) -> None:
        self.tracker = tracker or SessionTracker()
        self._pace = START_PACE
        self._runs: dict[AgentKey, float] = {}
        self._sessions: dict[AgentKey, SessionKey] = {}
        self._agents: dict[SessionKey, tuple[AgentKey, Hashable]] = {}
        self._places: dict[SessionKey, float] = {}
        self._moved: set[SessionKey] = set()

    # turns ----------------------------------------------------------------------------------------------------

    def arrive(
        self, namespace: Namespace, chain: Chain, now: float, hints: SessionHints = NO_HINTS, place: float = 0.0
    ) -> SessionKey:
        """Return the session of a request, which is needed before all idle ones from now on.

        Of those in flight the least `place` is needed first.
        """
        key = self.tracker.arrive(namespace, chain, now, hints)
        self.hold(key, place)
        if hints.agent is not None:
            self._agents[key] = (hints.agent, hints.flow)
            self._sessions[hints.agent] = key
        return key

    def hold(self, key: SessionKey, place: float) -> None:
        """Set the place of a session in flight among those that wait."""
        if self._places.get(key) != place:
            self._places[key] = place
            self._moved.add(key)

    def answered(self, key: SessionKey, chain: Chain, now: float, end: TurnEnd = UNKNOWN_END) -> None:
        """Take the end of a turn, see `SessionTracker.answered`."""
        self._places.pop(key, None)
        self.tracker.answered(key, chain, now, end)
        self._moved.add(key)

    def cancelled(self, key: SessionKey, now: float) -> None:
        """Take the end of a turn without an answer."""
        self._places.pop(key, None)
        self.tracker.cancelled(key, now)
        self._moved.add(key)

    # forecasts ------------------------------------------------------------------------------------------------

    def observe_call(self, key: SessionKey, seconds: float) -> None:
        """Learn how long a step of a workflow takes, from the time that an agent's call took."""
        if seconds > 0 and key in self._agents:
            self._pace += WEIGHT * (seconds - self._pace)

    def on_forecast(self, changes: Mapping[AgentKey, tuple[float, float] | None]) -> None:
        """Take the changes of the forecast; an agent whose run is over takes its session along."""
        for agent, next_run in changes.items():
            key = self._sessions.get(agent)
            if next_run is not None:
                self._runs[agent] = next_run[0]
            elif self._runs.pop(agent, None) is not None and key is not None:
                self.tracker.end(key)
            if key is not None:
                self._moved.add(key)

    def advance(self, now: float) -> NextRuns:
        """Return the steps that have changed since the last call. O(changed sessions x log n)."""
        ranks = self.tracker.advance(now)
        if not ranks and not self._moved:
            return {}
        for key in self._moved:
            ranks.setdefault(key, self.tracker.rank(key))
        self._moved.clear()
        return {key: self._next_run(key, rank) for key, rank in ranks.items()}

    def _next_run(self, key: SessionKey, rank: float | None) -> tuple[float, float] | None:
        if rank is None or key not in self.tracker:
            self._forget(key)
            return None
        if (place := self._places.get(key)) is not None:
            return WAITING / (1 + max(0.0, place)), 1.0
        agent, flow = self._agents.get(key, (None, None))
        if agent is None:
            return rank / self._pace, 1.0
        share = self.tracker.continues(flow)
        if not share:
            return None
        return ((self._runs[agent] + 1) / share if agent in self._runs else rank / self._pace), 1.0

    def expects(self, key: SessionKey) -> bool:
        """Return whether a session may return, as far as is known."""
        return self._next_run(key, self.tracker.rank(key)) is not None

    def obstacle(self, key: SessionKey) -> str:
        """Return why what is said of when an idle session returns does not count now; "" where it does."""
        agent, flow = self._agents.get(key, (None, None))
        if agent is None:
            return ""
        if not self.tracker.continues(flow):
            return "counts once prompts of its agent are seen to continue one another"
        return "counts once its agent's forecast is over" if agent in self._runs else ""

    def _forget(self, key: SessionKey) -> None:
        self._places.pop(key, None)
        agent, _ = self._agents.pop(key, (None, None))
        if agent is not None and self._sessions.get(agent) == key:
            del self._sessions[agent]
