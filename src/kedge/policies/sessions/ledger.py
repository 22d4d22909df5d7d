"""The sessions of one engine: their turns, the steps until they return, and the policy that rules its cache.

Every engine has the same ledger. It gives the chains of prompts, and applies what `advance` returns to its own cache.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from kedge.hints.actions import ActionOutcome
from kedge.policies.forecast_record import ForecastRecord
from kedge.policies.forecast_record import NextRuns as Forecasts
from kedge.policies.sessions.advice import SessionAdvice
from kedge.policies.sessions.guard import Guard
from kedge.policies.sessions.links import Chain
from kedge.policies.sessions.steps import NextRuns, SessionSteps
from kedge.policies.sessions.turns import NO_HINTS, UNKNOWN_END, SessionHints, SessionKey, TurnEnd
from kedge.types import AgentKey, Namespace, TurnHints


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a session, from its arrival to the end of its answer."""

    session: SessionKey
    began: float
    """Seconds"""
    chain: Chain
    """Prefix hashes of the full blocks of its prompt"""
    hints: SessionHints = NO_HINTS

    def end(self, end: TurnEnd) -> TurnEnd:
        """Return its end, with what its request has said of that."""
        returns_in = self.hints.returns_in if end.returns_in is None else end.returns_in
        is_last = end.is_last or self.hints.is_last
        return replace(end, returns_in=returns_in, is_last=is_last, keep_for=self.hints.keep_for)


class LedgerChanges(NamedTuple):
    """What an engine applies to its cache."""

    steps: NextRuns
    swaps_policy: bool
    """Whether the other policy rules from now on: LRU, or that of sessions again"""


class SessionLedger:
    """Finds the session of every request, learns from its turns, and watches whether that wins. One thread owns it."""

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without sessions, for a cache of `num_blocks` blocks. `clock` is in seconds."""
        self._clock, self._arrivals = clock, itertools.count()
        self.steps, self.guard = SessionSteps(), Guard(num_blocks)
        self._advice = SessionAdvice(self.steps)
        self._record = ForecastRecord()
        self._swaps_policy = False

    # turns ----------------------------------------------------------------------------------------------------

    def arrive(self, namespace: Namespace, chain: Chain, hints: SessionHints = NO_HINTS) -> Turn:
        """Begin a turn. Its session is needed before all idle ones, and after those whose turns began earlier."""
        now = self._clock()
        if hints.agent is not None:
            self._record.called(hints.agent)
        key = self.steps.arrive(namespace, chain, now, hints, next(self._arrivals))
        for other, seconds in hints.expects.items():
            self.steps.tracker.expect(SessionKey(namespace, other), now, seconds)
        self._swaps_policy ^= self.guard.access(key, chain)
        return Turn(key, now, chain, hints)

    def waiting(self, turns: Iterable[Turn]) -> None:
        """Set the places of turns that wait to their places in the order of service: the last is needed last.

        Places count by powers of two, so that one that goes first changes the steps of few others.
        """
        for place, turn in enumerate(turns):
            self.steps.hold(turn.session, place.bit_length())

    def answered(self, turn: Turn, chain: Chain, end: TurnEnd = UNKNOWN_END) -> None:
        """End a turn with an answer; `chain` is what its session is found by next."""
        now, key = self._clock(), turn.session
        self.steps.observe_call(key, now - turn.began)
        self.steps.answered(key, chain, now, self._advice.completed(key, turn.end(end)))
        if len(chain) > len(turn.chain):
            self.guard.own(key, chain)

    def cancelled(self, turn: Turn) -> None:
        """End a turn without an answer."""
        self.steps.cancelled(turn.session, self._clock())
        self._advice.cancelled(turn.session)

    def advise(self, namespace: Namespace, hints: TurnHints) -> tuple[ActionOutcome, ...]:
        """Take what a client says of its sessions without a request. Returns what becomes of each hint."""
        return tuple(self._advice.take(namespace, hints, self._clock()))

    # agents of workflows --------------------------------------------------------------------------------------

    def own(self, agent: AgentKey, chain: Chain) -> None:
        """Take the fixed prompt of an agent, which the cache keeps by the agent's steps."""
        self.guard.own(agent, chain)

    def on_forecast(self, changes: Forecasts) -> Forecasts:
        """Take the changes of the forecast. Returns them as the cache takes them: runs are less probable where the
        client's forecasts do not come true.
        """
        self.steps.on_forecast(changes)
        self.guard.on_steps(changes)
        return self._record.on_forecast(changes)

    # once per step --------------------------------------------------------------------------------------------

    def advance(self) -> LedgerChanges:
        """Return what has changed since the last call. O(changed sessions x log n)."""
        steps = self.steps.advance(self._clock())
        if steps:
            self.guard.on_steps(steps)
        swaps, self._swaps_policy = self._swaps_policy, False
        return LedgerChanges(steps, swaps)
