"""GSM8K: a team for mathematics with the roles of KVCOMM, 6.3.2, reworded, and what it reads out of answers."""

import ast
import re
from collections.abc import Mapping

from kedge.decisions import NUMBER, normalized
from kedge.workflow.graph import Agent
from kedge.workflow.topologies import Wording
from kedge.workloads.base import Question, Row, Team
from kedge.workloads.sandbox import run_python

_STATED = re.compile(rf"(?:answer is|####)[^\d\n-]{{0,12}}({NUMBER})", re.IGNORECASE)
_ANY = re.compile(NUMBER)
_FENCE = re.compile(r"```[\w+-]*[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PROGRAM = re.compile(r"^(?:def |class |import |from |@)", re.MULTILINE)


def number(text: str) -> str | None:
    """Return the number after the last `answer is` (or `####`), else the last number, normalized; None without one."""
    found = _STATED.findall(text) or _ANY.findall(text)
    return None if not found else normalized(found[-1])


def code(text: str) -> str | None:
    """Return the last fenced block of Python (else the last fenced block), else everything from the first line of
    Python on, else None.
    """
    if blocks := [block.rstrip() for block in _FENCE.findall(text)]:
        return next(filter(_is_python, reversed(blocks)), blocks[-1])
    begins = _PROGRAM.search(text)
    return text[begins.start() :].rstrip() if begins else None


def _is_python(block: str) -> bool:
    try:
        return bool(ast.parse(block).body)
    except (SyntaxError, ValueError):
        return False


WORDING = Wording(
    header="The problem:\n{user_question}",
    intro="\n\nWhat your colleagues have done so far:",
    speaker="\n\n{title} wrote:\n",
    tool="\nRunning it printed:\n",
    footer="\n\nIt is your turn, {title}.",
)


def run_program(answer: str, inputs: Mapping[str, str]) -> str:  # noqa: ARG001 (a tool's signature)
    """Run the agent's program and return its output or the name of its error (the agent's tool)."""
    program = code(answer)
    return run_python(program, seconds=5.0).summary or "nothing" if program else "no code found"


_CAST = (
    ("solver", "Math Solver",
     "You solve mathematical problems step by step. Write down what is given and what is asked, do one small "
     "calculation per line and keep units apart. If colleagues have worked on it before you, check their "
     "numbers first instead of repeating them."),
    ("analyst", "Mathematical Analyst",
     "You analyse mathematical problems with symbols. Give every quantity a letter, state the relations "
     "between them, solve for the one that is asked and only then put in the numbers. Point out where a "
     "colleague used a wrong relation."),
    ("programmer", "Programming Expert",
     "You solve mathematical problems with a program. Write one block of Python that computes the result from "
     "the numbers of the problem and prints it, and nothing else. Use the standard library only, ask for no "
     "input, and fence the block with three backticks."),
    ("inspector", "Inspector",
     "You inspect the work of others. Go through their reasoning line by line, compare it with what the code "
     "printed, name the first mistake if there is one and correct everything that follows from it."),
    ("final", "FinalRefer",
     "You decide. You are given a problem and what your colleagues made of it. Weigh agreement, checked "
     "calculations and the output of code; where they differ, find out who is right. Give a short reason."),
)  # fmt: skip


_ENDING = "End with a line that says: The answer is <number>."


def _agent(name: str, title: str, system: str) -> Agent:
    said = system if name == "programmer" else f"{system} {_ENDING}"
    tool, pick = run_program if name == "programmer" else None, "answer is <number>" if name == "final" else ""
    return Agent(name, said, "", tool, title, 512, pick=pick, tool_seconds=30.0)


def question(row: Row) -> Question:
    """Convert a row with `question` and `answer`, a worked solution that ends in `#### <number>`."""
    _, mark, last = str(row["answer"]).rpartition("####")
    if not mark:
        raise ValueError("the answer has no ####")
    return Question(str(row["question"]).strip(), normalized(last.strip()))


GSM8K = Team(
    "gsm8k",
    tuple(_agent(*one) for one in _CAST),
    WORDING,
    final=number,
    accepts=lambda number, asked: number == asked.answer,
)
