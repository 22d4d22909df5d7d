"""Where the dashboard's runs are, and the calls that were made in them."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from kedge.server.dashboard.calls import CallRecord
from kedge.server.dashboard.records import AgentState, finite
from kedge.types import AgentId, WorkflowId
from kedge.workflow.forecast import RunKey

MAX_AGENTS_OF_A_RUN = 64
MAX_CALLS_OF_A_RUN = 128


@dataclass(slots=True)
class RunRecord:
    """Where a run is; at most `MAX_AGENTS_OF_A_RUN` of its agents, and its last `MAX_CALLS_OF_A_RUN` calls."""

    number: int
    workflow: WorkflowId
    began: float
    has_ended: bool = False
    states: dict[AgentId, AgentState] = field(default_factory=dict)
    calls: Counter[AgentId] = field(default_factory=Counter)
    steps: dict[AgentId, float] = field(default_factory=dict)
    """Steps-to-execution; infinite where unknown."""
    log: deque[CallRecord] = field(default_factory=lambda: deque(maxlen=MAX_CALLS_OF_A_RUN))

    def put(self, agent: AgentId, state: AgentState) -> None:
        """An agent's state; a call is counted when it is done."""
        if self._has_room(agent):
            self.states[agent] = state
            self.calls[agent] += state is AgentState.DONE

    def expect(self, agent: AgentId, steps: float) -> None:
        """An agent's steps-to-execution; its state stays as it is."""
        if self._has_room(agent):
            self.states.setdefault(agent, AgentState.EXPECTED)
            self.steps[agent] = steps

    def _has_room(self, agent: AgentId) -> bool:
        return agent in self.states or len(self.states) < MAX_AGENTS_OF_A_RUN

    def end(self) -> None:
        self.has_ended = True
        self.steps.clear()

    def to_dict(self, key: RunKey, now: float) -> dict[str, Any]:
        """Plain data for the page."""
        agents = {
            agent: {"state": state, "calls": self.calls[agent], "steps": finite(self.steps.get(agent))}
            for agent, state in self.states.items()
        }
        age = round(now - self.began, 1)
        head = {"number": self.number, "id": key.name, "workflow": self.workflow, "age_s": age}
        return {**head, "ended": self.has_ended, "agents": agents}

    def to_details(self, key: RunKey, now: float) -> dict[str, Any]:
        """The same with its calls, oldest first."""
        return {**self.to_dict(key, now), "calls": [call.to_details(now) for call in self.log]}
