"""Interleaved runs of one agent or team are told apart by what they read; what does not tell links nothing."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, count, islice
from math import inf
from random import Random
from typing import NamedTuple

import pytest

from kedge.discovery import Discovery
from kedge.types import RequestId, RunId, Tokens
from tests.discovery.teams import words


class Call(NamedTuple):
    """A prompt and what the model answers; without an answer the call fails."""

    prompt: Tokens
    answer: Tokens


PAUSE = 0.05
"""Seconds, at most, from an answer to what follows"""
Script = Iterator[Sequence[Call]]
"""A task: the calls that it makes at once, one batch after the other"""


def prompt(role: str, *values: Tokens) -> Tokens:
    """A role's fixed text, then values with a few words before each of them."""
    filled = (token for at, value in enumerate(values) for token in (*words((role, at), 6), *value))
    return (*words(role, 48), *filled, *words((role, "go on"), 6))


def text(*seed: object, size: int = 30) -> Tokens:
    return words(seed, size)


class Traffic:
    """Tasks of several clients at once, each of which begins its next task when one is over."""

    def __init__(self, seed: int = 0) -> None:
        self.found, self.rng, self.now = Discovery(), Random(seed), 0.0
        self.counts: Counter[str] = Counter()
        """Calls by what they were given to. `right`: a run of their task, or a new one where it has none; `missing`: a
        new one though there is one; `wrong`: the run of another task; `unknown`: none."""
        self._runs: dict[int, set[RunId]] = {}
        self._ids = count()

    def serve(
        self, task: Callable[[int], Script], numbers: Iterable[int], clients: int, forgets_at: float = inf
    ) -> Counter[str]:
        """Let clients work on tasks until all are done, and return the counts. At a time, in seconds, everything may be
        forgotten, as by a restart of the server.
        """
        tasks = ((number, task(number)) for number in numbers)
        events = [(self.rng.uniform(0, 1), client, self._work(tasks)) for client in range(clients)]
        heapify(events)
        while events:
            self.now, client, work = heappop(events)
            if self.now > forgets_at:
                self.found, forgets_at = Discovery(), inf
                self._runs.clear()
            if (pause := next(work, None)) is not None:
                heappush(events, (self.now + pause, client, work))
        return self.counts

    def _work(self, tasks: Iterator[tuple[int, Script]]) -> Iterator[float]:
        """Do what a client does; yields the seconds until it goes on."""
        for number, script in tasks:
            for batch in script:
                asked = [(self.rng.uniform(0.3, 1.5), self._ask(number, call), call.answer) for call in batch]
                waited = 0.0
                for seconds, request_id, answer in sorted(asked):
                    yield seconds - waited
                    waited = seconds
                    self.found.ended(request_id, answer, self.now)
                yield self.rng.uniform(0, PAUSE)

    def _ask(self, number: int, call: Call) -> RequestId:
        request_id = RequestId(str(next(self._ids)))
        found = self.found.arrive(request_id, call.prompt, self.now)
        self.counts[self._judged(number, found.run.id) if found else "unknown"] += 1
        return request_id

    def _judged(self, number: int, run: RunId) -> str:
        known = self._runs.setdefault(number, set())
        if any(run in others for other, others in self._runs.items() if other != number):
            return "wrong"
        is_right = run in known or not known
        known.add(run)
        return "right" if is_right else "missing"


# the kinds of tasks -------------------------------------------------------------------------------------------------

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


RIGHT = {
    writer: 0.99, equal_openings: 0.99, equal_answers: 0.6, restarts: 0.75, failures: 0.99, notes: 0.99, session: 0.99,
    fan_out: 0.99, team: 0.95, silent: 0.15,
}  # fmt: skip
"""The least share of calls that are given to a run of their task where it has one"""


@pytest.mark.parametrize("clients", [1, 8, 32])
@pytest.mark.parametrize(("task", "right"), RIGHT.items())
def test_no_call_is_given_to_the_run_of_another_task(task: Callable[[int], Script], right: float, clients: int) -> None:
    counts = Traffic().serve(task, range(TASKS), clients)
    assert counts["wrong"] == 0
    assert counts["right"] >= right * (counts["right"] + counts["missing"]) > 0


def test_tasks_of_all_kinds_at_once() -> None:
    kinds = [*RIGHT]
    counts = Traffic().serve(lambda number: kinds[number % len(kinds)](number), range(10 * TASKS), 32)
    assert counts["wrong"] == 0 and counts["right"] >= 0.7 * (counts["right"] + counts["missing"])


def test_what_is_forgotten_in_the_middle_links_nothing() -> None:
    counts = Traffic().serve(writer, range(TASKS), 32, forgets_at=20.0)
    assert counts["wrong"] == 0 and counts["right"] >= 0.95 * (counts["right"] + counts["missing"])
