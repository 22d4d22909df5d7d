"""Forecasts: how soon each agent is expected to run, over all runs of all clients (KVFlow, sections 3.1 and 3.3).

A forecast is a hint. One that is late, repeated, wrong or about an unknown agent is ignored and counted, never an
error.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from kedge.errors import ConfigError
from kedge.types import AgentId, AgentKey, Namespace, RunKey
from kedge.workflow.step_graph import RunState, StepGraph
from kedge.workflow.steps import NextRun

Changes = Mapping[AgentKey, NextRun | None]
"""Agents whose next run has changed; None: it is not known any more."""


@dataclass(frozen=True)
class Forecast:
    """Immutable snapshot of the expected next runs of one run's agents."""

    run: RunKey
    seq: int
    """Grows with every update of the run."""
    expires: float
    """The time from which it is ignored."""
    next_runs: Mapping[AgentId, NextRun]
    ended: bool = False
    """An ended run stays for one `ttl`, so that a late hint does not bring it back."""

    @property
    def steps(self) -> dict[AgentKey, float]:
        """Steps-to-execution by agent, as the cache reads them."""
        return {AgentKey(*self.run, agent): next_run.steps for agent, next_run in self.next_runs.items()}

    def changes_from(self, old: Self | None) -> Changes:
        """Return what differs from an older forecast of the same run."""
        before = old.next_runs if old else {}
        now = {agent: self.next_runs.get(agent) for agent in (*before, *self.next_runs)}
        return {AgentKey(*self.run, agent): one for agent, one in now.items() if before.get(agent) != one}


class ForecastBoard:
    """The newest forecast of every run, each with its own sequence numbers and expiry. One thread owns it.

    All methods that change something take the time `now` (seconds, from any clock that does not go back), drop what
    has expired by then, and return what changed: the cache relabels those agents and no others. An update replaces the
    whole forecast of its run and no other: O(agents of the run).
    """

    def __init__(self, ttl: float = 600.0) -> None:
        """Create an empty board; forecasts expire after `ttl` seconds. Raises `ConfigError` unless that is above 0."""
        if not ttl > 0:
            raise ConfigError("ttl", ttl, "must be above 0 seconds")
        self.ttl = ttl
        self._runs: OrderedDict[RunKey, Forecast] = OrderedDict()  # by expiry
        self.ignored = 0
        """Hints, and entries for single agents, that were late or could not be meant"""

    def update(self, run: RunKey, seq: int, next_runs: Mapping[AgentId, NextRun], now: float) -> Changes:
        """Replace the forecast of `run`: whole or, where the hint is ignored, not at all."""
        changes = self.expire(now)
        old = self._runs.get(run)
        if seq < 0 or (old and (old.ended or seq <= old.seq)):
            self.ignored += 1
            return changes
        sound = {agent: one for agent, one in next_runs.items() if one.steps >= 0 and 0 <= one.probability <= 1}
        self.ignored += len(next_runs) - len(sound)
        new = Forecast(run, seq, now + self.ttl, sound)
        self._put(new)
        return {**changes, **new.changes_from(old)}

    def done(self, run: RunKey, now: float) -> Changes:
        """End a run: forget its agents, and ignore all later hints."""
        changes = self.expire(now)
        old = self._runs.get(run)
        ended = Forecast(run, old.seq if old else -1, now + self.ttl, {}, ended=True)
        self._put(ended)
        return {**changes, **ended.changes_from(old)}

    def expire(self, now: float) -> Changes:
        """Forget the forecasts that were not renewed in time."""
        changes: dict[AgentKey, NextRun | None] = {}
        while self._runs and (first := next(iter(self._runs.values()))).expires <= now:
            del self._runs[first.run]
            changes.update(dict.fromkeys(first.steps))
        return changes

    def forget(self, namespace: Namespace) -> Changes:
        """Forget the runs of a namespace, ended ones too: their names may come again. O(all runs)."""
        gone = [one for one in self._runs.values() if one.run.namespace == namespace]
        for one in gone:
            del self._runs[one.run]
        return dict.fromkeys(agent for one in gone for agent in one.steps)

    def forecast(self, run: RunKey) -> Forecast | None:
        """Return the newest forecast of `run`, if it has one."""
        return self._runs.get(run)

    def _put(self, known: Forecast) -> None:
        self._runs[known.run] = known
        self._runs.move_to_end(known.run)


class RunProgress:
    """Progress of one run of a step graph; publishes the run's forecast whenever an agent starts or finishes.

    Events count, whatever the graph expected. They apply to the agent's node that was expected first. An agent that is
    not in the graph is ignored, and counted by the board.
    """

    def __init__(self, graph: StepGraph, run: RunKey, board: ForecastBoard) -> None:
        self.graph, self.run, self.state = graph, run, RunState()
        self._board = board
        self._seq = 0

    def begin(self, now: float) -> Changes:
        """Publish the first forecast: nothing runs yet."""
        return self._publish(now)

    def started(self, agent: AgentId, now: float) -> Changes:
        """Record that `agent` runs. Where it was done before, the next iteration of its loop begins."""
        if node := self._expected(agent):
            self.state = self.graph.started(self.state, node)
        return self._publish(now)

    def finished(self, agent: AgentId, now: float) -> Changes:
        """Record that `agent` is done, whether or not its start was recorded."""
        running = [node for node in self.graph.nodes_of.get(agent, ()) if node in self.state.running]
        if node := running[0] if running else self._expected(agent):
            self.state = self.graph.finished(self.graph.started(self.state, node), node)
        return self._publish(now)

    def end(self, now: float) -> Changes:
        """End the run, finished or not."""
        return self._board.done(self.run, now)

    def _expected(self, agent: AgentId) -> str | None:
        """Return the node of `agent` that is next to start; None where all of them run, or it has none."""
        if agent not in self.graph.nodes_of:
            self._board.ignored += 1
        idle = [node for node in self.graph.nodes_of.get(agent, ()) if node not in self.state.running]
        if len(idle) < 2:
            return idle[0] if idle else None
        return min(idle, key=self.graph.steps(*self.state).__getitem__)

    def _publish(self, now: float) -> Changes:
        self._seq += 1
        return self._board.update(self.run, self._seq, self.graph.next_runs(self.state), now)
