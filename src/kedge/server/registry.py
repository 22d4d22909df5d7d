"""Registered workflows of the tenants, and the reuse modes of their agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kedge.errors import NotFound, SpecError, WorkflowError
from kedge.guard import GuardMode
from kedge.types import AgentId, ReuseMode
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.spec import build_workflow
from kedge.workflow.template import CompiledAgent

MAX_WORKFLOWS, MAX_STEPS = 256, 1024
"""Workflows of a tenant, calls in one run of a workflow."""


@dataclass(frozen=True)
class Registered:
    """Registered workflow with its reuse modes and compiled prompts."""

    workflow: Workflow
    reuse: ReuseMode | None = None
    """Mode of agents without a mode of their own; None for the server's default."""
    prompts: Mapping[AgentId, CompiledAgent] = field(default_factory=dict)
    """Prompts of all agents, compiled for the served model."""

    def agent(self, name: str) -> Agent:
        """Return the agent with this id. Raises `NotFound`."""
        if name not in self.workflow.ids:
            raise NotFound("agent", name, f"the workflow {self.workflow.name!r} has {', '.join(self.workflow.ids)}")
        return self.workflow.agent(name)

    def mode(self, agent: Agent, default: ReuseMode, asked: ReuseMode | None = None) -> ReuseMode:
        """Return the reuse mode of `agent`. Its own mode overrides `asked`, which is for a whole run."""
        return agent.reuse or asked or self.reuse or default

    def for_run(
        self,
        default: ReuseMode,
        asked: ReuseMode | None = None,
        by_name: Mapping[str, ReuseMode] = MappingProxyType({}),
        guard: GuardMode | None = None,
    ) -> Workflow:
        """Return the workflow with a mode in every agent; `by_name` overrides everything else. `guard` is the guard's
        mode for agents without one of their own.

        Raises `NotFound` for an unknown agent in `by_name`.
        """
        for name in by_name:
            self.agent(name)
        modes = {agent.id: by_name.get(agent.id) or self.mode(agent, default, asked) for agent in self.workflow.agents}
        agents = (replace(a, reuse=modes[a.id], guard=a.guard or guard) for a in self.workflow.agents)
        return replace(self.workflow, agents=tuple(agents))


def registered(data: object, reuse: ReuseMode | None, *, tools: bool) -> Registered:
    """Return a checked workflow of parsed YAML or JSON. Raises `WorkflowError`."""
    agents = data.get("agents") if isinstance(data, dict) and not tools else None
    for agent in agents if isinstance(agents, list) else ():
        if isinstance(agent, dict) and agent.get("tool") is not None:
            raise SpecError("tool", agent["tool"], "this server runs no tools (`kedge serve --tools` allows them)")
    workflow = build_workflow(data)
    if not workflow.name.strip() or len(workflow.name) > 128 or "/" in workflow.name or not workflow.name.isprintable():
        raise SpecError("name", workflow.name, "must have 1 to 128 printable characters without '/'")
    if len(workflow.agents) * workflow.turns > MAX_STEPS:
        raise WorkflowError("agents", len(workflow.agents), f"with their turns, at most {MAX_STEPS} calls in a run")
    return Registered(workflow, reuse)
