"""The interface of every workload: questions, a team that answers them, and a score."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kedge.decisions import first_decision
from kedge.errors import WorkflowError
from kedge.types import AgentId
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.topologies import TOPOLOGIES, Topology, Wording, connect

QUESTION = "user_question"
"""The one input of every workload's workflow."""


@dataclass(frozen=True)
class Question:
    """One question and its answer; `facts` is further data for scorers and reference answers."""

    text: str
    answer: str
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)


class Workload(Protocol):
    """A team of agents with a scorer, as the benchmarks run it."""

    @property
    def name(self) -> str: ...

    def workflow(self, agents: int | None = None, topology: str | Topology = "fully_connected") -> Workflow:
        """Return the team: the first `agents` - 1 and the last, which decides (default: all).

        Raises `WorkflowError` for an unknown topology or a number of agents that the team does not have.
        """

    def right(self, agent: AgentId, answer: str, question: Question) -> bool | None:
        """Return whether an agent's answer is correct; None for agents without a scored answer."""

    def final(self, answer: str) -> str | None:
        """Return the decision in the last agent's answer in comparable form; None where there is none."""

    def first_decision(self, answer: str) -> str:
        """Return the name of the function that an agent's answer begins by calling, or `kedge.decisions.PROSE`."""

    def grammar(self, agent: AgentId, question: Question) -> str:
        """Return the grammar of an agent's answer, as `SamplingParams.grammar` takes it; "" for none."""

    def corrupt(self, rng: random.Random, answer: str) -> str:
        """Return a wrong version of an agent's answer; the answer itself where nothing in it can be made wrong."""


@dataclass(frozen=True)
class Team:
    """A workload of agents in speaking order whose answers are all scored by one rule."""

    name: str
    agents: tuple[Agent, ...]
    """Their `user` templates are generated from `wording` and the topology."""
    wording: Wording
    stated: Callable[[str], str | None] = field(repr=False)
    """Answer -> the decision in it."""
    accepts: Callable[[str | None, Question], bool] = field(repr=False)
    """(decision, question) -> whether the decision is correct."""
    silent: frozenset[AgentId] = frozenset()
    """Agents without a scored answer."""
    wrong: Callable[[random.Random, str], str] = field(default=lambda _, answer: answer, repr=False)
    constrained: Callable[[AgentId, Question], str] = field(default=lambda *_: "", repr=False)
    """(agent, question) -> the grammar of its answer."""

    def workflow(self, agents: int | None = None, topology: str | Topology = "fully_connected") -> Workflow:
        cast = _cast(self.name, self.agents, agents)
        if isinstance(topology, str):
            topology = _named(topology, cast)
        return connect(self.name, cast, topology, self.wording, (QUESTION,))

    def right(self, agent: AgentId, answer: str, question: Question) -> bool | None:
        return None if agent in self.silent else self.accepts(self.stated(answer), question)

    def final(self, answer: str) -> str | None:
        return self.stated(answer)

    def first_decision(self, answer: str) -> str:
        return first_decision(answer)

    def grammar(self, agent: AgentId, question: Question) -> str:
        return self.constrained(agent, question)

    def corrupt(self, rng: random.Random, answer: str) -> str:
        return self.wrong(rng, answer)


def _cast(name: str, agents: Sequence[Agent], count: int | None) -> list[Agent]:
    *first, last = agents
    if count is None:
        return [*first, last]
    if not 1 <= count <= len(agents):
        raise WorkflowError("agents", count, f"the workload {name} has 1 to {len(agents)}")
    return [*first[: count - 1], last]


def _named(topology: str, agents: Sequence[Agent]) -> Topology:
    if topology not in TOPOLOGIES:
        raise WorkflowError("topology", topology, f"must be one of {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[topology](agents)
