"""PEER: Planner, Executor, Expresser and Reviewer answer questions about finance (KVFlow, figure 8). Not scored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from kedge.decisions import first_decision
from kedge.errors import WorkflowError
from kedge.types import AgentId
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.topologies import Topology, Wording, chain, connect
from kedge.workloads.base import QUESTION, Question

_HOUSE = (
    "You work for a desk that explains company reports to private investors. State amounts with currency and year, "
    "mark estimates as such, and never give advice to buy or sell. "
)
_CAST = (
    ("planner", "Planner", "Break the question into two to four smaller ones that can be answered from reports, in the "
     "order in which they build on each other. One line each."),
    ("executor", "Executor", "Answer each line of the plan with the facts that are known about it, and say where a "
     "fact is missing. Keep the numbering of the plan."),
    ("expresser", "Expresser", "Turn the findings into one answer to the question, first the conclusion, then the "
     "reasons, in plain words for somebody who has never read a balance sheet."),
    ("reviewer", "Reviewer", "Check the answer against the question: is anything unasked in it, unsupported, or "
     "missing? List what has to be changed, or say that it can be sent."),
)  # fmt: skip
_COMPANIES = ("Arden Foods", "Bellmore Rail", "Corvid Systems", "Danmore Energy", "Estoril Retail", "Farrow Chemicals")
_ASKS = (
    "Why did the operating margin of {company} {move} in {year} although its sales {other} by {percent} %?",
    "How would a rise of interest rates by {percent} % affect {company}, whose debt {move} since {year}?",
    "What does it mean for shareholders that the dividend of {company} {move} in {year} while cash flow {other}?",
    "How does the inventory of {company}, which {move} by {percent} % in {year}, fit to sales that {other}?",
)
_MOVES = ("rose", "fell")


@dataclass(frozen=True)
class Peer:
    """The team as a `Workload`: a chain in which every agent reads the question and the answer before its own."""

    name: str = "peer"
    max_tokens: int = 256

    def workflow(self, agents: int | None = None, topology: str | Topology = "chain") -> Workflow:
        """Return the chain of all four agents. Raises `WorkflowError` for any other number or topology."""
        if agents not in (None, len(_CAST)) or topology not in ("chain", "fully_connected"):
            raise WorkflowError("peer", (agents, topology), "is a chain of four agents")
        cast = [Agent(name, _HOUSE + task, "", None, title, self.max_tokens) for name, title, task in _CAST]
        wording = Wording(intro="\n\nFrom the desk before yours:", footer="\n\nNow do your part, {title}.")
        return connect(self.name, cast, chain(cast), wording, (QUESTION,))

    def right(self, agent: AgentId, answer: str, question: Question) -> bool | None:  # noqa: ARG002
        return None

    def final(self, answer: str) -> str | None:
        return answer.strip() or None

    def first_decision(self, answer: str) -> str:
        return first_decision(answer)

    def corrupt(self, rng: random.Random, answer: str) -> str:  # noqa: ARG002
        return answer


def questions(seed: int = 0) -> Iterator[Question]:
    """Yield an endless stream of questions without reference answers."""
    rng = random.Random(f"peer/{seed}")
    while True:
        move, other = rng.sample(_MOVES, 2)
        text = rng.choice(_ASKS).format(
            company=rng.choice(_COMPANIES), move=move, other=other, year=rng.randrange(2012, 2025),
            percent=rng.randint(1, 30),
        )  # fmt: skip
        yield Question(text, "")
