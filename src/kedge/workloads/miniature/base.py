"""The common form of the miniature tasks: generated questions, roles and the split into train and test.

The tasks mirror the role cycles of KVCOMM (paper, 6.3.2) at a size that a model of a few million parameters learns.
Every agent's reference answer follows from the question, so that every agent can be scored.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kedge.workloads.base import Question

Split = Literal["train", "test"]

TEST_SHARE = 8
"""One question in eight, chosen by a hash of its text, is kept for testing and never trained on."""


@dataclass(frozen=True)
class Role:
    """One agent of a task: its id and title, its system prompt, its reference answer and its scorer."""

    id: str
    title: str
    system: str
    reference: Callable[[Question], str] = field(repr=False)
    correct: Callable[[str, Question], bool] = field(repr=False)
    tool_lead: str | None = None
    """Text before the result of this role's tool, if it has one."""
    tool: Callable[[str, Question], str] | None = field(default=None, repr=False)
    """(answer, question) -> the text of the tool's result."""
    tool_reference: Callable[[Question], str] | None = field(default=None, repr=False)
    """Question -> the tool's result for the reference answer, so that training data needs no sandbox."""
    reacts: Callable[[Question, Mapping[str, str]], str] | None = field(default=None, repr=False)
    """(question, what it reads beside it, by placeholder) -> the reference answer, where that is more than the question
    decides."""

    pick: str = ""
    """Where its pick stands, see `Agent.pick`"""

    def answer(self, question: Question, read: Mapping[str, str]) -> str:
        """Return the reference answer to a question and to what the role reads beside it, by placeholder."""
        return self.reacts(question, read) if self.reacts else self.reference(question)


@dataclass(frozen=True)
class Task:
    """A miniature task: its roles in speaking order (the last one decides) and its generator."""

    name: str
    roles: tuple[Role, ...]
    generate: Callable[[random.Random], Question] = field(repr=False)
    corrupt: Callable[[random.Random, str], str] = field(repr=False)
    """Returns a plausible wrong version of an answer, to train the others not to trust blindly."""
    final: Callable[[str], str | None] = field(repr=False)
    """The decision in the last agent's answer, or None where there is none."""

    def role(self, role_id: str) -> Role:
        """Return the role of this id."""
        return next(role for role in self.roles if role.id == role_id)

    def questions(self, split: Split, seed: int) -> _Questions:
        """Return an endless seeded stream of questions of one split."""
        return _Questions(self, split, random.Random(f"{self.name}/{split}/{seed}"))


@dataclass
class _Questions:
    task: Task
    split: Split
    rng: random.Random

    def __iter__(self) -> _Questions:
        return self

    def __next__(self) -> Question:
        while True:
            question = self.task.generate(self.rng)
            if split_of(question.text) == self.split:
                return question


def split_of(text: str) -> Split:
    """Return the split of a question: a function of its text alone, so the two never overlap."""
    return "test" if zlib.crc32(text.encode()) % TEST_SHARE == 0 else "train"
