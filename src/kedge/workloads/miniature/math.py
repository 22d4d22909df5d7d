"""Word problems: one person, one kind of thing, a few gains and losses (mirrors the paper's GSM8K agents)."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Mapping

from kedge.workloads.base import Question
from kedge.workloads.miniature.base import Role, Task
from kedge.workloads.sandbox import run_python

MAX = 30
NAMES = (
    "Tom", "Anna", "Raj", "Mei", "Omar", "Lena", "Igor", "Sofia",
    "Noah", "Kira", "Hugo", "Ines", "Pavel", "Dina", "Yuki", "Amir",
)  # fmt: skip
ITEMS = ["apples", "books", "coins", "stamps", "shells", "cards", "pens", "stones", "balls", "cups", "keys", "leaves"]
GAINS = ("buys {n} more", "finds {n} more", "gets {n} from a friend", "wins {n} in a game")
LOSSES = ("gives away {n}", "loses {n}", "sells {n} at the market", "drops {n} on the way home")
ASIDES = (
    "The sun is out today.",
    "The street is full of people.",
    "A cat sleeps by the door.",
    "It rains in the afternoon.",
)
APPLY = {"+": operator.add, "-": operator.sub}


def generate(rng: random.Random) -> Question:
    """Generate 2 to 5 steps; every intermediate number is in 0..30, so that each is a single token."""
    name, item, total = rng.choice(NAMES), rng.choice(ITEMS), rng.randint(2, 12)
    start, steps, sentences = total, [], [f"{name} starts the day with {total} {item}."]
    for _ in range(rng.randint(2, 5)):
        gains = [n for n in range(1, 10) if total + n <= MAX]
        losses = [n for n in range(1, 10) if total - n >= 0]
        gain = bool(gains) and (not losses or rng.random() < 0.5)
        n = rng.choice(gains if gain else losses)
        steps.append(("+" if gain else "-", n))
        total += n if gain else -n
        sentences.append(f"{name} {rng.choice(GAINS if gain else LOSSES).format(n=n)}.")
    if rng.random() < 0.5:
        sentences.insert(rng.randint(1, len(sentences)), rng.choice(ASIDES))
    sentences.append(f"How many {item} does {name} have at the end?")
    return Question(" ".join(sentences), str(total), {"start": start, "steps": tuple(steps)})


def solve(question: Question) -> str:
    """Return the Math Solver's reference answer."""
    total, lines = question.facts["start"], []
    for i, (op, n) in enumerate(question.facts["steps"], 1):
        result = APPLY[op](total, n)
        lines.append(f"Step {i}: {total} {op} {n} = {result}.")
        total = result
    return " ".join(lines) + f" The answer is {total}."


def analyse(question: Question) -> str:
    """Return the Mathematical Analyst's reference answer."""
    total = question.facts["start"]
    lines = [f"Let x0 = {total}."]
    for i, (op, n) in enumerate(question.facts["steps"]):
        total = APPLY[op](total, n)
        lines.append(f"x{i + 1} = x{i} {op} {n} = {total}.")
    return " ".join(lines) + f" The answer is {total}."


def program(question: Question) -> str:
    """Return the Programming Expert's reference code."""
    body = [f"    n {op}= {n}" for op, n in question.facts["steps"]]
    return "\n".join(["def solve():", f"    n = {question.facts['start']}", *body, "    return n"])


def inspect(question: Question) -> str:
    """Return the Inspector's reference answer."""
    steps = " ".join(f"{op} {n}" for op, n in question.facts["steps"])
    return f"Start with {question.facts['start']} then {steps}. Every step is checked. The answer is {question.answer}."


def decide(question: Question) -> str:
    """Return FinalRefer's reference answer."""
    return f"The answer is {question.answer}."


def stated(text: str) -> str | None:
    """Return the number that an answer states last, or None."""
    found = re.findall(r"answer is (\d+)", text)
    return found[-1] if found else None


def states_answer(text: str, question: Question) -> bool:
    """Return whether a text states the question's answer."""
    return stated(text) == question.answer


def run_solve(text: str, inputs: Mapping[str, str]) -> str:  # noqa: ARG001 (a tool's signature)
    """Run the Programming Expert's code in the sandbox; return the printed result, or the error's name."""
    return run_python(f"{text}\nprint(solve())").summary


def code_returns_answer(text: str, question: Question) -> bool:
    """Return whether a text is code that returns the question's answer."""
    return run_solve(text, {}) == question.answer


def corrupt(rng: random.Random, text: str) -> str:
    """Replace one number of an answer by another."""
    numbers = list(re.finditer(r"(?<=[ :])\d+", text))
    if not numbers:
        return text
    spot = rng.choice(numbers)
    return text[: spot.start()] + str(rng.randint(0, MAX)) + text[spot.end() :]


TASK = Task.of(
    "math",
    (
        Role(
            "solver",
            "Math Solver",
            "You are a math solver. Work through the problem one step at a time, use the hints of the others "
            "where they help, and end with the answer.",
            solve,
            states_answer,
        ),
        Role(
            "analyst",
            "Mathematical Analyst",
            "You are a mathematical analyst. Name each quantity by a letter, write how one follows from the "
            "other, then put the numbers in and compute.",
            analyse,
            states_answer,
        ),
        Role(
            "programmer",
            "Programming Expert",
            "You are a programming expert. Write a Python function called solve that takes no arguments and "
            "returns the result of the problem.",
            program,
            code_returns_answer,
            tool=run_solve,
            tool_reference=lambda question: question.answer,
        ),
        Role(
            "inspector",
            "Inspector",
            "You are an inspector. Check whether the reasoning and the code of the others are right, list the "
            "steps again and state the answer.",
            inspect,
            states_answer,
        ),
        Role(
            "final",
            "FinalRefer",
            "You make the final decision. Weigh the answers of the others against the problem and give the "
            "one answer that you trust.",
            decide,
            states_answer,
            pick="answer is <number>",
        ),
    ),
    generate=generate,
    corrupt=corrupt,
    final=stated,
    tool_lead="\nRunning this code prints:\n",
)
