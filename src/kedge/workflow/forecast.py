"""Forecasts: who is expected to run how soon, over all runs of all clients (KVFlow, sections 3.1 and 3.3).

A forecast is a hint. One that is late, doubled, about nobody or simply wrong is ignored and counted, never an error.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from kedge.errors import ConfigError
from kedge.types import AgentId, RunId, TenantId
from kedge.workflow.step_graph import NodeId, RunState, StepGraph
from kedge.workflow.steps import NextRun


class RunKey(NamedTuple):
    """One run of one client."""

    tenant: TenantId
    client_id: str
    run_id: RunId


class AgentKey(NamedTuple):
    """One agent in one run of one client: what a label in the cache is named by."""

    tenant: TenantId
    client_id: str
    run_id: RunId
    agent: AgentId


Changes = Mapping[AgentKey, NextRun | None]
"""Agents whose next run is another than before; None: nothing is known of it any more."""


class Ignored(StrEnum):
    """Why a hint, or what it says of one agent, was ignored."""

    STALE = "stale"
    """Its sequence number is not above the last one."""
    NEGATIVE = "negative sequence number"
    ENDED = "the run has ended"
    UNKNOWN_AGENT = "unknown agent"
    BAD_VALUE = "steps below 0, or a probability outside 0..1"


@dataclass(frozen=True)
class Forecast:
    """What is expected of one run: a snapshot that never changes."""

    run: RunKey
    seq: int
    """Grows with every update of the run."""
    expires: float
    """The time from which it is worth nothing."""
    next_runs: Mapping[AgentId, NextRun]

    def __post_init__(self) -> None:
        object.__setattr__(self, "next_runs", MappingProxyType(dict(self.next_runs)))

    @property
    def steps(self) -> dict[AgentKey, float]:
        """The steps-to-execution of its agents, as the cache reads them."""
        return {AgentKey(*self.run, agent): next_run.steps for agent, next_run in self.next_runs.items()}

    def changes_from(self, old: Forecast | None) -> Changes:
        """What is different in this forecast of the same run."""
        before = old.next_runs if old else {}
        gone = {AgentKey(*self.run, agent): None for agent in before if agent not in self.next_runs}
        new = {
            AgentKey(*self.run, agent): next_run
            for agent, next_run in self.next_runs.items()
            if before.get(agent) != next_run
        }
        return {**gone, **new}


@dataclass(frozen=True)
class _Run:
    """What the board knows of a run."""

    forecast: Forecast
    agents: frozenset[AgentId] | None = None
    """Whom it has; None: whomever its hints name."""
    ended: bool = False
    """It stays for one `ttl` more, so that a late hint does not bring it back."""


class ForecastBoard:
    """The newest forecast of every run, each with its own sequence numbers and expiry. One thread owns it.

    All methods that change something take the time `now` (seconds, from any clock that does not go back), drop what
    has expired by then, and return what changed: the cache relabels those agents and no others. An update replaces the
    whole forecast of its run and touches no other run, so it costs by the agents of one run, whoever else is there.
    """

    def __init__(self, ttl: float = 600.0) -> None:
        """`ttl`: seconds for which a forecast is believed. Raises `ConfigError` where it is not above 0."""
        if not ttl > 0:
            raise ConfigError("ttl", ttl, "must be above 0 seconds")
        self._ttl = ttl
        self._runs: OrderedDict[RunKey, _Run] = OrderedDict()  # by expiry
        self.ignored: Counter[Ignored] = Counter()

    def open(self, run: RunKey, agents: Iterable[AgentId], now: float) -> Changes:
        """Says whom a run has: hints about others are ignored from now on. Without it, whomever a hint names."""
        changes = self.expire(now)
        if run not in self._runs:
            self._put(_Run(Forecast(run, -1, now + self._ttl, {}), frozenset(agents)))
        return changes

    def update(self, run: RunKey, seq: int, next_runs: Mapping[AgentId, NextRun], now: float) -> Changes:
        """Replaces the forecast of `run`, whole or, where the hint is ignored, not at all."""
        changes = self.expire(now)
        old = self._runs.get(run)
        if reason := _refusal(old, seq):
            self.ignored[reason] += 1
            return changes
        agents = old.agents if old else None
        new = _Run(Forecast(run, seq, now + self._ttl, self._sound(next_runs, agents)), agents)
        self._put(new)
        return {**changes, **new.forecast.changes_from(old.forecast if old else None)}

    def done(self, run: RunKey, now: float) -> Changes:
        """The run has ended: its agents are forgotten, and so is every later hint."""
        changes = self.expire(now)
        old = self._runs.get(run)
        ended = Forecast(run, old.forecast.seq if old else -1, now + self._ttl, {})
        self._put(_Run(ended, ended=True))
        return {**changes, **ended.changes_from(old.forecast if old else None)}

    def expire(self, now: float) -> Changes:
        """Forgets what nobody has renewed in time."""
        changes: dict[AgentKey, NextRun | None] = {}
        while self._runs and (first := next(iter(self._runs.values()))).forecast.expires <= now:
            del self._runs[first.forecast.run]
            changes.update(dict.fromkeys(first.forecast.steps))
        return changes

    def forecast(self, run: RunKey) -> Forecast | None:
        """The newest forecast of `run`, if it has one."""
        known = self._runs.get(run)
        return known.forecast if known else None

    @property
    def steps(self) -> dict[AgentKey, float]:
        """The steps-to-execution of every agent of every run. Costs by all agents; see the returned changes instead."""
        return {key: steps for known in self._runs.values() for key, steps in known.forecast.steps.items()}

    def _put(self, known: _Run) -> None:
        self._runs[known.forecast.run] = known
        self._runs.move_to_end(known.forecast.run)

    def _sound(self, next_runs: Mapping[AgentId, NextRun], agents: frozenset[AgentId] | None) -> dict[AgentId, NextRun]:
        """What a hint says, without what cannot be meant."""
        sound = {}
        for agent, next_run in next_runs.items():
            if agents is not None and agent not in agents:
                self.ignored[Ignored.UNKNOWN_AGENT] += 1
            elif not (next_run.steps >= 0 and 0 <= next_run.probability <= 1):
                self.ignored[Ignored.BAD_VALUE] += 1
            else:
                sound[agent] = next_run
        return sound


def _refusal(old: _Run | None, seq: int) -> Ignored | None:
    if seq < 0:
        return Ignored.NEGATIVE
    if old is None:
        return None
    if old.ended:
        return Ignored.ENDED
    return Ignored.STALE if seq <= old.forecast.seq else None


class RunProgress:
    """Follows one run of a step graph and publishes its forecast whenever an agent starts or finishes.

    What happens is believed, whatever the graph expected. Of an agent's nodes, the one that was expected first is
    meant. An agent that is not in the graph is ignored, and counted by the board.
    """

    def __init__(self, graph: StepGraph, run: RunKey, board: ForecastBoard) -> None:
        self.graph, self.run, self.state = graph, run, RunState()
        self._board = board
        self._seq = 0

    def begin(self, now: float) -> Changes:
        """Nothing runs yet."""
        opened = self._board.open(self.run, self.graph.nodes_of, now)
        return {**opened, **self._publish(now)}

    def started(self, agent: AgentId, now: float) -> Changes:
        """`agent` runs. Where it was done before, the next iteration of its loop begins."""
        if node := self._expected(agent):
            self.state = self.graph.started(self.state, node)
        return self._publish(now)

    def finished(self, agent: AgentId, now: float) -> Changes:
        """`agent` is done, whether or not anyone said that it had started."""
        if node := self._running(agent) or self._expected(agent):
            self.state = self.graph.finished(self.graph.started(self.state, node), node)
        return self._publish(now)

    def end(self, now: float) -> Changes:
        """The run is over, finished or not."""
        return self._board.done(self.run, now)

    def _running(self, agent: AgentId) -> NodeId | None:
        running = (node for node in self.graph.nodes_of.get(agent, ()) if node in self.state.running)
        return next(running, None)

    def _expected(self, agent: AgentId) -> NodeId | None:
        """The node of `agent` that is next to start; None where all of them run, or it has none."""
        idle = [node for node in self._nodes(agent) if node not in self.state.running]
        if len(idle) < 2:
            return idle[0] if idle else None
        return min(idle, key=self.graph.steps(*self.state).__getitem__)

    def _nodes(self, agent: AgentId) -> tuple[NodeId, ...]:
        if agent not in self.graph.nodes_of:
            self._board.ignored[Ignored.UNKNOWN_AGENT] += 1
        return self.graph.nodes_of.get(agent, ())

    def _publish(self, now: float) -> Changes:
        self._seq += 1
        return self._board.update(self.run, self._seq, self.graph.next_runs(self.state), now)
