"""GSM8K: word problems of grade-school mathematics with a number for an answer (KVCOMM, Table 1)."""

from __future__ import annotations

from kedge.decisions import spelled
from kedge.workloads.base import Question, Team
from kedge.workloads.math_team import SILENT, WORDING, agents
from kedge.workloads.reading import number, other_number
from kedge.workloads.rows import DatasetSource, Row


def question(row: Row) -> Question:
    """Convert a row with `question` and `answer`, a worked solution that ends in `#### <number>`."""
    solution, mark, last = str(row["answer"]).rpartition("####")
    if not mark:
        raise ValueError("the answer has no ####")
    return Question(str(row["question"]).strip(), spelled(last.strip()), {"solution": solution.strip()})


def accepts(stated: str | None, asked: Question) -> bool:
    """Return whether both are equal as numbers."""
    return stated == asked.answer


SOURCE = DatasetSource("openai/gsm8k", "test", question, "main")
TEAM = Team(
    "gsm8k",
    agents("End with a line that says: The answer is <number>.", 512, pick="answer is <number>"),
    WORDING,
    stated=number,
    accepts=accepts,
    silent=SILENT,
    wrong=other_number,
)
