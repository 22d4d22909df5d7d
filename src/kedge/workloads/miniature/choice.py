"""Multiple choice over a given passage about a few people (mirrors the paper's MMLU agents)."""

from __future__ import annotations

import random
import re
from typing import Any

from kedge.workloads.miniature.base import Question, Role, Task
from kedge.workloads.miniature.math import ITEMS, NAMES

CITIES = ["Rome", "Oslo", "Paris", "Cairo", "Lima", "Delhi", "Tokyo", "Quito", "Dakar", "Hanoi", "Riga", "Bern"]
JOBS = ["baker", "nurse", "pilot", "farmer", "singer", "judge", "tailor", "miner"]
LETTERS = "ABCD"
Person = dict[str, Any]
ASK = {
    "city": "In which city does {name} live?",
    "job": "What is the job of {name}?",
    "items": "How many {item} does {name} own?",
    "together": "How many {item} do {name} and {other} own together?",
}


def generate(rng: random.Random) -> Question:
    """Three people with a city, a job and a number of things each; one question, four options."""
    item = rng.choice(ITEMS)
    drawn = zip(rng.sample(NAMES, 3), rng.sample(CITIES, 3), rng.sample(JOBS, 3), strict=True)
    people = [{"name": name, "city": city, "job": job, "count": rng.randint(1, 15)} for name, city, job in drawn]
    kind = rng.choice(list(ASK))
    person, other = rng.sample(people, 2)
    right = _right(kind, person, other)
    options = [right, *_distractors(rng, kind, right, people)]
    rng.shuffle(options)
    passage = " ".join(_about(person, item) for person in people)
    ask = ASK[kind].format(name=person["name"], other=other["name"], item=item)
    listed = " ".join(f"{letter}) {option}" for letter, option in zip(LETTERS, options, strict=True))
    facts = {"kind": kind, "person": person, "other": other, "item": item, "options": tuple(options)}
    return Question(f"{passage}\n{ask}\n{listed}", LETTERS[options.index(right)], facts)


def _about(person: Person, item: str) -> str:
    name = person["name"]
    return f"{name} lives in {person['city']}. {name} is a {person['job']}. {name} owns {person['count']} {item}."


def _right(kind: str, person: Person, other: Person) -> str:
    if kind == "together":
        return str(person["count"] + other["count"])
    return str(person["count" if kind == "items" else kind])


def _distractors(rng: random.Random, kind: str, right: str, people: list[Person]) -> list[str]:
    """Three wrong options: what is true of the others first, then something else of the same kind."""
    if kind in ("city", "job"):
        others = [str(person[kind]) for person in people if person[kind] != right]
        pool = [value for value in (CITIES if kind == "city" else JOBS) if value != right and value not in others]
        return [*others, rng.choice(pool)]
    near = range(max(1, int(right) - 4), int(right) + 5)
    return rng.sample([str(n) for n in near if str(n) != right], 3)


def evidence(question: Question) -> str:
    """The fact of the passage that settles the question."""
    f = question.facts
    person, other, item = f["person"], f["other"], f["item"]
    match f["kind"]:
        case "city":
            return f"{person['name']} lives in {person['city']}"
        case "job":
            return f"{person['name']} is a {person['job']}"
        case "items":
            return f"{person['name']} owns {person['count']} {item}"
        case _:
            return (
                f"{person['name']} owns {person['count']} and {other['name']} owns {other['count']}, "
                f"together {person['count'] + other['count']}"
            )


def know(question: Question) -> str:
    return f"{evidence(question)}. The answer is {question.answer}."


def search(question: Question) -> str:
    """The Wiki Searcher answers with the names to look up; its tool finds their sentences."""
    return f"Look up: {', '.join(_entities(question))}."


def _entities(question: Question) -> list[str]:
    f = question.facts
    names = [f["person"]["name"]]
    return [*names, f["other"]["name"]] if f["kind"] == "together" else names


def look_up(text: str, question: Question) -> str:
    """The sentences of the passage about the names after `Look up:`."""
    names = set(re.findall(r"\w+", text.partition("Look up:")[2]))
    passage = question.text.partition("\n")[0]
    found = [s for s in re.split(r"(?<=\.) ", passage) if s.split(" ", 1)[0] in names]
    return " ".join(found) or "Nothing found."


def criticise(question: Question) -> str:
    return (
        f"The passage says that {evidence(question)}. Option {question.answer} agrees. The answer is {question.answer}."
    )


def compute(question: Question) -> str:
    right = LETTERS.index(question.answer)
    checks = " ".join(
        f"{letter}) {option} {'yes' if i == right else 'no'}."
        for i, (letter, option) in enumerate(zip(LETTERS, question.facts["options"], strict=True))
    )
    return f"{evidence(question)}. {checks} The answer is {question.answer}."


def decide(question: Question) -> str:
    return f"The answer is {question.answer}."


def stated(text: str) -> str | None:
    """The letter that an answer states last, or None."""
    found = re.findall(r"answer is ([A-D])\b", text)
    return found[-1] if found else None


def states_answer(text: str, question: Question) -> bool:
    return stated(text) == question.answer


def finds_evidence(text: str, question: Question) -> bool:
    """The search is right when its tool finds just the sentences that the question needs."""
    return look_up(text, question) == look_up(search(question), question)


def corrupt(rng: random.Random, text: str) -> str:
    """Replaces the stated letter by another."""
    letter = stated(text)
    if letter is None:
        return text
    return text.replace(f"answer is {letter}", f"answer is {rng.choice(LETTERS.replace(letter, ''))}")


TASK = Task(
    name="choice",
    roles=(
        Role(
            "expert",
            "Knowledge Expert",
            "You are a knowledge expert. Recall the fact that decides the question, say it in one sentence "
            "and name the option that fits it.",
            know,
            states_answer,
        ),
        Role(
            "searcher",
            "Wiki Searcher",
            "You are a wiki searcher. Name the people that should be looked up to settle the question and "
            "nothing else.",
            search,
            finds_evidence,
            tool_lead="\nThe search finds:\n",
            tool=look_up,
            tool_reference=lambda question: look_up(search(question), question),
        ),
        Role(
            "critic",
            "Critic",
            "You are a critic. Find what the passage really says, compare it with what the others claim and "
            "correct them where they are wrong.",
            criticise,
            states_answer,
        ),
        Role(
            "mathematician",
            "Mathematician",
            "You are a mathematician. Compute what has to be computed, go through the options one by one and "
            "mark each with yes or no.",
            compute,
            states_answer,
        ),
        Role(
            "final",
            "FinalRefer",
            "You make the final decision. Weigh the answers of the others against the passage and give the "
            "letter of the one option that you trust.",
            decide,
            states_answer,
        ),
    ),
    generate=generate,
    corrupt=corrupt,
    final=stated,
)
