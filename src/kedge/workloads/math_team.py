"""The agents for mathematics in GSM8K, MATH500 and AIME: the roles of KVCOMM, 6.3.2, reworded."""

from __future__ import annotations

from collections.abc import Mapping

from kedge.types import AgentId
from kedge.workflow.graph import Agent
from kedge.workflow.topologies import Wording
from kedge.workloads.reading import code
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
