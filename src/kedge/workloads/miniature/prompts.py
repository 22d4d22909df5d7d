"""The prompts of the miniature agents: one wording for training, for the demo and for the benchmarks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kedge.decisions import first_decision
from kedge.errors import WorkflowError
from kedge.types import AgentId
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.topologies import TOPOLOGIES, PresentedAnswer, Topology, Wording, user_template
from kedge.workloads.base import QUESTION, Question
from kedge.workloads.miniature.base import Role, Task

MAX_TOKENS = 192
"""Limit of an answer, longer than any reference answer."""

WORDING = Wording(
    header="Question: {user_question}",
    intro="\n\nThe other agents say:",
    speaker="\n\n{title}:\n",
    footer="\n\nNow answer as {title}.",
)


def agent_prompt(role: Role, heard: Sequence[Role]) -> str:
    """Return the user message of `role` when it reads the answers of `heard`, with placeholders still in it."""
    answers = [PresentedAnswer(other.id, other.title, other.tool_lead) for other in heard]
    return user_template(role.title, answers, WORDING)


@dataclass(frozen=True)
class QuestionTool:
    """A role's tool as the tool of a workflow; it sees the question's text alone."""

    tool: Callable[[str, Question], str]

    def __call__(self, answer: str, inputs: Mapping[str, str]) -> str:
        return self.tool(answer, Question(inputs[QUESTION], answer="", facts={}))


def workflow(task: Task, topology: str | Topology = "fully_connected", agents: int | None = None) -> Workflow:
    """Return the task's agents as a workflow. `agents`: how many, the first ones and the last (default: all).

    Raises `WorkflowError` for an unknown topology or a number of agents that the task does not have.
    """
    roles = _cast(task, agents)
    bare = [_agent(role) for role in roles]
    if isinstance(topology, str):
        topology = _named(topology, bare)
    by_id = {role.id: role for role in roles}
    written = (_agent(by_id[name], _user(by_id, name, topology)) for name in topology.reads)
    return Workflow(task.name, tuple(written), turns=topology.turns)


def _cast(task: Task, agents: int | None) -> list[Role]:
    *first, last = task.roles
    if agents is None:
        return [*first, last]
    if not 1 <= agents <= len(task.roles):
        raise WorkflowError("agents", agents, f"the task {task.name} has 1 to {len(task.roles)}")
    return [*first[: agents - 1], last]


def _named(topology: str, agents: Sequence[Agent]) -> Topology:
    if topology not in TOPOLOGIES:
        raise WorkflowError("topology", topology, f"must be one of {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[topology](agents)


def _agent(role: Role, user: str = "") -> Agent:
    tool = QuestionTool(role.tool) if role.tool else None
    return Agent(role.id, role.system, user, tool, role.title, MAX_TOKENS, pick=role.pick)


def _user(roles: Mapping[str, Role], name: str, topology: Topology) -> str:
    heard = (
        PresentedAnswer(other.id, other.title, other.tool_lead, turns_back)
        for speaker, turns_back in topology.reads[AgentId(name)]
        for other in [roles[speaker]]
    )
    return user_template(roles[name].title, list(heard), WORDING)


@dataclass(frozen=True)
class MiniatureTeam:
    """A miniature task as a `Workload`."""

    task: Task

    @property
    def name(self) -> str:
        return self.task.name

    def workflow(self, agents: int | None = None, topology: str | Topology = "fully_connected") -> Workflow:
        return workflow(self.task, topology, agents)

    def right(self, agent: AgentId, answer: str, question: Question) -> bool | None:
        return self.task.role(agent).correct(answer, question)

    def final(self, answer: str) -> str | None:
        return self.task.final(answer)

    def first_decision(self, answer: str) -> str:
        return first_decision(answer)

    def grammar(self, agent: AgentId, question: Question) -> str:  # noqa: ARG002 (any answer will do)
        return ""

    def corrupt(self, rng: random.Random, answer: str) -> str:
        return self.task.corrupt(rng, answer)
