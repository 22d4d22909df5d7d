"""The same team with what agents share in front: the order of a prompt that plain prefix caching reuses without loss.

Every agent's user message up to its last placeholder (the question, the answers that it reads and their introductions)
begins the prompt; the agent's own role and instruction follow. Agents that read the same values in the same order then
have the same prompt up to the last value that they share.
"""

from __future__ import annotations

from dataclasses import replace

from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.template import after_last_placeholder

GAP = "\n\n"
"""Between the shared values and the role."""


def role_last(workflow: Workflow) -> Workflow:
    """Return `workflow` with the system text of every agent behind the values that it reads, in the user message.

    Agents whose user message has no placeholder get their system text in front of it. Placeholders in a system text
    stay where that text has them.
    """
    return replace(workflow, agents=tuple(map(_role_last, workflow.agents)))


def _role_last(agent: Agent) -> Agent:
    """Return the agent with the shared part of its user message, its system text, and the rest in one message."""
    if not agent.system:
        return agent
    at = after_last_placeholder(agent.user)
    shared, own = agent.user[:at], agent.user[at:]
    gap = "" if not own or own[:1].isspace() else GAP
    return replace(agent, system="", user=f"{shared}{GAP if shared else ''}{agent.system}{gap}{own}")
