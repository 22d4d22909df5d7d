"""Learning from dense prompts, and base prefills for later ones.

Neither may cost other requests anything: both are bounded, their blocks are given up as soon as a request needs them,
and while requests wait for their first token they take at most a share of each pass. An error while learning loses what
would have been learned, and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

from kedge.cache import CacheManager
from kedge.engine.local.sequence import BaseJob, RequestSequence
from kedge.errors import TranslationRefused
from kedge.kv.storage import PagedStorage
from kedge.reuse.costs import LEARNING_SHARE, MAX_PENDING
from kedge.reuse.layout import Placed
from kedge.reuse.runtime import BaseNeed, ReadKV, Runtime
from kedge.types import RequestId, RunKey, new_request_id

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingObservation:
    """A dense prompt with offsets to be measured step by step. It keeps its blocks for that when the request ends."""

    sequence: RequestSequence
    run: RunKey
    steps: Iterator[Placed]


@dataclass(slots=True)
class LearningStats:
    """The numbers of requests learned from since the start, and of those given up."""

    pending: int = 0
    base_prefills: int = 0
    """Queued or under way."""
    observed: int = 0
    """Requests that were learned from."""
    reclaimed: int = 0
    """Requests not learned from, because others needed their blocks or too many waited."""
    failed: int = 0
    base_prefills_done: int = 0
    base_prefills_dropped: int = 0


class Learning:
    """The backlog of learning of one engine. Called by its owner thread only."""

    def __init__(
        self,
        runtime: Runtime,
        cache: CacheManager,
        storage: PagedStorage,
        jobs: deque[BaseJob],
        longest: int,
        release: Callable[[RequestSequence], None],
    ) -> None:
        """Start with an empty backlog. `jobs` is the scheduler's queue, `longest` the tokens of the longest prompt that
        can be computed; `release` frees the blocks of a finished request.
        """
        self._runtime, self._cache, self._storage, self._release = runtime, cache, storage, release
        self._jobs, self._longest = jobs, longest
        self._pending: deque[PendingObservation] = deque()
        self._ended: set[RunKey] = set()
        """Ended runs with requests that are left to learn from"""
        self._stats = LearningStats()
        self._share, self._credit = LEARNING_SHARE, 0.0

    # requests -------------------------------------------------------------------------------------------------

    def started(self, sequence: RequestSequence) -> None:
        """Register a request that has its first token: queue the base prefills that its values need, and learn from its
        prompt, if that is dense.
        """
        request, plan, table = sequence.request, sequence.plan, sequence.table
        assert plan is not None and table is not None
        self._provide_bases(sequence, partial(self._storage.read, table))
        if self._runtime.wants_harvest(request, plan):
            steps = self._runtime.observe(request, partial(self._storage.read, table), plan)
            self._pending.append(PendingObservation(sequence, request.run_key, steps))
            if len(self._pending) > MAX_PENDING:
                self._give_up(self._pending[0])

    def finished(self, sequence: RequestSequence) -> None:
        """Free the blocks of a finished request, unless it is still to be learned from."""
        if all(one.sequence is not sequence for one in self._pending):
            self._release(sequence)

    def forget(self, sequence: RequestSequence) -> None:
        """Stop learning from a request, before its blocks are taken."""
        for observation in [one for one in self._pending if one.sequence is sequence]:
            self._pending.remove(observation)
            self._leave_run(observation.run)

    def keep_response(self, sequence: RequestSequence) -> None:
        """Keep an answer's own KV as base KV of the placeholder that it fills."""
        request, table = sequence.request, sequence.table
        assert table is not None
        answer = tuple(sequence.tokens[request.prompt_tokens :])
        try:
            kv = self._storage.read(table, request.prompt_tokens, len(sequence.tokens))
            self._runtime.keep_response(request, answer, kv)
        except Exception:  # out of memory, say: its readers compute it
            self._stats.failed += 1
            logger.exception("the KV of the answer to %s could not be kept", request.request_id)

    @property
    def ready(self) -> bool:
        """Whether `step` has work: a request without base prefills of its values under way."""
        return self._next() is not None

    def step(self) -> None:
        """Measure the offsets of one segment of a prompt."""
        observation = self._next()
        if observation is None:
            return
        try:
            if next(observation.steps, None) is not None:
                return
        except TranslationRefused as refusal:
            logger.warning("request %s is not learned from: %s", observation.sequence.request.request_id, refusal)
        except Exception:  # out of memory, say: what is lost is one sample, and no pool has changed
            self._stats.failed += 1
            logger.exception("request %s could not be learned from", observation.sequence.request.request_id)
        self._stats.observed += 1
        self._over(observation)

    def spend(self, seconds: float) -> None:
        """Learn within its share of a pass of `seconds`, while requests run. Later passes pay for what exceeds it."""
        self._credit = min(self._credit, 0.0) + self._share * seconds
        while self._credit > 0 and self.ready:
            began = time.monotonic()
            self.step()
            self._credit -= time.monotonic() - began

    def reclaim(self) -> bool:
        """Give up the oldest finished request that is still to be learned from, and free its blocks. Returns False if
        there is none.
        """
        holding = next((one for one in self._pending if one.sequence.is_over), None)
        if holding:
            self._give_up(holding)
        return holding is not None

    def _give_up(self, observation: PendingObservation) -> None:
        self._stats.reclaimed += 1
        self._over(observation)

    def end_run(self, run: RunKey) -> None:
        """Forget what a run shared, as soon as no request of it is left to learn from."""
        self._ended.add(run)
        self._leave_run(run)

    def _next(self) -> PendingObservation | None:
        """Return the oldest request without a queued base prefill."""
        if not self._pending:
            return None
        awaited = {job.wanted_by for job in self._jobs}
        return next((one for one in self._pending if one.sequence.key not in awaited), None)

    def _over(self, observation: PendingObservation) -> None:
        """End learning from a request, and free its blocks if it has ended."""
        self._pending.remove(observation)
        if observation.sequence.is_over:
            self._release(observation.sequence)
        self._leave_run(observation.run)

    def _leave_run(self, run: RunKey) -> None:
        if run in self._ended and all(one.run != run for one in self._pending):
            self._ended.remove(run)
            self._runtime.end_run(run)

    # base KV --------------------------------------------------------------------------------------------------

    def awaits_base(self, sequence: RequestSequence, *, busy: bool) -> bool:
        """Return whether a request should wait for base KV of its values. That is queued if the engine is `busy` at the
        first call.
        """
        if sequence.awaits is None:
            sequence.awaits = self._queue_prerequisites(sequence) if busy else ()
        return bool(sequence.awaits) and any(job.key in sequence.awaits for job in self._jobs)

    def _queue_prerequisites(self, sequence: RequestSequence) -> tuple[RequestId, ...]:
        if sequence.preparation is not None or not self._runtime.learns(sequence.request):
            return ()
        known = self._cache.match(sequence.namespace, sequence.tokens[: sequence.exact_limit])
        needs = self._runtime.prerequisites(sequence.request, len(known) * self._cache.block_size)
        jobs = [self._queue(need, sequence) for need in needs if len(need.tokens) <= self._longest]
        for job in jobs:
            job.is_awaited = True
        return tuple(job.key for job in jobs)

    def _provide_bases(self, sequence: RequestSequence, read: ReadKV) -> None:
        """Keep base KV that a computed prompt leaves behind, and queue prefills of what else its values need."""
        try:
            self._runtime.keep_base(sequence.request, read, sequence.plan)
        except Exception:  # out of memory, say: its readers ask for it
            self._stats.failed += 1
            logger.exception("base KV of what %s read could not be kept", sequence.request.request_id)
        for need in self._runtime.needs(sequence.request):
            if len(need.tokens) <= self._longest:
                self._queue(need, sequence)
        waiting = [job for job in self._jobs if not job.admitted and not job.is_awaited]
        for job in waiting[: max(0, len(self._jobs) - MAX_PENDING)]:  # the oldest first
            self.drop(job)

    def _queue(self, need: BaseNeed, sequence: RequestSequence) -> BaseJob:
        """Return the base prefill of these tokens, a queued or a new one."""
        tokens = list(need.tokens)
        queued = next((job for job in self._jobs if job.tokens == tokens and job.namespace == need.namespace), None)
        if queued is None:
            key = RequestId(f"base-{new_request_id()}")
            queued = BaseJob(key, need.namespace, tokens, cuts=need.cuts, wanted_by=sequence.key)
            self._jobs.append(queued)
        return queued

    def done(self, job: BaseJob) -> None:
        """Keep the base KV of a finished prefill."""
        assert job.table is not None
        self._jobs.remove(job)
        try:
            for cut in job.cuts:
                cut.keep(self._storage.read(job.table, cut.start, cut.stop))
            self._stats.base_prefills_done += 1
        except Exception:  # out of memory, say: it will be asked for again
            self._stats.failed += 1
            logger.exception("base KV of %s tokens could not be kept", len(job.tokens))
        self._cache.finish(job.key, job.tokens)

    def drop(self, job: BaseJob) -> None:
        """Give up a base prefill; requests that need it ask again."""
        if job.admitted:
            self._cache.abort(job.key)
        self._jobs.remove(job)
        self._stats.base_prefills_dropped += 1

    def reclaim_job(self) -> bool:
        """Give up a base prefill that holds blocks, or one that a request waits for. Returns False if there is none."""
        holding = next((job for job in self._jobs if job.admitted), None)
        given_up = holding or next((job for job in self._jobs if job.is_awaited), None)
        if given_up:
            self.drop(given_up)
        return given_up is not None

    # the end --------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Give up the whole backlog."""
        for observation in tuple(self._pending):
            self._give_up(observation)
        for job in tuple(self._jobs):
            self.drop(job)

    def stats(self) -> dict[str, int]:
        """Return a snapshot as plain data."""
        self._stats.pending, self._stats.base_prefills = len(self._pending), len(self._jobs)
        return asdict(self._stats)
