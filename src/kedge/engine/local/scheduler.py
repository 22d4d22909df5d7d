"""Continuous batching: which positions of which sequences run in the next pass."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kedge.engine.local.loading import Loading
from kedge.engine.local.logprobs import LOGIT_ROWS
from kedge.engine.local.sequence import BaseJob, Preparation, RequestSequence, Sequence

JOB_CHUNK = 256
"""Tokens of a base job in one pass: decodes beside it, or a request that comes, are held up by no more than these."""
AHEAD_CHUNK = 32
"""Tokens that are computed ahead of a request in one pass."""


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence's share of the next pass: these positions, ascending."""

    sequence: Sequence
    positions: list[int]

    @property
    def logit_rows(self) -> int:
        """After how many of the positions, the last ones, the logits are wanted."""
        return len(self.positions) if self.sequence.needs_all_logits else 1


class Scheduler:
    """First come, first served, in chunks of at most `max_batch_tokens` a pass.

    Decoding sequences go first (one token each), then prefills that have begun, then new requests; base jobs run
    only in passes in which no request waits for its first token, so they cost nobody's TTFT. Prompts that are
    assembled ahead come after those, in small pieces; beside decodes only the few tokens that a translated one needs.

    A request whose KV is being loaded steps aside, and others go before it (or wait behind it, where `aside` lets none
    pass). Once it is ready it goes before all that
    hold no blocks; at most `max_running` step aside at once, so those that do not are passed by few.
    """

    def __init__(
        self, admit: Callable[[Sequence], bool], aside: Loading, max_batch_tokens: int, max_running: int
    ) -> None:
        """`admit` answers False where a sequence has to wait for blocks; `aside` knows who has to wait for a load."""
        self._admit, self._aside = admit, aside
        self._budget = max_batch_tokens
        self._max_running = max_running
        self.waiting: deque[RequestSequence] = deque()
        self.loading: deque[RequestSequence] = deque()
        """Those that stepped aside."""
        self.jobs: deque[BaseJob] = deque()
        self.ahead: deque[Preparation] = deque()
        """Prompts that nobody has asked for yet, with tokens to be computed."""
        self.running: list[RequestSequence] = []

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.loading or self.jobs or self.ahead or self.running)

    @property
    def unadmitted(self) -> list[RequestSequence]:
        """Requests that have no blocks yet, next first."""
        return [*self.loading, *self.waiting]

    @property
    def someone_waits(self) -> bool:
        """A request has yet to see its first token."""
        return bool(self.waiting or self.loading) or any(sequence.waits_for_first_token for sequence in self.running)

    def schedule(self) -> list[Work]:
        self._admit_waiting()
        left, rows, work = self._budget, LOGIT_ROWS, []
        for sequence in self._candidates():
            if left <= 0:
                break
            most = rows if sequence.needs_all_logits else _chunk(sequence)
            positions = sequence.todo[: min(left, most)]
            left -= len(positions)
            rows -= len(positions) if sequence.needs_all_logits else 0
            if positions:
                work.append(Work(sequence, positions))
        return work

    def _admit_waiting(self) -> None:
        if self._admit_loaded():
            while self.waiting and self._has_place and len(self.loading) < self._max_running:
                sequence = self.waiting[0]
                if not self._aside.is_ready(sequence):
                    if not self._aside.lets_pass:
                        return
                    self.loading.append(self.waiting.popleft())
                elif not self._start(sequence, self.waiting):
                    return
                else:
                    for other in self.loading:
                        self._aside.skipped(other)

    def _admit_loaded(self) -> bool:
        """Admits who stepped aside and need not wait any more; False where one of them lacks room."""
        room = True
        for sequence in tuple(self.loading):
            if self._has_place and self._aside.is_ready(sequence):
                room &= self._start(sequence, self.loading)
        return room

    def _start(self, sequence: RequestSequence, queue: deque[RequestSequence]) -> bool:
        if not self._admit(sequence):
            return False
        queue.remove(sequence)
        self.running.append(sequence)
        return True

    @property
    def _has_place(self) -> bool:
        """Another request may run, and there is something left for it in a pass."""
        pending = sum(len(sequence.todo) for sequence in self.running)
        return len(self.running) < self._max_running and pending < self._budget

    def _candidates(self) -> Iterator[Sequence]:
        yield from sorted(self.running, key=lambda sequence: sequence.waits_for_first_token)
        if self.someone_waits:
            return
        if not self.jobs:
            yield from [one for one in self.ahead if one.translates or not self.running][:1]
        elif self.jobs[0].admitted or self._admit(self.jobs[0]):
            yield self.jobs[0]

    def done(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is."""
        for queue in (self.running, self.waiting, self.loading, self.jobs, self.ahead):
            if sequence in queue:
                queue.remove(sequence)  # type: ignore[arg-type]


def _chunk(sequence: Sequence) -> int:
    """Most tokens of a sequence in one pass."""
    match sequence:
        case BaseJob():
            return JOB_CHUNK
        case Preparation():
            return AHEAD_CHUNK
    return sys.maxsize
