"""The bundled model's task: word problems with small numbers, for a team with KVCOMM's roles for GSM8K (6.3.2).

How the model was trained on it, and on two more, is at commit d1fd5986 (`scripts/train_nano.py`).
"""

import random
import re
import zlib
from collections.abc import Iterator, Mapping

from kedge.workflow.graph import Agent
from kedge.workflow.topologies import Wording
from kedge.workloads.base import Question, Team
from kedge.workloads.sandbox import run_python

MAX = 30
"""Largest number in a problem: each up to it is a single token of the bundled model."""
UNSEEN = 8
"""One question in eight, by a hash of its text, was never trained on."""
MAX_TOKENS = 192
"""Limit of an answer, longer than any that the model has learned."""
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


def questions(seed: int) -> Iterator[Question]:
    """Yield questions that the bundled model has never seen, without an end, the same for the same seed."""
    rng = random.Random(f"math/test/{seed}")
    while True:
        question = generate(rng)
        if zlib.crc32(question.text.encode()) % UNSEEN == 0:
            yield question


def generate(rng: random.Random) -> Question:
    """Generate 2 to 5 steps; every intermediate number is in 0..`MAX`."""
    name, item, total = rng.choice(NAMES), rng.choice(ITEMS), rng.randint(2, 12)
    sentences = [f"{name} starts the day with {total} {item}."]
    for _ in range(rng.randint(2, 5)):
        gains = [n for n in range(1, 10) if total + n <= MAX]
        losses = [n for n in range(1, 10) if total - n >= 0]
        gain = bool(gains) and (not losses or rng.random() < 0.5)
        n = rng.choice(gains if gain else losses)
        total += n if gain else -n
        sentences.append(f"{name} {rng.choice(GAINS if gain else LOSSES).format(n=n)}.")
    if rng.random() < 0.5:
        sentences.insert(rng.randint(1, len(sentences)), rng.choice(ASIDES))
    sentences.append(f"How many {item} does {name} have at the end?")
    return Question(" ".join(sentences), str(total))


def stated(text: str) -> str | None:
    """Return the number that an answer states last, or None."""
    found = re.findall(r"answer is (\d+)", text)
    return found[-1] if found else None


def run_solve(text: str, inputs: Mapping[str, str]) -> str:  # noqa: ARG001 (a tool's signature)
    """Run the Programming Expert's code in the sandbox; return the printed result, or the error's name."""
    return run_python(f"{text}\nprint(solve())").summary


_CAST = (
    ("solver", "Math Solver",
     "You are a math solver. Work through the problem one step at a time, use the hints of the others "
     "where they help, and end with the answer."),
    ("analyst", "Mathematical Analyst",
     "You are a mathematical analyst. Name each quantity by a letter, write how one follows from the "
     "other, then put the numbers in and compute."),
    ("programmer", "Programming Expert",
     "You are a programming expert. Write a Python function called solve that takes no arguments and "
     "returns the result of the problem."),
    ("inspector", "Inspector",
     "You are an inspector. Check whether the reasoning and the code of the others are right, list the "
     "steps again and state the answer."),
    ("final", "FinalRefer",
     "You make the final decision. Weigh the answers of the others against the problem and give the "
     "one answer that you trust."),
)  # fmt: skip


def _agent(name: str, title: str, system: str) -> Agent:
    tool, pick = run_solve if name == "programmer" else None, "answer is <number>" if name == "final" else ""
    return Agent(name, system, "", tool, title, MAX_TOKENS, pick=pick)


MATH = Team(
    "math",
    tuple(_agent(*one) for one in _CAST),
    Wording(tool="\nRunning this code prints:\n"),
    final=stated,
    accepts=lambda number, question: number == question.answer,
)
