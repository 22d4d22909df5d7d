"""Interleaved runs of one agent or team are told apart by what they read; what does not tell links nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from random import Random

import pytest

from kedge.discovery import Discovery
from tests.discovery.interleaved import Call, Script, Traffic, prompt, text
from tests.discovery.teams import words

TASKS = 100
NOTHING = text("nothing yet")


def turns(number: int) -> int:
    return Random(f"turns {number}").randrange(3, 9)


def drafts(number: int, task: int, wording: Callable[[int], object] | None = None) -> Script:
    """A writer that goes on with its last draft."""
    draft = NOTHING
    for turn in range(turns(number)):
        before, draft = draft, text("draft", wording(turn) if wording else (number, turn))
        yield [Call(prompt("writer", text("task", task), before), draft)]


def writer(number: int) -> Script:
    return drafts(number, task=number)


def equal_openings(number: int) -> Script:
    """Four users ask the same."""
    return drafts(number, task=number // 4)


def equal_answers(number: int) -> Script:
    """Every other draft is one that others write too."""
    return drafts(number, number, lambda turn: turn % 3 if turn % 2 else (number, turn))


def restarts(number: int) -> Script:
    """Half of the tasks begin again after two turns, and answer as before."""
    return chain(islice(writer(number), 2 * (number % 2)), writer(number))


def failures(number: int) -> Script:
    """Every third call fails, and is sent again."""
    for turn, batch in enumerate(writer(number)):
        if turn % 3 == 1:
            yield [call._replace(answer=()) for call in batch]
        yield batch


def notes(number: int) -> Script:
    """An agent whose prompt quotes all of its thoughts and what its tools found."""
    seen = NOTHING
    for turn in range(turns(number)):
        thought = text("thought", number, turn)
        yield [Call(prompt("react", text("task", number), seen), thought)]
        seen = (*(seen if turn else ()), *thought, *words("observation", 4), *text("seen", number, turn))


def session(number: int) -> Script:
    """An agent whose prompts continue one another, and another that reads its last answer."""
    history, thought = (*words("react", 48), *text("task", number), *words("end", 6)), NOTHING
    for turn in range(turns(number)):
        thought = text("thought", number, turn)
        yield [Call(history, thought)]
        history = (*history, *thought, *text("seen", number, turn), *words("end", 6))
    yield [Call(prompt("judge", thought), text("verdict", number))]


def fan_out(number: int) -> Script:
    """One agent that plans, works on three parts at once, and goes on with one of them."""
    task, plan, parts = text("task", number), text("plan", number), [text("part", number, at) for at in range(3)]
    yield [Call(prompt("agent", task, NOTHING), plan)]
    yield [Call(prompt("agent", task, plan), part) for part in parts]
    yield [Call(prompt("agent", task, parts[1]), text("end", number))]


def team(number: int) -> Script:
    """The second agent reads only the question, which follows a date, and the third one both answers."""
    date, question = text("date", number // 20, size=12), text("question", number)
    one, two = text("one", number), text("two", number)
    yield [Call(prompt("solver", date, question), one)]
    yield [Call(prompt("analyst", date, question), two)]
    yield [Call(prompt("judge", date, one, two), text("verdict", number))]


def silent(number: int) -> Script:
    """An agent that reads nothing of what it answered."""
    for turn in range(turns(number)):
        yield [Call(prompt("silent", text("input", number, turn)), text("output", number, turn))]


@pytest.mark.parametrize("clients", [1, 8, 32])
@pytest.mark.parametrize(
    ("task", "right"),
    [
        (writer, 0.99),
        (equal_openings, 0.99),
        (equal_answers, 0.6),
        (restarts, 0.75),
        (failures, 0.99),
        (notes, 0.99),
        (session, 0.99),
        (fan_out, 0.99),
        (team, 0.95),
        (silent, 0.15),
    ],
)
def test_no_call_is_given_to_the_run_of_another_task(task: Callable[[int], Script], right: float, clients: int) -> None:
    counts = Traffic(Discovery()).serve(task, range(TASKS), clients)
    assert counts["wrong"] == 0
    assert counts["right"] >= right * (counts["right"] + counts["missing"]) > 0


def test_tasks_of_all_kinds_at_once() -> None:
    kinds = [writer, equal_openings, equal_answers, restarts, failures, notes, session, fan_out, team, silent]
    counts = Traffic(Discovery()).serve(lambda number: kinds[number % 10](number), range(10 * TASKS), 32)
    assert counts["wrong"] == 0 and counts["right"] >= 0.7 * (counts["right"] + counts["missing"])


def test_what_is_forgotten_in_the_middle_links_nothing() -> None:
    """As when the server starts again while its clients go on."""
    traffic = Traffic(Discovery())
    traffic.forgets_at(20.0)
    counts = traffic.serve(writer, range(TASKS), 32)
    assert counts["wrong"] == 0 and counts["right"] >= 0.95 * (counts["right"] + counts["missing"])
