"""Forecasts of found runs, as changes for a cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from kedge.discovery.discovery import Discovery
from kedge.discovery.runs import FoundRun
from kedge.types import AgentKey, Namespace, RunKey, Tokens, WorkflowId
from kedge.workflow.forecast import ForecastBoard
from kedge.workflow.steps import NextRun


@dataclass(slots=True)
class ForecastChanges:
    """What has changed since the last look."""

    next_runs: dict[AgentKey, NextRun | None] = field(default_factory=dict)
    """Agents whose next run has changed; None: it is not known any more"""
    prompts: dict[AgentKey, Tokens] = field(default_factory=dict)
    """What the prompts of newly expected agents begin with"""
    teams: dict[AgentKey, WorkflowId] = field(default_factory=dict)
    """The teams of these agents"""


class FoundForecasts:
    """Forecasts of all found runs. They expire as those of clients do, or when nobody goes on with the run."""

    def __init__(self) -> None:
        self._board, self._numbers = ForecastBoard(), count()
        self._changes = ForecastChanges()
        self._expected: set[AgentKey] = set()

    def follow(self, namespace: Namespace, discovery: Discovery, run: FoundRun, now: float) -> None:
        """Take the progress of a run, and the ends of others, at `now` in seconds."""
        key = RunKey(namespace, "", run.flow)
        changes = dict(self._board.update(key, next(self._numbers), discovery.runs.forecast(run), now))
        for over in discovery.runs.over(now):
            changes.update(self._board.done(RunKey(namespace, "", over.flow), now))
        for agent, next_run in changes.items():
            self._changes.next_runs[agent] = next_run
            if next_run is None:
                self._expected.discard(agent)
            elif agent not in self._expected and agent.namespace == namespace:
                self._expect(agent, discovery)

    def take(self) -> ForecastChanges | None:
        """Return what has changed since the last call; None where nothing has."""
        if not self._changes.next_runs:
            return None
        taken, self._changes = self._changes, ForecastChanges()
        return taken

    def _expect(self, agent: AgentKey, discovery: Discovery) -> None:
        self._expected.add(agent)
        self._changes.prompts[agent] = discovery.fixed_prompt(agent.agent)
        self._changes.teams[agent] = discovery.team(agent.agent)
