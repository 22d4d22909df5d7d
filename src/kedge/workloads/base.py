"""What every workload offers: a question, a team that answers it, and a score."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kedge.errors import WorkflowError
from kedge.types import AgentId
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.topologies import TOPOLOGIES, Topology, Wording, connect

QUESTION = "user_question"
"""The one input of every workload's workflow"""


@dataclass(frozen=True)
class Question:
    """One question and its answer. `facts` is what scorers (and reference answers) need besides."""

    text: str
    answer: str
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)


class Workload(Protocol):
    """A team of agents with a scorer; what the benchmarks run."""

    @property
    def name(self) -> str: ...

    def workflow(self, agents: int | None = None, topology: str | Topology = "fully_connected") -> Workflow:
        """The team: the first `agents` - 1 and the last, who decides (default: all).

        Raises `WorkflowError` for an unknown topology or a number of agents that it does not have.
        """

    def right(self, agent: AgentId, answer: str, question: Question) -> bool | None:
        """Whether what an agent said is right; None where it has nothing to be right about."""

    def final(self, answer: str) -> str | None:
        """The decision in the last agent's answer, in a form that can be compared; None where there is none."""

    def corrupt(self, rng: random.Random, answer: str) -> str:
        """A wrong version of an agent's answer; the answer itself where nothing in it can be made wrong."""


@dataclass(frozen=True)
class Team:
    """A workload of agents in speaking order whose answers are all scored by one rule."""

    name: str
    agents: tuple[Agent, ...]
    """Their `user` templates are written from `wording` and the topology"""
    wording: Wording
    stated: Callable[[str], str | None] = field(repr=False)
    """The decision in an answer"""
    accepts: Callable[[str | None, Question], bool] = field(repr=False)
    """Whether a decision is right"""
    silent: frozenset[AgentId] = frozenset()
    """Agents that state no answer"""
    wrong: Callable[[random.Random, str], str] = field(default=lambda _, answer: answer, repr=False)

    def workflow(self, agents: int | None = None, topology: str | Topology = "fully_connected") -> Workflow:
        cast = _cast(self.name, self.agents, agents)
        if isinstance(topology, str):
            topology = _named(topology, cast)
        return connect(self.name, cast, topology, self.wording, (QUESTION,))

    def right(self, agent: AgentId, answer: str, question: Question) -> bool | None:
        return None if agent in self.silent else self.accepts(self.stated(answer), question)

    def final(self, answer: str) -> str | None:
        return self.stated(answer)

    def corrupt(self, rng: random.Random, answer: str) -> str:
        return self.wrong(rng, answer)

    def with_max_tokens(self, max_tokens: int) -> Team:
        """The same team with longer or shorter answers (the paper: 512 tokens)."""
        return replace(self, agents=tuple(replace(agent, max_tokens=max_tokens) for agent in self.agents))


def _cast(name: str, agents: Sequence[Agent], count: int | None) -> list[Agent]:
    *first, last = agents
    if count is None:
        return [*first, last]
    if not 1 <= count <= len(agents):
        raise WorkflowError("agents", count, f"the workload {name} has 1 to {len(agents)}")
    return [*first[: count - 1], last]


def _named(topology: str, agents: Sequence[Agent]) -> Topology:
    if topology not in TOPOLOGIES:
        raise WorkflowError("topology", topology, f"not one of {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[topology](agents)
