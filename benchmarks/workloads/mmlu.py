"""MMLU: questions of 57 subjects with four options, and an agent that looks things up (KVCOMM, Table 1)."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks.workloads.rows import DatasetSource
from kedge.types import AgentId
from kedge.workflow.graph import Agent
from kedge.workflow.topologies import Wording
from kedge.workloads.base import Question, Team
from kedge.workloads.rows import Row

LETTERS = "ABCD"
_STATED = re.compile(r"answer is[\s:*(]*([A-D])\b", re.IGNORECASE)
_ALONE = re.compile(r"^\W*([A-D])(?:\W.*)?$", re.MULTILINE)
_SOUGHT = re.compile(r"search:(.*)", re.IGNORECASE)


def question(row: Row) -> Question:
    """Convert a row with `question`, four `choices` and `answer`, the index of the correct one."""
    choices, right = list(row["choices"]), int(row["answer"])
    if len(choices) != len(LETTERS) or not 0 <= right < len(LETTERS):
        raise ValueError(f"{len(choices)} choices, answer {right}")
    options = "\n".join(f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=True))
    return Question(f"{str(row['question']).strip()}\n{options}", LETTERS[right], {"subject": row.get("subject", "")})


def letter(text: str) -> str | None:
    """Return the option after the last `answer is`, else that of the last line that begins with one."""
    found = _STATED.findall(text) or _ALONE.findall(text)
    return found[-1].upper() if found else None


def accepts(stated: str | None, asked: Question) -> bool:
    """Return whether the stated option is correct."""
    return stated == asked.answer


def wrong(rng: random.Random, text: str) -> str:
    """Replace the stated option by another."""
    found = list(_STATED.finditer(text)) or list(_ALONE.finditer(text))
    if not found:
        return text
    option = rng.choice([other for other in LETTERS if other != found[-1][1].upper()])
    return text[: found[-1].start(1)] + option + text[found[-1].end(1) :]


@dataclass(frozen=True)
class LookUp:
    """The Wiki Searcher's tool: the articles whose titles follow `Search:`, separated by semicolons.

    Kedge contains no encyclopedia. Without articles the tool answers that nothing was found.
    """

    articles: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Title in lower case -> text."""
    characters: int = 600
    """Characters of each article, from its beginning."""

    def __call__(self, answer: str, inputs: Mapping[str, str]) -> str:  # noqa: ARG002 (a tool's signature)
        titles = [title.strip(" .").lower() for line in _SOUGHT.findall(answer) for title in line.split(";")]
        found = dict.fromkeys(title for title in titles if title in self.articles)
        return "\n".join(f"{title}: {self.articles[title][: self.characters]}" for title in found) or "Nothing found."


def with_articles(team: Team, articles: Mapping[str, str]) -> Team:
    """Return the same team with an encyclopedia: title -> text."""
    tool = LookUp({title.lower(): text for title, text in articles.items()})
    agents = (replace(agent, tool=tool) if agent.tool else agent for agent in team.agents)
    return replace(team, agents=tuple(agents))


_END = "End with: The answer is <letter>."
_CAST = (
    (
        "expert",
        "Knowledgeable Expert",
        "You know a great deal about every subject taught at school and university. Recall the facts, definitions or "
        f"laws that decide the question, say in a sentence how each option fits them. {_END}",
    ),
    (
        "searcher",
        "Wiki Searcher",
        "You look things up in an encyclopedia. Name up to three titles of articles that would settle the question, on "
        "one line that begins with Search: and separates the titles by semicolons. Add nothing else.",
    ),
    (
        "critic",
        "Critic",
        "You criticise. Look for what your colleagues took for granted, for misread words in the question and for "
        f"options that were dismissed too soon; say what follows from it. {_END}",
    ),
    (
        "mathematician",
        "Mathematician",
        "You calculate and prove. Where the question can be put into formulas, do so and work it out; where it cannot, "
        f"test each option for contradictions. {_END}",
    ),
    (
        "final",
        "FinalRefer",
        "You decide. Read the question again, weigh the arguments of your colleagues and what was found, and explain "
        f"in two sentences which option is right. {_END}",
    ),
)
_PICKS = {"final": "answer is <letter>"}
SOURCE = DatasetSource("cais/mmlu", "test", question, "all")
TEAM = Team(
    "mmlu",
    tuple(
        Agent(name, system, "", LookUp() if name == "searcher" else None, title, 512, pick=_PICKS.get(name, ""))
        for name, title, system in _CAST
    ),
    Wording(
        header="The question:\n{user_question}",
        intro="\n\nWhat your colleagues say:",
        speaker="\n\n{title} says:\n",
        tool="\nThe encyclopedia says:\n",
        footer="\n\nIt is your turn, {title}.",
    ),
    final=letter,
    accepts=accepts,
    silent=frozenset({AgentId("searcher")}),
    corrupt=wrong,
)
