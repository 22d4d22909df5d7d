"""Continuous batching: which positions of which sequences run in the next pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kedge.engine.local.sequence import BaseJob, RequestSequence, Sequence

JOB_CHUNK = 256
"""Tokens of a base job in one pass: decodes beside it, or a request that comes, are held up by no more than these."""


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence's share of the next pass: these positions, ascending."""

    sequence: Sequence
    positions: list[int]


class Scheduler:
    """First come, first served, in chunks of at most `max_batch_tokens` a pass.

    Decoding sequences go first (one token each), then prefills that have begun, then new requests; base jobs run
    only in passes in which no request waits for its first token, so they cost nobody's TTFT.
    """

    def __init__(self, admit: Callable[[Sequence], bool], max_batch_tokens: int, max_running: int) -> None:
        self._admit = admit
        self._budget = max_batch_tokens
        self._max_running = max_running
        self.waiting: deque[RequestSequence] = deque()
        self.jobs: deque[BaseJob] = deque()
        self.running: list[RequestSequence] = []

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.jobs or self.running)

    @property
    def someone_waits(self) -> bool:
        """A request has yet to see its first token."""
        return bool(self.waiting) or any(sequence.waits_for_first_token for sequence in self.running)

    def schedule(self) -> list[Work]:
        self._admit_waiting()
        left, work = self._budget, []
        for sequence in self._candidates():
            if left <= 0:
                break
            positions = sequence.todo[: min(left, JOB_CHUNK) if isinstance(sequence, BaseJob) else left]
            left -= len(positions)
            work.append(Work(sequence, positions))
        return work

    def _admit_waiting(self) -> None:
        pending = sum(len(sequence.todo) for sequence in self.running)
        while self.waiting and len(self.running) < self._max_running and pending < self._budget:
            if not self._admit(self.waiting[0]):
                return
            self.running.append(self.waiting.popleft())
            pending += len(self.running[-1].todo)

    def _candidates(self) -> Iterator[Sequence]:
        yield from sorted(self.running, key=lambda sequence: sequence.waits_for_first_token)
        if self.jobs and not self.someone_waits and (self.jobs[0].admitted or self._admit(self.jobs[0])):
            yield self.jobs[0]

    def done(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is."""
        for queue in (self.running, self.waiting, self.jobs):
            if sequence in queue:
                queue.remove(sequence)  # type: ignore[arg-type]
