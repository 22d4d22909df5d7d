"""Multiple choice over a given passage about a few people (mirrors the paper's MMLU agents)."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from kedge.workloads.base import QUESTION, Question
from kedge.workloads.miniature.base import Role, Task
from kedge.workloads.miniature.math import ITEMS, NAMES

CITIES = ["Rome", "Oslo", "Paris", "Cairo", "Lima", "Delhi", "Tokyo", "Quito", "Dakar", "Hanoi", "Riga", "Bern"]
WARES = [item for item in ITEMS if item != "leaves"]  # people leave cities here
VALUE = {"city": "city", "ware": "ware", "items": "count"}
"""Kind of question -> the person's key that answers it."""
Person = dict[str, Any]
ASK = {
    "city": "Which city does {name} leave?",
    "ware": "What does {name} sell?",
    "items": "How many {item} does {name} own?",
    "all": "How many {item} do they own in all?",
}


def generate(rng: random.Random) -> Question:
    """Generate three people, each with a city, a ware and a number of items; one question and four options."""
    item, *wares = rng.sample(WARES, 4)
    drawn = zip(rng.sample(NAMES, 3), rng.sample(CITIES, 3), wares, strict=True)
    people: list[Person] = [
        {"name": name, "city": city, "ware": ware, "count": rng.randint(1, 9)} for name, city, ware in drawn
    ]
    kind = rng.choice(list(ASK))
    person = rng.choice(people)
    right = str(sum(each["count"] for each in people) if kind == "all" else person[VALUE[kind]])
    options = [right, *_distractors(rng, kind, right, people, item)]
    rng.shuffle(options)
    passage = " ".join(_about(person, item) for person in people)
    ask = ASK[kind].format(name=person["name"], item=item)
    facts = {"kind": kind, "people": people, "person": person, "item": item, "options": tuple(options)}
    return Question(f"{passage}\n{ask}\nOptions: {', '.join(options)}", right, facts)


def _about(person: Person, item: str) -> str:
    name = person["name"]
    return f"{name} leaves {person['city']}. {name} sells {person['ware']}. {name} owns {person['count']} {item}."


def _distractors(rng: random.Random, kind: str, right: str, people: list[Person], item: str) -> list[str]:
    """Return three wrong options that the passage does not name."""
    pool = {"city": CITIES, "ware": WARES}.get(kind) or [str(n) for n in range(max(1, int(right) - 4), int(right) + 7)]
    named = {right, item, *(str(person[VALUE.get(kind, "count")]) for person in people)}
    return rng.sample([value for value in pool if value not in named], 3)


def evidence(question: Question) -> str:
    """Return the fact of the passage that decides the question."""
    person, item = question.facts["person"], question.facts["item"]
    match question.facts["kind"]:
        case "city":
            return f"{person['name']} leaves {person['city']}"
        case "ware":
            return f"{person['name']} sells {person['ware']}"
        case "items":
            return f"{person['name']} owns {person['count']} {item}"
        case _:
            one, two, three = (each["count"] for each in question.facts["people"])
            return f"{one} + {two} = {one + two}. {one + two} + {three} = {one + two + three}"


def know(question: Question) -> str:
    """Return the Knowledge Expert's reference answer."""
    return f"{evidence(question)}. The answer is {question.answer}."


def search(question: Question) -> str:
    """Return the names to look up; the Wiki Searcher's tool finds their sentences."""
    return f"Look up: {', '.join(_entities(question))}."


def _entities(question: Question) -> list[str]:
    everybody = question.facts["kind"] == "all"
    return [each["name"] for each in (question.facts["people"] if everybody else [question.facts["person"]])]


def look_up(text: str, inputs: Mapping[str, str]) -> str:
    """Return the sentences of the passage about the names after `Look up:` (the Wiki Searcher's tool)."""
    names = set(re.findall(r"\w+", text.partition("Look up:")[2]))
    passage = inputs[QUESTION].partition("\n")[0]
    found = [s for s in re.split(r"(?<=\.) ", passage) if s.split(" ", 1)[0] in names]
    return " ".join(found) or "Nothing found."


def criticise(question: Question) -> str:
    """Return the Critic's reference answer."""
    return (
        f"The passage says that {evidence(question)}. Option {question.answer} agrees. The answer is {question.answer}."
    )


def compute(question: Question) -> str:
    """Return the Mathematician's reference answer."""
    marks = ((option, "yes" if option == question.answer else "no") for option in question.facts["options"])
    checks = " ".join(f"{option} {mark}." for option, mark in marks)
    return f"{evidence(question)}. {checks} The answer is {question.answer}."


def decide(question: Question) -> str:
    """Return FinalRefer's reference answer."""
    return f"The answer is {question.answer}."


def stated(text: str) -> str | None:
    """Return the option that an answer states last, or None."""
    found = re.findall(r"answer is (\w+)", text)
    return found[-1] if found else None


def states_answer(text: str, question: Question) -> bool:
    """Return whether a text states the question's answer."""
    return stated(text) == question.answer


def finds_evidence(text: str, question: Question) -> bool:
    """Return whether the tool finds exactly the sentences that the question needs."""
    return look_up(text, {QUESTION: question.text}) == evidence_found(question)


def evidence_found(question: Question) -> str:
    """Return what the tool finds for the Wiki Searcher's reference answer."""
    return look_up(search(question), {QUESTION: question.text})


def corrupt(rng: random.Random, text: str) -> str:
    """Replace the stated option by another of its kind."""
    option = stated(text)
    if option is None:
        return text
    kind = next((kind for kind in (CITIES, WARES) if option in kind), [str(n) for n in range(1, 31)])
    return text.replace(f"answer is {option}", f"answer is {rng.choice([other for other in kind if other != option])}")


TASK = Task.of(
    "choice",
    (
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
            tool=look_up,
            tool_reference=evidence_found,
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
            "one option that you trust.",
            decide,
            states_answer,
            pick="answer is <word>",
        ),
    ),
    generate=generate,
    corrupt=corrupt,
    final=stated,
    tool_lead="\nThe search finds:\n",
)
