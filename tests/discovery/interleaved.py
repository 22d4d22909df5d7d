"""Interleaved tasks of one agent or team as plain token prompts, and which runs their calls are given to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import NamedTuple

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

    def __init__(self, found: Discovery, seed: int = 0) -> None:
        self.found, self.rng, self.now = found, Random(seed), 0.0
        self.counts: Counter[str] = Counter()
        """Calls by what they were given to. `right`: a run of their task, or a new one where it has none; `missing`: a
        new one though there is one; `wrong`: the run of another task; `unknown`: none."""
        self._runs: dict[int, set[RunId]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids, self._order = count(), count()

    def serve(self, task: Callable[[int], Script], numbers: Iterable[int], clients: int) -> Counter[str]:
        """Let clients work on tasks until all are done, and return the counts."""
        left = iter(numbers)

        def begin() -> None:
            if (number := next(left, None)) is not None:
                self._go_on(number, task(number), begin)

        for _ in range(clients):
            self._after(self.rng.uniform(0, 1), begin)
        while self._events:
            self.now, _, act = heappop(self._events)
            act()
        return self.counts

    def forgets_at(self, seconds: float) -> None:
        """Let everything be forgotten at this time, as by a restart of the server."""

        def forget() -> None:
            self.found = Discovery()
            self._runs.clear()

        self._after(seconds, forget)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heappush(self._events, (self.now + seconds, next(self._order), act))

    def _go_on(self, number: int, script: Script, end: Callable[[], None]) -> None:
        batch = next(script, None)
        if batch is None:
            self._after(self.rng.uniform(0, PAUSE), end)
            return
        waits = [*batch]
        for call in batch:
            self._ask(number, call, lambda: waits.pop() and not waits and self._go_on(number, script, end))

    def _ask(self, number: int, call: Call, go_on: Callable[[], object]) -> None:
        request_id = RequestId(str(next(self._ids)))
        found = self.found.arrive(request_id, call.prompt, self.now)
        self.counts[self._judged(number, found.run.id) if found else "unknown"] += 1

        def answered() -> None:
            self.found.ended(request_id, call.answer, self.now)
            self._after(self.rng.uniform(0, PAUSE), go_on)

        self._after(self.rng.uniform(0.3, 1.5), answered)

    def _judged(self, number: int, run: RunId) -> str:
        known = self._runs.setdefault(number, set())
        if any(run in others for other, others in self._runs.items() if other != number):
            return "wrong"
        is_right = run in known or not known
        known.add(run)
        return "right" if is_right else "missing"
