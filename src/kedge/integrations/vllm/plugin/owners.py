"""Who owns blocks, on the device and on the host: agents their fixed prompts by forecast (KVFlow, 3.3), sessions their
whole histories.

Every request is a turn of a session. While it waits, what is cached of its session goes last; when it has ended, its
session owns its blocks, those of the answer included, for as long as its return is worth that.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request, RequestStatus

from kedge.cache.owners import Owners
from kedge.discovery import FoundForecasts
from kedge.hints.actions import ActionOutcome
from kedge.hints.values import MAX_NAME_LENGTH
from kedge.integrations.vllm.plugin.block_pools import own_prefix
from kedge.integrations.vllm.plugin.free_queue import StepFreeQueue
from kedge.integrations.vllm.plugin.hints import HintedRequest, namespace_of
from kedge.integrations.vllm.plugin.requests import LiveRequest
from kedge.policies.eviction import EvictionPolicy, lru
from kedge.policies.fixed_prompts import FixedLengths
from kedge.policies.sessions import NO_SESSIONS, SessionHints, SessionKey, SessionLedger, TurnEnd, refused
from kedge.policies.sessions.turns import NO_HINTS
from kedge.structures.bounded import BoundedDict
from kedge.structures.prefixes import first_of
from kedge.types import AgentKey, Namespace, RunKey, TurnHints
from kedge.workflow.forecast import Changes, ForecastBoard
from kedge.workflow.steps import NextRun

AgentTemplate = tuple[Namespace, str, str, str]
"""(namespace, client, workflow, agent): the fixed prompt of an agent is the same in all its runs."""
BlockHashes = tuple[BlockHash, ...]
UNANSWERED = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED, RequestStatus.FINISHED_ERROR)


class AgentPrompts:
    """The forecast of every agent with the block hashes of its fixed prompt. Owned by the scheduler."""

    def __init__(
        self,
        owners: Owners,
        block_size: int,
        forecast_ttl: float,
        on_forecast: Callable[[Changes], None] = lambda _: None,
    ) -> None:
        """Begin without forecasts. `owners` get their changes, as does `on_forecast`."""
        self._owners, self._block_size, self._on_forecast = owners, block_size, on_forecast
        self._board = ForecastBoard(forecast_ttl)
        self._lengths = FixedLengths(block_size)
        self.prompts: dict[AgentKey, BlockHashes] = {}
        self._templates: BoundedDict[AgentTemplate, BlockHashes] = BoundedDict(owner=lambda one: one[0].tenant)
        self._template_of: dict[AgentKey, AgentTemplate] = {}
        self._pools: tuple[BlockPool, ...] = ()
        self._ignored_labels = 0

    def bind(self, *pools: BlockPool) -> None:
        """Set the pools whose blocks are owned by agents, the device's first. They have a `StepFreeQueue` each."""
        self._pools = pools

    def counters(self) -> Counter[str]:
        """Return what was ignored since the start."""
        return Counter(ignored_labels=self._ignored_labels, ignored_forecasts=self._board.ignored)

    # forecasts ------------------------------------------------------------------------------------------------

    def forecast(self, hinted: HintedRequest, steps: Mapping[Any, NextRun]) -> bool:
        """Take the forecast of a run. One without a sequence number is newer than the one before it.

        Returns whether it replaced the one before.
        """
        run, workflow = hinted.request.run_key, hinted.request.workflow
        known = self._board.forecast(run)
        newer = known.seq + 1 if known else 0
        seq = newer if hinted.seq is None else hinted.seq
        changes = self._board.update(run, seq, steps, time.monotonic())
        for key in changes:
            if key.run == run and key not in self._template_of:
                self._template_of[key] = (*run[:2], workflow, key.agent)
        self._apply(changes)
        return self._board.forecast(run) is not known

    def expect(self, forecasts: FoundForecasts) -> None:
        """Take the changes of forecasts that were found, not given, with the teams of agents that are new in them."""
        if (found := forecasts.take()) is None:
            return
        for key, team in found.teams.items():
            self._template_of.setdefault(key, (key.namespace, key.client_id, team, key.agent))
        self._apply(found.next_runs)

    def end_run(self, run: RunKey) -> None:
        """Drop the forecast of a run that is over."""
        self._apply(self._board.done(run, time.monotonic()))

    def expire(self) -> None:
        """Drop the forecasts that are too old."""
        if changes := self._board.expire(time.monotonic()):
            self._apply(changes)

    def _apply(self, changes: Changes) -> None:
        self._on_forecast(changes)
        adopted = dict[AgentKey, BlockHashes]()
        for key, next_run in changes.items():
            if next_run is None:
                self.prompts.pop(key, None)
                self._template_of.pop(key, None)
            elif key not in self.prompts and self._pools and (template := self._template_of.get(key)):
                hashes = self._templates.get(template)
                if hashes is not None:  # one that has not called in this run has the fixed prompt of other runs
                    adopted[key] = self.prompts[key] = hashes
        self._owners.on_forecast(changes)
        for key, hashes in adopted.items():
            for pool in self._pools:
                own_prefix(pool, hashes, key)

    # prompts --------------------------------------------------------------------------------------------------

    def label(
        self, hinted: HintedRequest, request: Request, block_ids: list[int], others: Sequence[int] = ()
    ) -> AgentKey | None:
        """Give the blocks of a finished request to its agent, while the request holds them; `others` are those of other
        groups than the main one.

        Those of the fixed prompt belong to the agent, the others follow it. Returns the agent, or None where nothing
        was labelled.
        """
        asked, key = hinted.request, hinted.request.agent_key
        length = self._lengths.of(asked, request.block_hashes)
        if not length or not self._pools:
            return None
        fixed = length // self._block_size
        template: AgentTemplate = (asked.namespace, key.client_id, asked.workflow, asked.agent)
        hashes = tuple(request.block_hashes[:fixed])
        self._templates[template] = hashes
        if request.abort_immediately:
            return None  # a message without a pass: the forecast that follows it adopts the prompt
        if key not in self._owners.next_runs:
            self._ignored_labels += 1
            return None
        self.prompts[key], self._template_of[key] = hashes, template
        queue: StepFreeQueue = self._pools[0].free_block_queue
        queue.own(block_ids[:fixed], key)
        if others:
            own_prefix(self._pools[0], hashes, key)
        queue.mark_suffix((*block_ids[fixed:], *others))
        return key

    def clear(self) -> None:
        """Forget all fixed prompts. Forecasts stay."""
        self.prompts.clear()
        self._templates.clear()


class SessionHistories:
    """Finds the session of every request. Owned by the scheduler; it does nothing before it is bound."""

    def __init__(self, owners: Owners, clock: Callable[[], float] = time.monotonic) -> None:
        """`owners` get the steps of sessions."""
        self._owners, self._clock = owners, clock
        self.ledger = SessionLedger(1, clock)
        self._device: BlockPool | None = None
        self._queues: list[StepFreeQueue] = []
        self._other_policy: EvictionPolicy = lru

    def bind(self, device: BlockPool, *others: BlockPool) -> None:
        """Set the pools whose blocks sessions own, each with a `StepFreeQueue`."""
        self._device = device
        self._queues = [pool.free_block_queue for pool in (device, *others)]
        self.ledger = SessionLedger(device.num_gpu_blocks, self._clock)

    def advise(self, namespace: Namespace, hints: TurnHints) -> tuple[ActionOutcome, ...]:
        """Take what a client says of its sessions between requests. Returns what becomes of each hint."""
        if self._device is None:
            return refused(hints, NO_SESSIONS)
        if outcomes := self.ledger.advise(namespace, hints):
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
        is_known = live.turn.session in self._owners.next_runs
        self.advance()
        if not is_known and live.turn.session in self._owners.next_runs:
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
        size, key = self._device.hash_block_size, turn.session
        is_answered = request.status not in UNANSWERED or request.num_computed_tokens >= request.num_prompt_tokens
        if is_answered:
            # the end of its prompt tells the session again: an application may leave out parts of the answer
            chain = first_of(request.block_hashes, request.num_prompt_tokens // size)
            self.ledger.answered(turn, chain, TurnEnd(_ending(request)))
        else:
            self.ledger.cancelled(turn)
        self.advance()
        if key not in self._owners.next_runs or not main:
            return None
        queue = self._queues[0]
        if not is_answered:
            queue.own((*main, *others), key)
            return None
        queue.own_history(main, key)
        queue.own(others, key)
        return key, first_of(request.block_hashes, request.num_computed_tokens // size)

    def preempted(self, live: LiveRequest) -> None:
        """Protect what a request has computed that lost its blocks and waits again."""
        if self._device and live.session in self._owners.next_runs:
            own_prefix(self._device, live.request.block_hashes, live.session)

    # once per step --------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Pass on what has changed. Call this in every step, and before blocks are evicted."""
        steps, swaps_policy = self.ledger.advance()
        if swaps_policy:  # of the device and the host: LRU, or sessions again
            befores = [queue.set_policy(self._other_policy) for queue in self._queues]
            self._other_policy = befores[0]
        self._owners.on_forecast(steps)


def _ending(request: Request) -> str:
    """Return what an answer ended with: many models end a call of a tool with a token of its own."""
    if request.status in UNANSWERED:
        return "aborted"
    return "" if request.stop_reason is None else str(request.stop_reason)[:16]
