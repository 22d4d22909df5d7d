"""Small list functions from a description (mirrors the paper's HumanEval agents); answers are executed."""
# ruff: noqa: ARG005 (every operation takes the list and a number)

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.workloads.base import QUESTION, Question
from kedge.workloads.miniature.base import Role, Task
from kedge.workloads.sandbox import run_python


@dataclass(frozen=True)
class ListOp:
    """One operation on a list: its phrases, its short name, its code and its function."""

    phrases: tuple[str, ...]
    short: str
    code: str
    apply: Callable[[list[int], int], Any]


Steps = Sequence[tuple[ListOp, int]]
"""Operations with their numbers; the last one is the returned result."""


STEPS = (
    ListOp(("keep the even numbers", "leave only the even numbers"), "even", "xs = [x for x in xs if x % 2 == 0]",
       lambda xs, n: [x for x in xs if x % 2 == 0]),
    ListOp(("keep the odd numbers", "leave only the odd numbers"), "odd", "xs = [x for x in xs if x % 2 == 1]",
       lambda xs, n: [x for x in xs if x % 2 == 1]),
    ListOp(("keep the numbers above {n}", "drop the numbers up to {n}"), "above {n}", "xs = [x for x in xs if x > {n}]",
       lambda xs, n: [x for x in xs if x > n]),
    ListOp(("add {n} to every number", "increase every number by {n}"), "plus {n}", "xs = [x + {n} for x in xs]",
       lambda xs, n: [x + n for x in xs]),
    ListOp(("multiply every number by {n}", "make every number {n} times as large"), "times {n}",
       "xs = [x * {n} for x in xs]", lambda xs, n: [x * n for x in xs]),
    ListOp(("turn the list around", "reverse the order"), "reverse", "xs = xs[::-1]", lambda xs, n: xs[::-1]),
    ListOp(("sort the numbers", "put the numbers in order"), "sort", "xs = sorted(xs)", lambda xs, n: sorted(xs)),
    ListOp(("leave out the first {n} numbers", "skip the first {n} numbers"), "skip {n}", "xs = xs[{n}:]",
       lambda xs, n: xs[n:]),
)  # fmt: skip
RETURNS = (
    ListOp(("the sum", "the total"), "sum", "return sum(xs)", lambda xs, n: sum(xs)),
    ListOp(("how many are left", "the count"), "count", "return len(xs)", lambda xs, n: len(xs)),
    ListOp(("the list", "what is left"), "list", "return xs", lambda xs, n: xs),
    ListOp(("the largest one or 0", "the maximum or 0"), "max", "return max(xs, default=0)",
       lambda xs, n: max(xs, default=0)),
)  # fmt: skip


def generate(rng: random.Random) -> Question:
    """Generate one to three steps and a result to return, with one worked example as in a docstring."""
    steps = [(op, rng.randint(2, 9)) for op in rng.sample(STEPS, rng.randint(1, 3))]
    described: Steps = (*steps, (rng.choice(RETURNS), 0))
    phrases = [rng.choice(op.phrases).format(n=n) for op, n in described]
    example = [rng.randint(1, 12) for _ in range(rng.randint(2, 4))]
    facts = {"steps": described, "example": example}
    text = f"Write a function f of a list: {', then '.join(phrases[:-1])}, then return {phrases[-1]}."
    text += f"\nExample: f({example}) == {evaluate(described, example)}"
    return Question(text, _code(described), facts)


def evaluate(steps: Steps, xs: list[int]) -> object:
    """Return the result of the described function for `xs`."""
    value: Any = xs
    for op, n in steps:
        value = op.apply(value, n)
    return value


def _code(steps: Steps) -> str:
    return "\n".join(["def f(xs):", *(f"    {op.code.format(n=n)}" for op, n in steps)])


def _shorts(question: Question) -> list[str]:
    return [op.short.format(n=n) for op, n in question.facts["steps"]]


def plan(question: Question) -> str:
    """Return the Project Manager's reference answer."""
    *steps, (last, _) = question.facts["steps"]
    phrases = [*(op.phrases[0].format(n=n) for op, n in steps), f"return {last.phrases[0]}"]
    return "The plan: " + " ".join(f"{i}. {what}." for i, what in enumerate(phrases, 1))


def design(question: Question) -> str:
    """Return the Algorithm Designer's reference answer."""
    return f"xs -> {' -> '.join(_shorts(question))}"


def program(question: Question) -> str:
    """Return the reference code."""
    return question.answer


def write_tests(question: Question) -> str:
    """Return the Test Analyst's reference answer."""
    example = question.facts["example"]
    steps = question.facts["steps"]
    return f"assert f({example}) == {evaluate(steps, example)}\nassert f([]) == {evaluate(steps, [])}"


def check(code: str, tests: str) -> bool:
    """Return whether `code` passes `tests`, run in the sandbox."""
    return run_python(f"{code}\n{tests}\nprint('passed')").summary == "passed"


def hidden_tests(question: Question) -> str:
    """Return tests that no agent has seen."""
    rng = random.Random(question.text)
    lists = [[], [1], *([rng.randint(0, 20) for _ in range(n)] for n in (3, 5, 8))]
    return "\n".join(f"assert f({xs}) == {evaluate(question.facts['steps'], xs)}" for xs in lists)


def plan_correct(text: str, question: Question) -> bool:
    """Return whether a text is the reference plan."""
    return text.strip() == plan(question)


def design_correct(text: str, question: Question) -> bool:
    """Return whether a text is the reference design."""
    return text.strip() == design(question)


def code_passes(text: str, question: Question) -> bool:
    """Return whether a text is code that passes the hidden tests."""
    return check(text, hidden_tests(question))


def tests_accept(text: str, question: Question) -> bool:
    """Return whether the tests assert something on f and the reference solution passes all of them."""
    return "assert f(" in text and check(question.answer, text)


def run_example(text: str, inputs: Mapping[str, str]) -> str:
    """Run the Programming Expert's code on the example of the question (the agent's tool)."""
    example = inputs[QUESTION].partition("Example: ")[2]
    return "passed" if check(text, f"assert {example}") else "failed"


def corrupt(rng: random.Random, text: str) -> str:
    """Replace one number of an answer by another."""
    numbers = list(re.finditer(r"(?<= )[2-9]\b", text))
    if not numbers:
        return text
    spot = rng.choice(numbers)
    return text[: spot.start()] + str(rng.randint(2, 9)) + text[spot.end() :]


def stated(text: str) -> str | None:
    """Return the code of an answer without trailing space, or None where there is no function."""
    return text.strip() if text.lstrip().startswith("def f(") else None


TASK = Task.of(
    "code",
    (
        Role(
            "manager",
            "Project Manager",
            "You are a project manager. Break the request into a numbered plan that the others can follow "
            "without asking back.",
            plan,
            plan_correct,
        ),
        Role(
            "designer",
            "Algorithm Designer",
            "You are an algorithm designer. Write the data flow of the function as one line of short steps "
            "joined by arrows.",
            design,
            design_correct,
        ),
        Role(
            "programmer",
            "Programming Expert",
            "You are a programming expert. Write the Python function f that does what the request says, one "
            "line for each step.",
            program,
            code_passes,
            tool=run_example,
            tool_reference=lambda question: "passed",
        ),
        Role(
            "tester",
            "Test Analyst",
            "You are a test analyst. Write assertions that a right function must pass: the example of the "
            "request and the empty list.",
            write_tests,
            tests_accept,
        ),
        Role(
            "final",
            "FinalRefer",
            "You make the final decision. Compare the code with the request, the plan and the tests, and give "
            "the final code of the function.",
            program,
            code_passes,
        ),
    ),
    generate=generate,
    corrupt=corrupt,
    final=stated,
    tool_lead="\nRunning the example:\n",
)
