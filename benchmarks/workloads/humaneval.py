"""HumanEval: functions from their docstrings, judged by hidden tests in the sandbox (KVCOMM, Table 1: Pass@1)."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

from benchmarks.workloads.rows import DatasetSource
from kedge.types import AgentId
from kedge.workflow.graph import Agent
from kedge.workflow.topologies import Wording
from kedge.workloads.base import QUESTION, Question, Team
from kedge.workloads.gsm8k import code
from kedge.workloads.rows import Row
from kedge.workloads.sandbox import SandboxLimits, run_python

LIMITS = SandboxLimits(seconds=15.0)
_EXAMPLE = re.compile(r"^\s*>>> (.+)\n\s*([^>\s].*)$", re.MULTILINE)
_RETURN = re.compile(r"\breturn\b.*")


def question(row: Row) -> Question:
    """Convert a row of HumanEval, or of MultiPL-E's Python version of it, which has no `canonical_solution`."""
    prompt, entry = str(row["prompt"]), str(row["entry_point"])
    preamble, signature, _ = prompt.partition(f"def {entry}(")
    if not signature:
        raise ValueError(f"its prompt has no function {entry}")
    solution = row.get("canonical_solution")
    answer = f"{prompt}{solution}" if solution else ""
    return Question(prompt, answer, {"entry": entry, "preamble": preamble, "test": str(row["test"])})


def passes(program: str | None, asked: Question) -> bool:
    """Return whether a program passes the hidden tests, with what the prompt defines before the function."""
    if program is None:
        return False
    facts = asked.facts
    checked = f"{facts['preamble']}\n{program}\n\n{facts['test']}\n\ncheck({facts['entry']})\nprint('\\npassed')"
    outcome = run_python(checked, LIMITS)
    return outcome.error is None and outcome.stdout.endswith("\npassed\n")


def run_examples(answer: str, inputs: Mapping[str, str]) -> str:
    """Run the agent's code on the examples of the docstring and return one line each (the agent's tool)."""
    program = code(answer)
    examples = _EXAMPLE.findall(inputs[QUESTION])
    if program is None or not examples:
        return "no code found" if program is None else "the request has no examples"
    preamble = inputs[QUESTION].rpartition("def ")[0]
    shown = "\n".join(f"print({call!r}, 'gives', repr({call}))" for call, _ in examples)
    return run_python(f"{preamble}\n{program}\n{shown}", LIMITS).summary


def wrong(rng: random.Random, text: str) -> str:
    """Replace one of the returned values by None."""
    places = list(_RETURN.finditer(text))
    if not places:
        return text
    place = rng.choice(places)
    return f"{text[: place.start()]}return None{text[place.end() :]}"


_FENCED = "Fence the code with three backticks and give the whole function, imports included."
_CAST = (
    (
        "manager",
        "Project Manager",
        "You manage a small programming project. Restate the request in your own words, list the cases that the "
        "function has to handle, the empty and the extreme ones among them, and say in which order to work. "
        "Write no code.",
    ),
    (
        "designer",
        "Algorithm Designer",
        "You design algorithms. Choose a method for the request, describe its steps and the data it keeps, and give "
        "its cost. Walk through one example of the request. Write no code.",
    ),
    (
        "programmer",
        "Programming Expert",
        "You are an expert in Python. Implement the function exactly under the name and with the arguments of the "
        f"request, following the design of your colleagues where it is right. {_FENCED}",
    ),
    (
        "tester",
        "Test Analyst",
        "You test code. Derive inputs at which the code of your colleagues could fail, work out by hand what the "
        "request asks for there, compare, and name each difference with the line that causes it.",
    ),
    (
        "final",
        "FinalRefer",
        "You decide what is delivered. Compare the code with the request, the reports and the results of running it, "
        f"repair what is wrong and give the final function. {_FENCED}",
    ),
)
SOURCE = DatasetSource("openai/openai_humaneval", "test", question)
TEAM = Team(
    "humaneval",
    tuple(
        Agent(name, system, "", run_examples if name == "programmer" else None, title, 512, tool_seconds=30.0)
        for name, title, system in _CAST
    ),
    Wording(
        header="The request:\n{user_question}",
        intro="\n\nWhat your colleagues have delivered so far:",
        speaker="\n\n{title} delivered:\n",
        tool="\nOn the examples of the request:\n",
        footer="\n\nIt is your turn, {title}.",
    ),
    final=code,
    accepts=passes,
    silent=frozenset({AgentId("manager"), AgentId("designer"), AgentId("tester")}),
    corrupt=wrong,
)
