"""Teams for mathematics: GSM8K with the roles of KVCOMM, 6.3.2, reworded; MATH500 and AIME (KVCOMM, Table A.2).

MATH500's answers are LaTeX expressions; whether two are the same is decided by `math-verify` (extra `data`).
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Mapping

from benchmarks.workloads.parsing import boxed, code, number, other_number
from benchmarks.workloads.rows import DatasetSource, Row
from kedge.decisions import spelled
from kedge.errors import ConfigError
from kedge.types import AgentId
from kedge.workflow.graph import Agent
from kedge.workflow.topologies import Wording
from kedge.workloads.base import Question, Team
from kedge.workloads.sandbox import SandboxLimits, run_python

LIMITS = SandboxLimits(seconds=5.0)
SILENT = frozenset({AgentId("programmer")})
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
    return run_python(program, LIMITS).summary or "nothing" if program else "no code found"


_CAST = (
    (
        "solver",
        "Math Solver",
        "You solve mathematical problems step by step. Write down what is given and what is asked, do one small "
        "calculation per line and keep units apart. If colleagues have worked on it before you, check their "
        "numbers first instead of repeating them.",
    ),
    (
        "analyst",
        "Mathematical Analyst",
        "You analyse mathematical problems with symbols. Give every quantity a letter, state the relations "
        "between them, solve for the one that is asked and only then put in the numbers. Point out where a "
        "colleague used a wrong relation.",
    ),
    (
        "programmer",
        "Programming Expert",
        "You solve mathematical problems with a program. Write one block of Python that computes the result from "
        "the numbers of the problem and prints it, and nothing else. Use the standard library only, ask for no "
        "input, and fence the block with three backticks.",
    ),
    (
        "inspector",
        "Inspector",
        "You inspect the work of others. Go through their reasoning line by line, compare it with what the code "
        "printed, name the first mistake if there is one and correct everything that follows from it.",
    ),
    (
        "final",
        "FinalRefer",
        "You decide. You are given a problem and what your colleagues made of it. Weigh agreement, checked "
        "calculations and the output of code; where they differ, find out who is right. Give a short reason.",
    ),
)


def agents(ending: str, max_tokens: int, *, pick: str) -> tuple[Agent, ...]:
    """Return the five agents; `ending` says how to state an answer. It is a template, so braces are doubled. `pick` is
    where the last one's stands.
    """
    endings = {name: "" if AgentId(name) in SILENT else f" {ending}" for name, _, _ in _CAST}
    return tuple(
        Agent(
            name,
            system + endings[name],
            "",
            run_program if name == "programmer" else None,
            title,
            max_tokens,
            pick=pick if name == "final" else "",
            tool_seconds=30.0,
        )
        for name, title, system in _CAST
    )


def gsm8k_question(row: Row) -> Question:
    """Convert a row with `question` and `answer`, a worked solution that ends in `#### <number>`."""
    solution, mark, last = str(row["answer"]).rpartition("####")
    if not mark:
        raise ValueError("the answer has no ####")
    return Question(str(row["question"]).strip(), spelled(last.strip()), {"solution": solution.strip()})


def same_number(stated: str | None, asked: Question) -> bool:
    """Return whether both are equal as numbers."""
    return stated == asked.answer


GSM8K_SOURCE = DatasetSource("openai/gsm8k", "test", gsm8k_question, "main")
GSM8K = Team(
    "gsm8k",
    agents("End with a line that says: The answer is <number>.", 512, pick="answer is <number>"),
    WORDING,
    stated=number,
    accepts=same_number,
    silent=SILENT,
    wrong=other_number,
)


SECONDS = 5
"""Time limit for parsing or comparing an expression; one that takes longer counts as wrong."""
_BOX = r"Put the final result, and only that, into \boxed{{}}."
_PICK = r"\boxed<braced>"
_STATED = re.compile(r"answer is:?\s*(.+?)\.?\s*$", re.IGNORECASE | re.MULTILINE)


def competition_question(row: Row) -> Question:
    """Convert a row with `problem` and `answer`, under names in any case."""
    fields = {name.lower(): value for name, value in row.items()}
    answer = str(fields["answer"]).strip()
    if not answer:
        raise ValueError("the answer is empty")
    return Question(str(fields["problem"]).strip(), answer, {"level": fields.get("level", "")})


def stated(text: str) -> str | None:
    """Return what is boxed last, else what follows the last `answer is`."""
    if (found := boxed(text)) is not None:
        return found
    results = _STATED.findall(text)
    return results[-1].strip("$ ") if results else None


def is_equal(stated: str | None, asked: Question) -> bool:
    """Return whether both are equal as expressions. Raises `ConfigError` without `math-verify`."""
    if not stated:
        return False
    if stated == asked.answer:
        return True
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigError("math-verify", asked.answer, "is needed to score: pip install 'kedge[data]'") from error
    # math-verify's time limit is a signal, which only the main thread receives
    seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
    gold, answer = (parse(f"${text}$", parsing_timeout=seconds) for text in (asked.answer, stated))
    return bool(verify(gold, answer, timeout_seconds=seconds))


def is_integer(stated: str | None, asked: Question) -> bool:
    """Return whether both are equal as whole numbers; AIME writes them with leading zeros."""
    return stated is not None and number(stated) == number(asked.answer)


def wrong(rng: random.Random, text: str) -> str:
    """Replace the number in the stated result by another; append `+ 1` to a result without a number."""
    box = boxed(text)
    if box is None:
        return other_number(rng, text)
    changed = other_number(rng, box)
    return text if not box else f"{{{changed if changed != box else f'{box} + 1'}}}".join(text.rsplit(f"{{{box}}}", 1))


MATH500_SOURCE = DatasetSource("HuggingFaceH4/MATH-500", "test", competition_question)
AIME_SOURCE = DatasetSource("ChuGyouk/AIME-22-25", "train", competition_question)
MATH500 = Team("math500", agents(_BOX, 512, pick=_PICK), WORDING, stated, is_equal, SILENT, wrong)
_AIME_BOX = f"{_BOX} It is a whole number from 0 to 999."
AIME = Team("aime", agents(_AIME_BOX, 2048, pick=_PICK), WORDING, stated, is_integer, SILENT, wrong)
