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


def role_last_prompt(system: str, user: str) -> str:
    """Return the user message that has both templates in it: the shared part of `user`, `system`, the rest of `user`.

    Raises `WorkflowError` for a malformed template.
    """
    if not system:
        return user
    at = after_last_placeholder(user)
    shared, own = user[:at], user[at:]
    gap = "" if not own or own[:1].isspace() else GAP
    return f"{shared}{GAP if shared else ''}{system}{gap}{own}"


def _role_last(agent: Agent) -> Agent:
    return replace(agent, system="", user=role_last_prompt(agent.system, agent.user))
