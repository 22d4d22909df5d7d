"""How soon anchors and base KV are needed, by what they belong to: a template's agent, or a run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from kedge.reuse.contracts import Owner, TemplateOwner
from kedge.structures.bounded import BoundedDict
from kedge.structures.step_counts import StepCounts
from kedge.types import AgentId, RunKey
from kedge.workflow.forecast import AgentKey

MAX_TEMPLATES = 4096
"""Templates whose agents are remembered; the one that called longest ago is forgotten first."""


class UpcomingSteps:
    """The soonest run of every agent and in every run, over all forecasts. An update is O(number of changed agents)."""

    def __init__(self) -> None:
        self._steps: dict[AgentKey, float] = {}
        self._soonest: dict[Hashable, StepCounts] = {}
        self._agents: BoundedDict[TemplateOwner, AgentId] = BoundedDict(MAX_TEMPLATES)

    def on_forecast(self, changes: Mapping[AgentKey, tuple[float, float] | None]) -> None:
        """Take the changes: (steps-to-execution, probability) of agents, or None for those that are forgotten."""
        for key, next_run in changes.items():
            if (old := self._steps.pop(key, None)) is not None:
                self._count(key, old, -1)
            if next_run is not None:
                self._steps[key] = next_run[0]
                self._count(key, next_run[0], 1)

    def asks(self, template: TemplateOwner, agent: AgentId) -> None:
        """Remember that `agent` calls with this template."""
        self._agents[template] = agent

    def steps(self, owner: Owner) -> float | None:
        """Return the fewest steps until `owner` can run, `inf` where it never runs; None where no forecast knows it."""
        if isinstance(owner, RunKey):
            return self._least(owner)
        agent = self._agents.get(owner)
        return None if agent is None else self._least((owner.namespace, agent))

    def _least(self, owner: Hashable) -> float | None:
        counts = self._soonest.get(owner)
        return counts.least if counts else None

    def _count(self, key: AgentKey, step: float, sign: int) -> None:
        for owner in (key.run, (key.namespace, key.agent)):
            counts = self._soonest.setdefault(owner, StepCounts())
            if sign > 0:
                counts.add(step)
            else:
                counts.remove(step)
                if counts.least is None:
                    del self._soonest[owner]
