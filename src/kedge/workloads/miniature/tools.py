"""A small team whose agents answer with a tool call or with prose, depending on what they read.

The Searcher calls `search` where the passage does not have the asked fact; what the search finds follows from a hash of
the question, so that no agent can know it without reading it. The Seller and FinalRefer call `sell` where the number is
above `LIMIT`, and the Inspector does the opposite of the Searcher: it calls `check` on a claim in prose. Each of these
decisions is a call for about half of the questions. A call is written as Llama 3 writes it (`llama3_json`).
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Mapping

from kedge.decisions import PROSE, first_decision
from kedge.workloads.base import Question
from kedge.workloads.miniature.base import Role, Task
from kedge.workloads.miniature.choice import CITIES, WARES
from kedge.workloads.miniature.math import NAMES

LIMIT = 5
"""Numbers above it are sold."""
NOTHING = "Nothing found."
Read = Mapping[str, str]
"""What an agent reads beside the question: placeholder -> text."""
_CALL = re.compile(r'\{"name":"(\w+)","parameters":\{"(\w+)":"?(\w+)"?\}\}')
_OWNS = re.compile(r"(\w+) owns (\d+) (\w+)\.")


def generate(rng: random.Random) -> Question:
    """Generate three people who leave a city with some wares; ask how many items one of them owns.

    The passage has that number for half of the questions. It is the only one behind *owns*: a model of a few million
    parameters learns late, if at all, to find a number by the name before it.
    """
    item, *wares = rng.sample(WARES, 4)
    drawn = list(zip(rng.sample(NAMES, 3), rng.sample(CITIES, 3), wares, strict=True))
    name, known = rng.choice(drawn)[0], rng.random() < 0.5
    passage = " ".join(_about(rng, person, item if known and person[0] == name else None) for person in drawn)
    text = f"{passage}\nHow many {item} does {name} own?"
    count = _owned(passage, name) or _archived(text, name)
    return Question(text, str(count), {"name": name, "item": item, "count": count, "known": known})


def _about(rng: random.Random, person: tuple[str, str, str], item: str | None) -> str:
    name, city, ware = person
    owns = f" {name} owns {_number(rng.randrange(40))} {item}." if item else ""
    return f"{name} leaves {city} with {rng.randint(1, 9)} {ware}.{owns}"


def _number(code: int) -> int:
    """Return a number from 1 to 9; half of the codes give one above `LIMIT`."""
    half, at = code % 2, code // 2
    return LIMIT + 1 + at % (9 - LIMIT) if half else 1 + at % LIMIT


def _archived(text: str, name: str) -> int:
    return _number(zlib.crc32(f"{text}/{name}".encode()) >> 3)


def _owned(text: str, name: str) -> int | None:
    return next((int(number) for who, number, _ in _OWNS.findall(text) if who == name), None)


def call(function: str, key: str, value: str | int) -> str:
    """Return a call with one argument as an agent writes it."""
    return json.dumps({"name": function, "parameters": {key: value}}, separators=(",", ":"))


def search(text: str, question: Question) -> str:
    """Run the call in the Searcher's answer (its tool): return what the archive has on the asked person."""
    found = _CALL.fullmatch(text.strip())
    asked = re.search(r"How many (\w+) does (\w+) own\?", question.text)
    if not (found and asked and found[1] == "search" and found[3] == asked[2]):
        return NOTHING
    return f"{asked[2]} owns {_archived(question.text, asked[2])} {asked[1]}."


def _count(question: Question, read: Read) -> int | None:
    """Return the asked number as far as an agent can know it: of the passage, or of what the search found."""
    if question.facts["known"]:
        return question.facts["count"]
    return _owned(read.get("condition_searcher_current", ""), question.facts["name"])


def _find(question: Question) -> str:
    """Return the Searcher's reference answer."""
    if question.facts["known"]:
        return f"The passage says that {_fact(question, question.facts['count'])}"
    return call("search", "who", question.facts["name"])


def _fact(question: Question, count: int) -> str:
    return f"{question.facts['name']} owns {count} {question.facts['item']}."


def _sell(question: Question, read: Read) -> str:
    """Return the Seller's reference answer."""
    count = _count(question, read)
    if count is None:
        return call("search", "who", question.facts["name"])
    return call("sell", question.facts["item"], count) if count > LIMIT else _fact(question, count)


def _inspect(question: Question, read: Read) -> str:
    """Return the Inspector's reference answer: by what the Searcher answered, where it reads that."""
    claim = read.get("agent_searcher_current", _find(question))
    if first_decision(claim) == PROSE:
        found = _OWNS.search(claim)
        return call("check", question.facts["name"], int(found[2]) if found else 0)
    found = _OWNS.search(read.get("condition_searcher_current", ""))
    return f"The search finds that {found[0]}" if found else "The search finds nothing."


def _decide(question: Question, read: Read) -> str:
    """Return FinalRefer's reference answer."""
    count = _count(question, read)
    if count is None:
        return call("search", "who", question.facts["name"])
    return call("sell", question.facts["item"], count) if count > LIMIT else f"The answer is {count}."


def _full(question: Question) -> Read:
    """Return what the agents after the Searcher read of it in a full team."""
    answer = _find(question)
    return {"agent_searcher_current": answer, "condition_searcher_current": search(answer, question)}


def stated(text: str) -> str | None:
    """Return a call whole, of prose the last number: the decision in comparable form; None where there is none."""
    if first_decision(text) != PROSE:
        return text.strip()
    numbers = re.findall(r"\b\d+\b", text)
    return numbers[-1] if numbers else None


def corrupt(rng: random.Random, text: str) -> str:
    """Make a wrong version: a call of another person, another number, or prose in place of a call to `search`."""
    found = _CALL.fullmatch(text.strip())
    if found and found[1] == "search":
        name, other = found[3], rng.choice([name for name in NAMES if name != found[3]])
        if rng.random() < 0.5:
            return call("search", "who", other)
        return f"The passage says that {name} owns {rng.randint(1, 9)} {rng.choice(WARES)}."
    numbers = list(re.finditer(r"\b[1-9]\b", text))
    if not numbers:
        return text
    spot = numbers[-1]
    return text[: spot.start()] + str(rng.choice([n for n in range(1, 10) if n != int(spot[0])])) + text[spot.end() :]


def _searches_right(text: str, question: Question) -> bool:
    return stated(text) == stated(_find(question))


def _sells_right(text: str, question: Question) -> bool:
    return stated(text) == stated(_sell(question, _full(question)))


def _inspects_right(text: str, question: Question) -> bool:
    return stated(text) == stated(_inspect(question, _full(question)))


TASK = Task(
    name="tools",
    roles=(
        Role(
            "searcher",
            "Searcher",
            "You are a searcher. Say the number that the passage gives; where it gives none, search for the person and "
            "nothing else.",
            _find,
            _searches_right,
            tool_lead="\nThe search finds:\n",
            tool=search,
            tool_reference=lambda question: search(_find(question), question),
        ),
        Role(
            "seller",
            "Seller",
            "You are a market hand. Sell the items of the person where there are more than 5 of them, otherwise say "
            "how many there are.",
            lambda question: _sell(question, _full(question)),
            _sells_right,
            reacts=_sell,
        ),
        Role(
            "inspector",
            "Inspector",
            "You are an inspector. Check the number that the searcher says; where it made a search, say what the "
            "search finds.",
            lambda question: _inspect(question, _full(question)),
            _inspects_right,
            reacts=_inspect,
        ),
        Role(
            "final",
            "FinalRefer",
            "You make the final decision. Compare the answers of the others, then sell the items where there are "
            "more than 5, otherwise give the answer.",
            lambda question: _decide(question, _full(question)),
            _sells_right,
            reacts=_decide,
            pick="answer is <number>",
        ),
    ),
    generate=generate,
    corrupt=corrupt,
    final=stated,
)
