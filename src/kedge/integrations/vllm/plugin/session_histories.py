"""Sessions in vLLM: the blocks of a session's whole history belong to it, on the device and on the host.

Every request is a turn. While it waits, what is cached of its session goes last; when it has ended, its session owns
its blocks, those of the answer included, for as long as its return is worth that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request, RequestStatus

from kedge.hints.actions import ActionOutcome
from kedge.hints.values import MAX_NAME_LENGTH
from kedge.integrations.vllm.plugin.block_pools import own_prefix
from kedge.integrations.vllm.plugin.free_queue import StepFreeQueue
from kedge.integrations.vllm.plugin.hints import namespace_of
from kedge.integrations.vllm.plugin.requests import LiveRequest
from kedge.policies.eviction import EvictionPolicy, lru
from kedge.policies.sessions import (
    NO_SESSIONS,
    NextRuns,
    SessionHints,
    SessionKey,
    SessionLedger,
    TurnEnd,
    refused,
)
from kedge.policies.sessions.turns import NO_HINTS
from kedge.structures.prefixes import first_of
from kedge.types import Namespace, TurnHints

UNANSWERED = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED, RequestStatus.FINISHED_ERROR)


class SessionHistories:
    """Finds the session of every request. Owned by the scheduler; it does nothing before it is bound."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.ledger = SessionLedger(1, clock)
        self._device: BlockPool | None = None
        self._queues: list[StepFreeQueue] = []
        self._other_policy: EvictionPolicy = lru
        self.on_steps: Callable[[NextRuns], None] = lambda _: None
        """Called with the steps that have changed"""

    def bind(self, device: BlockPool, *others: BlockPool) -> None:
        """Set the pools whose blocks sessions own, each with a `StepFreeQueue`."""
        self._device = device
        self._queues = [pool.free_block_queue for pool in (device, *others)]
        self.ledger = SessionLedger(device.num_gpu_blocks, self._clock)

    def advise(self, namespace: Namespace, hints: TurnHints) -> tuple[ActionOutcome, ...]:
        """Take what a client says of its sessions between requests. Returns what becomes of each hint."""
        if self._device is None:
            return refused(hints, NO_SESSIONS)
        outcomes = self.ledger.advise(namespace, hints)
        self.advance()
        return outcomes

    # turns ----------------------------------------------------------------------------------------------------

    def arrive(self, live: LiveRequest) -> None:
        """Let a new request be the turn of a session, whose blocks go last until it has ended; not before `bind`."""
        if self._device is None:
            return
        request, hinted = live.request, live.hinted
        namespace = namespace_of(request.cache_salt)
        hints = SessionHints.of(hinted.request) if hinted else NO_HINTS
        if request.session_id and not hints.session:
            hints = replace(hints, session=request.session_id[:MAX_NAME_LENGTH])
        live.turn = self.ledger.arrive(namespace, request.block_hashes, hints)
        is_known = self._queues[0].has_step(live.turn.session)
        self.advance()
        if not is_known and self._queues[0].has_step(live.turn.session):
            own_prefix(self._device, request.block_hashes, live.turn.session)

    def waiting(self, requests: Iterable[LiveRequest]) -> None:
        """Protect what is cached of waiting requests by their places in the order of service."""
        self.ledger.waiting(live.turn for live in requests if live.turn)
        self.advance()

    def finish(
        self, live: LiveRequest, main: list[int], others: Sequence[int] = ()
    ) -> tuple[SessionKey, Sequence[BlockHash]] | None:
        """Take the end of a turn, whose blocks in the main group and in the others hold KV and are still in use.

        Returns the session with the history that it now owns, None where it owns none or the turn was not answered.
        """
        turn, request = live.turn, live.request
        if turn is None or self._device is None:
            return None
        size, key, is_answered = self._device.hash_block_size, turn.session, False
        if request.status not in UNANSWERED or request.num_computed_tokens >= request.num_prompt_tokens:
            is_answered = True
            # the end of its prompt tells the session again: an application may leave out parts of the answer
            chain = first_of(request.block_hashes, request.num_prompt_tokens // size)
            self.ledger.answered(turn, chain, TurnEnd(_ending(request)))
        else:
            self.ledger.cancelled(turn)
        self.advance()
        queue = self._queues[0]
        if not queue.has_step(key) or not main:
            return None
        if not is_answered:
            queue.own((*main, *others), key)
            return None
        queue.own_history(main, key)
        queue.own(others, key)
        return key, first_of(request.block_hashes, request.num_computed_tokens // size)

    def preempted(self, live: LiveRequest) -> None:
        """Protect what a request has computed that lost its blocks and waits again."""
        if live.session and self._device and self._queues[0].has_step(live.session):
            own_prefix(self._device, live.request.block_hashes, live.session)

    # once per step --------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Pass on what has changed. Call this in every step, and before blocks are evicted."""
        steps, swaps_policy = self.ledger.advance()
        if swaps_policy:  # of the device and the host: LRU, or sessions again
            befores = [queue.set_policy(self._other_policy) for queue in self._queues]
            self._other_policy = befores[0]
        if steps:
            for queue in self._queues:
                queue.on_forecast(steps)
            self.on_steps(steps)


def _ending(request: Request) -> str:
    """Return what an answer ended with: many models end a call of a tool with a token of its own."""
    if request.status in UNANSWERED:
        return "aborted"
    return "" if request.stop_reason is None else str(request.stop_reason)[:16]
