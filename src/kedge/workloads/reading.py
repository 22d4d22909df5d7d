"""Reading: three agents answer questions about a paragraph of XQuAD, about the last of several, or in sessions."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace

from kedge.workflow.graph import Agent
from kedge.workflow.topologies import Wording
from kedge.workloads.base import Question, Row, Team

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_MARKS = re.compile(r"[^a-z0-9 ]")


def normal(text: str) -> str:
    """Return a text in lower case without articles, punctuation and double spaces."""
    return " ".join(_MARKS.sub(" ", _ARTICLE.sub(" ", text.lower())).split())


def stated(answer: str) -> str | None:
    """Return an answer's first line in comparable form; None where nothing is left of it."""
    return normal(answer.strip().partition("\n")[0]) or None


def contains_gold(stated: str | None, asked: Question) -> bool:
    """Return whether one of the question's answers is in what was stated."""
    return stated is not None and any(normal(gold) in stated for gold in (asked.answer, *asked.others))


def questions(row: Row) -> list[Question]:
    """Convert a row with `context` and `questions`, in a random but fixed order."""
    asked = random.Random(row["context"]).sample(row["questions"], len(row["questions"]))
    text = f"Passage: {row['context']}\n\nQuestion: "
    return [Question(text + one["question"], one["answers"][0], tuple(one["answers"][1:])) for one in asked]


def lengthened(paragraphs: Sequence[Sequence[Question]], passages: int = 4) -> list[list[Question]]:
    """Return questions by paragraph, each behind the passages before it: of `passages`, some 550 tokens for SmolLM2."""
    read = [about[0].text.partition("\n\n")[0] for about in paragraphs]
    before = ([read[at - more] for more in range(passages - 1, 0, -1)] for at in range(len(read)))
    return [
        [replace(one, text="\n\n".join((*texts, one.text))) for one in about]
        for about, texts in zip(paragraphs, before, strict=True)
    ]


def continued(about: Sequence[Question]) -> list[Question]:
    """Return a paragraph's questions as the turns of a session, each behind the ones before it with their answers."""
    turns, history = [], ""
    for one in about:
        passage, _, asked = one.text.partition("\n\n")
        turns.append(replace(one, text=f"{passage}{history}\n\n{asked}"))
        history += f"\n\n{asked}\nAnswer: {one.answer}"
    return turns


_COPY = "with a few words copied from the passage"
READING = Team(
    "reading",
    (
        Agent("reader", f"You read a passage and answer a question about it {_COPY}. Say nothing else.", "", None,
              "Reader", 24),
        Agent("checker", "You check facts. Find the sentence of the passage that holds the answer to the question and "
              "repeat that sentence word for word.", "", None, "Fact Checker", 48),
        Agent("final", f"You give the final answer to a question about a passage, {_COPY}. Colleagues have tried "
              "before you and may be wrong. Say nothing else.", "", None, "Editor", 24),
    ),
    Wording(
        header="{user_question}",
        intro="\n\nWhat your colleagues wrote:",
        speaker="\n\n{title}:\n",
        footer="\n\nNow it is your turn, {title}.",
    ),
    stated,
    contains_gold,
)  # fmt: skip
LONG = replace(READING, name="reading-long")
SESSIONS = replace(READING, name="reading-sessions")
