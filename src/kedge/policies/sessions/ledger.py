"""The sessions of one engine: their turns, the steps until they return, and the policy that rules its cache.

Every engine has the same ledger. It gives the chains of prompts, and applies what `advance` returns to its own cache.
"""

import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kedge.hints.actions import ActionOutcome, ActionResult
from kedge.policies.eviction import NextRuns
from kedge.policies.sessions.guard import Guard
from kedge.policies.sessions.tracker import SessionState, SessionTracker
from kedge.policies.sessions.turns import NO_HINTS, RECENT, UNKNOWN_END, Chain, SessionHints, SessionKey, TurnEnd
from kedge.structures.bounded import BoundedDict
from kedge.types import AgentKey, Namespace, TurnHints

START_PACE = 1.0
"""Seconds that a step of a workflow takes, until one was observed."""
WAITING = -1.0
"""The step of a session with a request in flight: sooner than all that is idle."""
UNKNOWN = "no such session is known"
NAMELESS = "needs the id of a session"
GIVEN_UP = "the session ends"
NO_SESSIONS = "this engine's cache does not follow sessions"
LATER = "counts from the session's next answer on"


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a session, from its arrival to the end of its answer."""

    session: SessionKey
    began: float
    """Seconds"""
    chain: Chain
    """Prefix hashes of the full blocks of its prompt"""
    hints: SessionHints = NO_HINTS


class LedgerChanges(NamedTuple):
    """What an engine applies to its cache."""

    steps: NextRuns[SessionKey]
    swaps_policy: bool
    """Whether the other policy rules from now on: LRU, or sessions again"""


class SessionLedger:
    """Finds the session of every request, learns from its turns, and watches whether that wins. One thread owns it.

    A session's KV is needed when the forecast of its agent says (steps-to-execution, KVFlow), else when such sessions
    tend to return. An agent's prompts are a session only if they were seen to continue one another: what varies behind
    a fixed prompt is not needed again, and gets no step at all.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without sessions, for a cache of `num_blocks` blocks. `clock` is in seconds."""
        self._clock, self._arrivals = clock, itertools.count()
        self.tracker, self.guard = SessionTracker(), Guard(num_blocks)
        self._standing: BoundedDict[SessionKey, TurnEnd] = BoundedDict(owner=lambda key: key.namespace.tenant)
        """Hints for turns that bring none of their own; no tenant evicts another tenant's"""
        self._swaps_policy = False
        self._pace = START_PACE
        self._runs: dict[AgentKey, float] = {}
        """Steps until each agent with a forecast runs"""
        self._sessions: dict[AgentKey, SessionKey] = {}
        self._agents: dict[SessionKey, tuple[AgentKey, Hashable]] = {}
        """The agent of a session, in its run and in all runs"""
        self._places: dict[SessionKey, float] = {}
        """The places of sessions in flight in the order of service: the least is needed first"""
        self._moved: set[SessionKey] = set()

    # turns ----------------------------------------------------------------------------------------------------

    def arrive(self, namespace: Namespace, chain: Chain, hints: SessionHints = NO_HINTS) -> Turn:
        """Begin a turn. Its session is needed before all idle ones, and after those whose turns began earlier."""
        now = self._clock()
        key = self.tracker.arrive(namespace, chain, now, hints)
        if hints.agent is not None:
            self._forget(key)  # its last turn may have been in another run
            self._agents[key] = (hints.agent, hints.flow)
            self._sessions[hints.agent] = key
        self._hold(key, next(self._arrivals))
        for other, seconds in hints.expects.items():
            self.tracker.expect(SessionKey(namespace, other), now, seconds)
        self._swaps_policy ^= self.guard.access(key, chain)
        return Turn(key, now, chain, hints)

    def waiting(self, turns: Iterable[Turn]) -> None:
        """Set the places of turns that wait to their places in the order of service: the last is needed last.

        Places count by powers of two, so that one that goes first changes the steps of few others.
        """
        for place, turn in enumerate(turns):
            self._hold(turn.session, place.bit_length())

    def _hold(self, key: SessionKey, place: float) -> None:
        if self._places.get(key) != place:
            self._places[key] = place
            self._moved.add(key)

    def answered(self, turn: Turn, chain: Chain, end: TurnEnd = UNKNOWN_END) -> None:
        """End a turn with an answer; `chain` is what its session is found by next."""
        now, key = self._clock(), turn.session
        if now > turn.began and key in self._agents:
            self._pace += RECENT * (now - turn.began - self._pace)
        end, hint = end.or_else(turn.hints), self._standing.pop(key, UNKNOWN_END)
        end = end.or_else(hint)
        if hint.keep_for is not None and not end.is_last:
            self._standing[key] = TurnEnd(keep_for=hint.keep_for)
        self.tracker.answered(key, chain, now, end)
        self._ended(key)
        if len(chain) > len(turn.chain):
            self.guard.own(key, chain)

    def cancelled(self, turn: Turn) -> None:
        """End a turn without an answer."""
        self.tracker.cancelled(turn.session, self._clock())
        if self._standing.get(turn.session, UNKNOWN_END).is_last:
            del self._standing[turn.session]
            self.tracker.end(turn.session)
        self._ended(turn.session)

    def _ended(self, key: SessionKey) -> None:
        self._places.pop(key, None)
        self._moved.add(key)

    # what clients say of sessions between two requests --------------------------------------------------------

    def advise(self, namespace: Namespace, hints: TurnHints) -> tuple[ActionOutcome, ...]:
        """Take what a client says of its sessions without a request. Returns what becomes of each hint: of those on the
        session itself, then of `expects`.
        """
        return tuple(self._take(namespace, hints, self._clock()))

    def _take(self, namespace: Namespace, hints: TurnHints, now: float) -> Iterator[ActionOutcome]:
        key, said = SessionKey(namespace, hints.session), _said(hints)
        if said and not hints.session:
            yield from (ActionOutcome(name, NAMELESS) for name in said)
        elif hints.is_last and hints.session:
            yield from self._end(key, said)
        else:
            if hints.keep_for is not None:
                yield self._keep(key, hints.keep_for, now)
            if hints.returns_in is not None:
                if self.tracker.state(key) is SessionState.IN_FLIGHT:
                    self._update(key, returns_in=hints.returns_in)
                    yield ActionOutcome("returns_in", "counts from the end of its request", ActionResult.DEFERRED)
                else:
                    yield self._expect(key, hints.returns_in, now)._replace(action_id="returns_in", session="")
        for other, seconds in hints.expects.items():
            yield self._expect(SessionKey(namespace, other), seconds, now)

    def _end(self, key: SessionKey, said: list[str]) -> Iterator[ActionOutcome]:
        yield from (ActionOutcome(name, GIVEN_UP) for name in said if name != "final")
        state = self.tracker.state(key)
        if state is SessionState.IN_FLIGHT:
            self._standing[key] = TurnEnd(is_last=True)
            yield ActionOutcome("final", "it is forgotten with the end of its request", ActionResult.DEFERRED)
            return
        self._standing.pop(key, None)
        self.tracker.end(key)
        if state is SessionState.IDLE:
            yield ActionOutcome("final", "it is forgotten", ActionResult.APPLIED)
        else:
            yield ActionOutcome("final", UNKNOWN)

    def _keep(self, key: SessionKey, seconds: float, now: float) -> ActionOutcome:
        """Keep a session from now on, and after each of its answers."""
        self._update(key, keep_for=seconds)
        if self.tracker.state(key) is not SessionState.IDLE:
            return ActionOutcome("keep_for", LATER, ActionResult.DEFERRED)
        self.tracker.keep(key, now, seconds)
        if obstacle := self._obstacle(key):
            return ActionOutcome("keep_for", obstacle, ActionResult.DEFERRED)
        what = "is kept" if seconds else "goes before other KV"
        return ActionOutcome("keep_for", f"{what} from now on, and after each of its answers", ActionResult.APPLIED)

    def _expect(self, key: SessionKey, seconds: float, now: float) -> ActionOutcome:
        state, name = self.tracker.state(key), str(key.name)
        if state is SessionState.UNKNOWN:
            return ActionOutcome("expects", UNKNOWN, session=name)
        if state is SessionState.IN_FLIGHT:
            return ActionOutcome("expects", "a request of it is in flight", session=name)
        self.tracker.expect(key, now, seconds)
        if obstacle := self._obstacle(key):
            return ActionOutcome("expects", obstacle, ActionResult.DEFERRED, name)
        how = "is kept and loaded by that time" if math.isfinite(seconds) else "goes before other KV"
        return ActionOutcome("expects", how, ActionResult.APPLIED, name)

    def _update(self, key: SessionKey, **changes: Any) -> None:
        """Change what stands of a session's hints for its next turns."""
        self._standing[key] = replace(self._standing.get(key, UNKNOWN_END), **changes)

    def _obstacle(self, key: SessionKey) -> str:
        """Return why a hint on when a session returns is not used yet; "" where it is."""
        agent, flow = self._agents.get(key, (None, None))
        if agent is None:
            return ""
        if not self.tracker.continues(flow):
            return "counts once prompts of its agent are seen to continue one another"
        return "counts once its agent's forecast is over" if agent in self._runs else ""

    # agents of workflows --------------------------------------------------------------------------------------

    def own(self, agent: AgentKey, chain: Chain) -> None:
        """Take the fixed prompt of an agent, which the cache keeps by the agent's steps."""
        self.guard.own(agent, chain)

    def on_forecast(self, changes: NextRuns[AgentKey]) -> None:
        """Take the changes of the forecast; an agent whose run is over takes its session along."""
        for agent, next_run in changes.items():
            key = self._sessions.get(agent)
            if next_run is not None:
                self._runs[agent] = next_run[0]
            elif self._runs.pop(agent, None) is not None and key is not None:
                self.tracker.end(key)
            if key is not None:
                self._moved.add(key)
        self.guard.on_steps(changes)

    # once per step --------------------------------------------------------------------------------------------

    def advance(self) -> LedgerChanges:
        """Return what has changed since the last call. O(changed sessions x log n)."""
        ranks = self.tracker.advance(self._clock())
        for key in self._moved:
            ranks.setdefault(key, self.tracker.rank(key))
        self._moved.clear()
        steps = {key: self._next_run(key, rank) for key, rank in ranks.items()}
        self.guard.on_steps(steps)
        swaps, self._swaps_policy = self._swaps_policy, False
        return LedgerChanges(steps, swaps)

    def expects(self, key: SessionKey) -> bool:
        """Return whether a session may return, as far as is known."""
        return self._next_run(key, self.tracker.rank(key)) is not None

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

    def _forget(self, key: SessionKey) -> None:
        self._places.pop(key, None)
        agent, _ = self._agents.pop(key, (None, None))
        if agent is not None and self._sessions.get(agent) == key:
            del self._sessions[agent]


def refused(hints: TurnHints, reason: str, outcome: ActionResult = ActionResult.REJECTED) -> tuple[ActionOutcome, ...]:
    """Return the outcomes of hints where none is taken, or none is known to be."""
    others = (ActionOutcome("expects", reason, outcome, name) for name in hints.expects)
    return (*(ActionOutcome(name, reason, outcome) for name in _said(hints)), *others)


def _said(hints: TurnHints) -> list[str]:
    """Return what is said of the session itself; the end of a call without a session is that of its run."""
    ends = (hints.is_last and bool(hints.session)) or None
    given = {"keep_for": hints.keep_for, "returns_in": hints.returns_in, "final": ends}
    return [name for name, value in given.items() if value is not None]
