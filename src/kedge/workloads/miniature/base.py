"""The common form of the miniature tasks: generated questions, roles and the split into train and test.

The tasks mirror the role cycles of KVCOMM (paper, 6.3.2) at a size that a model of a few million parameters learns.
Every agent's reference answer follows from the question, so that every agent can be scored. The default wording of
`connect` is the one that the bundled model was trained on.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kedge.types import AgentId
from kedge.workflow.graph import Agent, Tool
from kedge.workflow.topologies import Wording, presented, user_template
from kedge.workloads.base import Question, Team

Split = Literal["train", "test"]

TEST_SHARE = 8
"""One question in eight, chosen by a hash of its text, is kept for testing and never trained on."""
MAX_TOKENS = 192
"""Limit of an answer, longer than any reference answer."""


@dataclass(frozen=True)
class Role:
    """One agent of a task: its id and title, its system prompt, its reference answer and its scorer."""

    id: str
    title: str
    system: str
    reference: Callable[[Question], str] = field(repr=False)
    correct: Callable[[str, Question], bool] = field(repr=False)
    tool: Tool | None = field(default=None, repr=False)
    tool_reference: Callable[[Question], str] | None = field(default=None, repr=False)
    """Question -> the tool's result for the reference answer, so that training data needs no sandbox."""
    pick: str = ""
    """Where its pick stands, see `Agent.pick`"""


@dataclass(frozen=True)
class Task(Team):
    """A miniature task: a team whose agents all have a reference answer, and the generator of its questions."""

    roles: tuple[Role, ...] = ()
    generate: Callable[[random.Random], Question] = field(kw_only=True, repr=False)

    @classmethod
    def of(
        cls,
        name: str,
        roles: tuple[Role, ...],
        *,
        generate: Callable[[random.Random], Question],
        corrupt: Callable[[random.Random, str], str],
        final: Callable[[str], str | None],
        tool_lead: str,
    ) -> Task:
        """Return the task of some roles in speaking order; `tool_lead` is the text before the result of a tool."""
        agents = tuple(Agent(one.id, one.system, "", one.tool, one.title, MAX_TOKENS, pick=one.pick) for one in roles)
        return cls(name, agents, Wording(tool=tool_lead), final, corrupt=corrupt, roles=roles, generate=generate)

    def role(self, role_id: str) -> Role:
        """Return the role of this id."""
        return next(role for role in self.roles if role.id == role_id)

    def right(self, agent: AgentId, answer: str, question: Question) -> bool:
        return self.role(agent).correct(answer, question)

    def prompt(self, role: Role, heard: Sequence[Role]) -> str:
        """Return the user message of `role` when it reads the answers of `heard`, with placeholders still in it."""
        answers = [presented(one.id, one.title, self.wording, has_tool=bool(one.tool)) for one in heard]
        return user_template(role.title, answers, self.wording)

    def questions(self, split: Split, seed: int) -> Iterator[Question]:
        """Yield questions of one split without an end, the same for the same seed."""
        rng = random.Random(f"{self.name}/{split}/{seed}")
        while True:
            question = self.generate(rng)
            if split_of(question.text) == split:
                yield question


def split_of(text: str) -> Split:
    """Return the split of a question: a function of its text alone, so the two never overlap."""
    return "test" if zlib.crc32(text.encode()) % TEST_SHARE == 0 else "train"
