"""Reading: three agents answer questions about paragraphs of XQuAD, with free words or with a pick of its answers; of
one paragraph, of the last of several, or in sessions about one.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace

from kedge.types import AgentId
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
    return stated is not None and any(normal(gold) in stated for gold in asked.facts["answers"])


def pick_grammar(agent: AgentId, asked: Question) -> str:
    """Return the grammar of a pick: `{"answer": …}` with one of the question's options, word for word; none for who
    repeats a sentence.
    """
    options = (json.dumps({"answer": option}, ensure_ascii=False) for option in asked.facts["options"])
    picks = " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
    return f"start: {picks}" if picks and agent != AgentId("checker") else ""


def questions(row: Row, longest: int = 60) -> list[Question]:
    """Convert a row with `context` and `questions`, in a random but fixed order.

    The options of a question are its answer and those of the paragraph's other questions that are neither part of it
    nor the other way round and begin otherwise (a greedy pick is decided by its first token), up to `longest`
    characters; a question with a longer answer has none.
    """
    rng = random.Random(row["context"])
    answers = sorted({one["answers"][0] for one in row["questions"] if len(one["answers"][0]) <= longest})
    asked = []
    for one in rng.sample(row["questions"], len(row["questions"])):
        gold = one["answers"][0]
        text = f"Passage: {row['context']}\n\nQuestion: {one['question']}"
        others = [other for other in answers if not _overlaps(other, gold)]
        options = sorted([*others, gold]) if others and gold in answers else []
        asked.append(Question(text, gold, {"id": one["id"], "answers": one["answers"], "options": options}))
    return asked


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


def _overlaps(one: str, other: str) -> bool:
    return one[:1] == other[:1] or normal(one) in normal(other) or normal(other) in normal(one)


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
PICKS = replace(
    READING,
    name="reading-picks",
    agents=tuple(replace(agent, max_tokens=48) for agent in READING.agents),
    grammar=pick_grammar,
)
LONG = replace(READING, name="reading-long")
SESSIONS = replace(READING, name="reading-sessions")
