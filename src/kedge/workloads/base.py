"""Workloads: questions, a team that answers them, and a score."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Team:
    """Agents in speaking order whose answers are all scored by one rule."""

    name: str
    agents: tuple[Agent, ...]
    """Their `user` templates are generated from `wording` and the topology."""
    wording: Wording
    final: Callable[[str], str | None] = field(repr=False)
    """Answer -> the decision in it, in comparable form; None where there is none."""
    accepts: Callable[[str | None, Question], bool] = field(default=lambda *_: False, repr=False)
    """(decision, question) -> whether the decision is correct."""
    silent: frozenset[AgentId] = frozenset()
    """Agents without a scored answer."""
    corrupt: Callable[[random.Random, str], str] = field(default=lambda _, answer: answer, repr=False)
    """Returns a plausible wrong version of an answer; the answer itself where nothing in it can be made wrong."""
    grammar: Callable[[AgentId, Question], str] = field(default=lambda *_: "", repr=False)
    """(agent, question) -> the grammar of its answer, as `SamplingParams.grammar` takes it; "" for none."""

    def workflow(self, agents: int | None = None, topology: str | Topology = "fully_connected") -> Workflow:
        """Return the team: the first `agents` - 1 and the last, which decides (default: all).

        Raises `WorkflowError` for an unknown topology or a number of agents that the team does not have.
        """
        if agents is not None and not 1 <= agents <= len(self.agents):
            raise WorkflowError("agents", agents, f"the workload {self.name} has 1 to {len(self.agents)}")
        cast = [*self.agents[: (agents or len(self.agents)) - 1], self.agents[-1]]
        if isinstance(topology, str):
            if topology not in TOPOLOGIES:
                raise WorkflowError("topology", topology, f"must be one of {', '.join(TOPOLOGIES)}")
            topology = TOPOLOGIES[topology](cast)
        return connect(self.name, cast, topology, self.wording, (QUESTION,))

    def right(self, agent: AgentId, answer: str, question: Question) -> bool | None:
        """Return whether an agent's answer is correct; None for agents without a scored answer."""
        return None if agent in self.silent else self.accepts(self.final(answer), question)
