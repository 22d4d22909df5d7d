"""Workloads: questions, a team that answers them, and a score."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kedge.errors import ConfigError, KedgeError
from kedge.types import AgentId
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.topologies import Wording, connect, fully_connected

Item = TypeVar("Item")
Row = Mapping[str, Any]
"""A row of a data set."""
QUESTION = "user_question"
"""The one input of every workload's workflow."""


def read_rows(file: Path, convert: Callable[[Row], Item], what: str, option: str = "dataset") -> list[Item]:
    """Convert all rows of a JSONL file, in their order; `what` they are, `option` is what the file was given as.

    `convert` raises `KeyError`, `ValueError` or `TypeError` for another row. Raises `ConfigError` for that, which names
    the line, and for a file that cannot be read; other errors of Kedge get the line as a note.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # `splitlines` also splits at characters within a text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(option, str(file), f"cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                found.append(convert(json.loads(line)))
        except (KeyError, ValueError, TypeError, RecursionError) as error:  # of which two are for what is not JSON
            raise ConfigError(option, f"{file}:{number}", f"is not {what}: {error!r}") from error
        except KedgeError as error:
            error.add_note(f"in {file}:{number}")
            raise
    return found


@dataclass(frozen=True)
class Question:
    """One question and its answer."""

    text: str
    answer: str
    others: tuple[str, ...] = ()
    """Other answers that are right as well"""


@dataclass(frozen=True)
class Team:
    """Agents in speaking order whose answers are all scored by one rule."""

    name: str
    agents: tuple[Agent, ...]
    """Their `user` templates are generated from `wording`."""
    wording: Wording
    final: Callable[[str], str | None] = field(repr=False)
    """Answer -> the decision in it, in comparable form; None where there is none."""
    accepts: Callable[[str | None, Question], bool] = field(repr=False)
    """(decision, question) -> whether the decision is correct."""

    def workflow(self) -> Workflow:
        """Return the team as a workflow in which every agent reads the answers of all before it."""
        return connect(self.name, self.agents, fully_connected(self.agents), self.wording, (QUESTION,))

    def right(self, agent: AgentId, answer: str, question: Question) -> bool | None:
        """Return whether an agent's answer is correct; None for one whose answer is for its tool."""
        is_silent = any(one.id == agent and one.tool for one in self.agents)
        return None if is_silent else self.accepts(self.final(answer), question)
