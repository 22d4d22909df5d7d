"""Workloads: questions, a team that answers them, and a score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kedge.types import AgentId, GenerateRequest
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.topologies import Wording, connect, fully_connected

Row = Mapping[str, Any]
"""A row of a data set."""
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
    """Their `user` templates are generated from `wording`."""
    wording: Wording
    final: Callable[[str], str | None] = field(repr=False)
    """Answer -> the decision in it, in comparable form; None where there is none."""
    accepts: Callable[[str | None, Question], bool] = field(default=lambda *_: False, repr=False)
    """(decision, question) -> whether the decision is correct."""
    silent: frozenset[AgentId] = frozenset()
    """Agents without a scored answer."""
    grammar: Callable[[AgentId, Question], str] = field(default=lambda *_: "", repr=False)
    """(agent, question) -> the grammar of its answer, as `SamplingParams.grammar` takes it; "" for none."""

    def workflow(self) -> Workflow:
        """Return the team as a workflow in which every agent reads the answers of all before it."""
        return connect(self.name, self.agents, fully_connected(self.agents), self.wording, (QUESTION,))

    def right(self, agent: AgentId, answer: str, question: Question) -> bool | None:
        """Return whether an agent's answer is correct; None for agents without a scored answer."""
        return None if agent in self.silent else self.accepts(self.final(answer), question)

    def constrained(self, question: Question, request: GenerateRequest) -> GenerateRequest:
        """Return a request whose answer has to conform to the grammar of this question."""
        grammar = self.grammar(request.agent, question)
        return replace(request, sampling=replace(request.sampling, grammar=grammar)) if grammar else request
