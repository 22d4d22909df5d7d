"""The requests of an engine, from when they are queued until their streams have ended."""

from __future__ import annotations

import time
from itertools import takewhile

from kedge.cache import CacheManager
from kedge.discovery import PlainRequests, Served
from kedge.engine.local.host_loads import Loading
from kedge.engine.local.learning import Learning
from kedge.engine.local.preassembly import PromptPreassembler
from kedge.engine.local.scheduler import Scheduler
from kedge.engine.local.sequence import RequestSequence
from kedge.engine.local.sessions import SessionCaching, stop_reason
from kedge.engine.local.state_snapshots import StateSnapshots
from kedge.errors import ForwardFailed
from kedge.policies.sessions import TurnEnd
from kedge.types import FinishReason, GenerateRequest, RequestId, ReuseMode


class Requests:
    """The register of requests: it queues them, frees their blocks and ends them. Called by the engine's owner thread
    only.
    """

    scheduler: Scheduler
    learning: Learning

    def __init__(
        self,
        cache: CacheManager,
        loading: Loading,
        preassembly: PromptPreassembler,
        sessions: SessionCaching,
        plain: PlainRequests,
        snapshots: StateSnapshots,
    ) -> None:
        """Start empty. The scheduler and learning, which free and end requests themselves, are set later."""
        self._cache, self._loading, self._preassembly, self._sessions = cache, loading, preassembly, sessions
        self._plain, self._snapshots = plain, snapshots

    @property
    def sequences(self) -> list[RequestSequence]:
        """All requests, waiting and running."""
        return [*self.scheduler.unadmitted, *self.scheduler.running]

    def submit(self, sequence: RequestSequence) -> None:
        """Queue a request, with its prepared prompt, if there is one."""
        sequence.preparation = self._preassembly.claim(sequence.request)
        sequence.turn = self._sessions.arrived(sequence.request)
        self.scheduler.add(sequence)

    def cancel(self, request_id: RequestId) -> bool:
        """End a request as cancelled, or withdraw the hint of this id. Returns False if there is neither."""
        if sequence := self.find(request_id):
            self.end(sequence)
        return sequence is not None or self._preassembly.cancel(request_id)

    def find(self, request_id: RequestId) -> RequestSequence | None:
        """Return the request of this id, or None."""
        return next((one for one in self.sequences if one.request.request_id == request_id), None)

    def preempt(self, sequence: RequestSequence) -> bool:
        """Free the blocks of another tenant's request for `sequence`. Returns False if it may not have any."""
        victim = self.scheduler.victim(sequence)
        if victim is None:
            return False
        self.learning.forget(victim)
        self.release(victim)
        if victim.waits_for_first_token:
            victim.plan = None
            victim.sentinels.clear()
        self._requeue(victim)
        return True

    def compute_again(self, sequence: RequestSequence) -> None:
        """Free the blocks of a running request, of which nothing is cached: what was computed beside wrong KV may be
        wrong as well. It is admitted again before all others, and computed.
        """
        self._cache.abort(sequence.key)
        self._snapshots.ended(sequence, 0)
        self._requeue(sequence)

    def _requeue(self, sequence: RequestSequence) -> None:
        sequence.table, sequence.todo, sequence.written = None, [], ()
        self.scheduler.preempt(sequence)

    def release(self, sequence: RequestSequence) -> None:
        """Free a request's blocks. Its exact tokens with KV enter the tree."""
        assert sequence.plan is not None
        last = sequence.request.prompt_tokens + len(sequence.response) - 1
        computed = sequence.todo[0] if sequence.todo else last
        exact = min(computed, sequence.plan.exact_tokens) if sequence.plan.translates else computed
        exact = 0 if sequence.request.reuse is ReuseMode.OFF else exact
        fixed = _fixed(sequence.request) if sequence.plan.translates else 0
        self._cache.finish(sequence.key, sequence.tokens[:exact], fixed)
        self._snapshots.ended(sequence, exact)
        if sequence.turn and sequence.finish:
            stop = stop_reason(sequence.request.tool_mark, sequence.text.text, sequence.finish)
            self._sessions.answered(sequence.turn, sequence.tokens[:exact], TurnEnd(stop))
        if sequence.finish:
            served = Served.of(sequence.receipt())
            self._plain.ended(sequence.namespace, sequence.request.request_id, sequence.response, served)
        self._preassembly.wake()

    def end(self, sequence: RequestSequence, error: BaseException | None = None) -> None:
        """End a request early: with an error, or as cancelled. Nothing of it is cached."""
        if sequence.is_over:
            return
        self.scheduler.done(sequence)
        self.learning.forget(sequence)
        if sequence.turn:
            self._sessions.cancelled(sequence.turn)
        self._plain.ended(sequence.namespace, sequence.request.request_id)
        if sequence.admitted:
            self._cache.abort(sequence.key)
            self._snapshots.ended(sequence, 0)
            self._preassembly.wake()
        else:
            self._preassembly.abandon(sequence)
            self._cache.withdraw(sequence.key)
            self._loading.ended(sequence, time.monotonic())
        if error is not None:
            sequence.failed(error)
        else:
            sequence.finished(sequence.text.flush(), FinishReason.CANCELLED)

    def end_failed(self, sequence: RequestSequence, why: str) -> None:
        """End a request with `ForwardFailed`."""
        self.end(sequence, ForwardFailed("request_id", sequence.request.request_id, why))

    def fail_streams(self, error: BaseException) -> None:
        """End every stream with an error, and change nothing else."""
        for sequence in self.sequences:
            if not sequence.is_over:
                sequence.failed(error)


def _fixed(request: GenerateRequest) -> int:
    """Return how many tokens a prompt has before its first value."""
    return sum(len(one.tokens) for one in takewhile(lambda one: not one.is_placeholder, request.segments))
