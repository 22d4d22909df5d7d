"""Learning from dense prompts, and base prefills for later ones.

Neither may cost other requests anything: both are bounded, their blocks are given up as soon as a request needs them,
and while requests wait for their first token they take at most a share of each pass.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from kedge.cache import CacheManager
from kedge.engine.local.sequence import BaseJob, RequestSequence
from kedge.kv.storage import PagedStorage
from kedge.reuse.costs import MAX_PENDING
from kedge.reuse.learning import Backlog, LearningBudget
from kedge.reuse.runtime import BaseNeed, ReadKV, Runtime
from kedge.structures.bounded import of_largest
from kedge.types import RequestId, new_request_id

logger = logging.getLogger(__name__)


class Learning:
    """The learning of one engine. Called by its owner thread only. A prompt that is learned from keeps its blocks for
    that when its request ends.
    """

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
        self.backlog = Backlog[RequestSequence](
            runtime.end_run, lambda one: all(job.wanted_by != one.key for job in jobs), self._over, MAX_PENDING
        )
        self.budget = LearningBudget()
        self._counts = Counter[str]()

    # requests -------------------------------------------------------------------------------------------------

    def started(self, sequence: RequestSequence) -> None:
        """Register a request that has its first token: queue the base prefills that its values need, and learn from its
        prompt, if that is dense.
        """
        request, plan, table = sequence.request, sequence.plan, sequence.table
        assert plan is not None and table is not None
        read = partial(self._storage.read, table)
        self._provide_bases(sequence, read)
        if self._runtime.wants_harvest(request, plan) and self.backlog.has_room(1):
            self.backlog.add(sequence, request.run_key, self._runtime.observe(request, read, plan))

    def finished(self, sequence: RequestSequence) -> None:
        """Free the blocks of a finished request, unless it is still to be learned from."""
        if all(one is not sequence for one in self.backlog):
            self._release(sequence)

    def _over(self, sequence: RequestSequence) -> None:
        if sequence.is_over:
            self._release(sequence)

    def keep_response(self, sequence: RequestSequence) -> None:
        """Keep an answer's own KV as base KV of the placeholder that it fills, for readers that may translate it."""
        request, table = sequence.request, sequence.table
        if sequence.computed <= request.prompt_tokens or not self._runtime.learns(request):
            return
        assert table is not None
        answer = tuple(sequence.tokens[request.prompt_tokens :])
        try:
            kv = self._storage.read(table, request.prompt_tokens, sequence.computed)
            self._runtime.keep_response(request, answer, kv)
        except Exception:  # out of memory, say: its readers compute it
            self._counts["failed"] += 1
            logger.exception("the KV of the answer to %s could not be kept", request.request_id)

    def spend(self, seconds: float) -> None:
        """Learn within its share of a pass of `seconds`, while requests run."""
        self.budget.spend(self.backlog.step, seconds)

    def reclaim(self) -> bool:
        """Give up the oldest finished request that is still to be learned from, and free its blocks. Returns False if
        there is none.
        """
        holding = next((one for one in self.backlog if one.is_over), None)
        if holding:
            self.backlog.give_up(holding)
        return holding is not None

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
        """Keep base KV that a computed prompt leaves behind, and queue base prefills for its other values."""
        try:
            self._runtime.keep_base(sequence.request, read, sequence.plan)
        except Exception:  # out of memory, say: its readers ask for it
            self._counts["failed"] += 1
            logger.exception("base KV of what %s read could not be kept", sequence.request.request_id)
        for need in self._runtime.needs(sequence.request, is_new=True):
            if len(need.tokens) <= self._longest:
                self._queue(need, sequence)
        waiting = [job for job in self._jobs if not job.admitted and not job.is_awaited]
        while waiting and len(self._jobs) > MAX_PENDING:
            waiting.remove(job := of_largest(waiting, lambda one: one.namespace.tenant))
            self.drop(job)

    def _queue(self, need: BaseNeed, sequence: RequestSequence) -> BaseJob:
        """Return the base prefill of these tokens, a queued or a new one."""
        tokens = list(need.tokens)
        queued = next((job for job in self._jobs if job.tokens == tokens and job.namespace == need.namespace), None)
        if queued is None:
            key = RequestId(f"base-{new_request_id()}")
            queued = BaseJob(key, need.namespace, tokens, keep=need.keep, wanted_by=sequence.key)
            self._jobs.append(queued)
        return queued

    def done(self, job: BaseJob) -> None:
        """Keep the base KV of a finished prefill."""
        assert job.table is not None
        self._jobs.remove(job)
        try:
            job.keep(partial(self._storage.read, job.table))
            self._counts["base_prefills_done"] += 1
        except Exception:  # out of memory, say: it will be asked for again
            self._counts["failed"] += 1
            logger.exception("base KV of %s tokens could not be kept", len(job.tokens))
        self._cache.finish(job.key, job.tokens)

    def drop(self, job: BaseJob) -> None:
        """Give up a base prefill; requests that need it ask again."""
        if job.admitted:
            self._cache.abort(job.key)
        self._jobs.remove(job)
        self._counts["base_prefills_dropped"] += 1

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
        self.backlog.clear()
        for job in tuple(self._jobs):
            self.drop(job)

    def stats(self) -> dict[str, int]:
        """Return how many prompts are to be learned from, how many base prefills are queued or under way, and the
        numbers of both since the start. `reclaimed` are requests not learned from, because others needed their blocks
        or too many waited.
        """
        return {
            "pending": len(self.backlog),
            "base_prefills": len(self._jobs),
            "observed": self.backlog.observed,
            "reclaimed": self.backlog.given_up,
            "failed": self._counts["failed"] + self.backlog.failed,
            "base_prefills_done": self._counts["base_prefills_done"],
            "base_prefills_dropped": self._counts["base_prefills_dropped"],
        }
