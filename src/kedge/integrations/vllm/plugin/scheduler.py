"""The order of waiting requests, and lanes (`lanes.py`), for vLLM with

    --scheduler-cls kedge.integrations.vllm.plugin.scheduler.make_scheduler

With `--scheduling-policy priority` it is that of their steps (KVFlow, section 3.3): a request without a priority of its
own gets its agent's steps-to-execution, and the agent that is due first goes first. With vLLM's default, `fcfs`, it is
that of arrival, and what is cached first while the live contexts do not fit the cache.
"""

from __future__ import annotations

import dis
import itertools
import logging
import math
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm.config import SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request

from kedge.integrations.vllm.entry_point import NAME
from kedge.integrations.vllm.plugin.hints import read_hints
from kedge.integrations.vllm.plugin.lanes import LaneGrants
from kedge.policies.service import LiveContexts, ServiceOrder, StepTimes, may_start, missing_share
from kedge.reuse.holes import Holes
from kedge.reuse.lanes import LaneBudget
from kedge.reuse.learning import BaseShare
from kedge.types import ReuseMode

if TYPE_CHECKING:
    from kedge.integrations.vllm.plugin.scheduler_side import SchedulerSide

Cached = Callable[[Sequence[BlockHash]], tuple[int, int]]
"""Returns how many leading blocks of a prompt are on the device, and how many after them can be loaded"""
_LANE_SAMPLING = SamplingParams(max_tokens=1, temperature=0)
LOWERED = ("max_num_scheduled_tokens", "max_num_active_reqs")
"""Attributes of vLLM's scheduler that are lower while it schedules, by what lanes take"""
MayStart = Callable[[int, float], bool]
"""Returns whether a prompt of so many tokens, a share of which has to be computed, may start beside running requests"""
logger = logging.getLogger(__name__)


def missing_of(request: Request, cached: Cached) -> float:
    """Return the share of a request's full blocks that has to be computed."""
    hashes = request.block_hashes
    return missing_share(len(hashes), *cached(hashes)) if hashes else 1.0


class CachedFirstQueue(RequestQueue):
    """Waiting requests by `ServiceOrder`. Those that come back, preempted or skipped in a step, go before all others,
    as vLLM has it; what was peeked at is what is popped.
    """

    def __init__(
        self,
        cached: Cached,
        capacity: int,
        step: Callable[[], int],
        on_order: Callable[[Sequence[Request]], None],
        may_start: MayStart,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start empty. `capacity` is in tokens; `step` returns the number of the scheduler's step; `on_order` takes the
        requests in the order of service whenever that has changed while the live contexts do not fit, and `may_start`
        decides then about the first of them.
        """
        self._capacity, self._step, self._on_order, self._may_start = capacity, step, on_order, may_start
        self._ordered: list[Request] = []
        self.contexts = LiveContexts(clock)
        self._order: ServiceOrder[Request] = ServiceOrder(lambda request: missing_of(request, cached))
        self._returned: deque[Request] = deque()
        self._head: Request | None = None

    def add_request(self, request: Request) -> None:
        self._order.push(request, request.num_tokens)

    def peek_request(self) -> Request:
        """Return the next request. Raises `IndexError` where none may start now."""
        self._head = self._next()
        if self._head is None:
            raise IndexError("no request may start")
        return self._head

    def _next(self) -> Request | None:
        """Return the request that is next, unless it has to wait for running ones. Those behind it wait as well, or
        there would be no bound on how many pass it.
        """
        if not self._returned and not self._order:
            return None
        head = next(iter(self), None)
        if head is None or head not in self._order or not self._is_overloaded:
            return head
        return head if self._may_start(head.num_tokens, self._order.missing(head)) else None

    @property
    def _is_overloaded(self) -> bool:
        return self.contexts.tokens() > self._capacity

    def pop_request(self) -> Request:
        """Remove and return the request that was peeked at last, or else the next one."""
        request = self._head if self._head is not None and self._head in self else self.peek_request()
        self.remove_request(request)
        return request

    def prepend_request(self, request: Request) -> None:
        self._returned.appendleft(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        self._returned.extendleft(requests)

    def remove_request(self, request: Request) -> None:
        self._head = None
        if request in self._order:
            self._order.remove(request)
        else:
            self._returned.remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request in self:
                self.remove_request(request)

    def __contains__(self, request: object) -> bool:
        return request in self._order or request in self._returned

    def __bool__(self) -> bool:
        """Return whether a request may start now: vLLM asks this before it peeks."""
        return self._next() is not None

    def __len__(self) -> int:
        return len(self._returned) + len(self._order)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order of service, and pass it on where it has changed."""
        overloaded = self._is_overloaded
        ordered = [*self._returned, *self._order.order(self._step(), overloaded)]
        if overloaded and ordered != self._ordered:
            self._ordered = ordered
            self._on_order(ordered)
        return iter(ordered)


def priority_of(request: Request) -> int:
    """Return the steps of the request's agent in its own forecast, rounded down, or else the request's priority."""
    tokens = request.prompt_token_ids or ()
    hinted = read_hints(request.request_id, tokens, request.cache_salt, request.kv_transfer_params, ReuseMode.EXACT)
    next_run = hinted.steps.get(hinted.request.agent) if hinted and hinted.steps else None
    if next_run is None or request.priority:
        return request.priority
    return sys.maxsize if math.isinf(next_run.steps) else int(next_run.steps)  # the last one if it never runs


class KedgeScheduling:
    """A mixin of vLLM's scheduler, some of whose attributes it names: lanes, and the order of waiting requests."""

    block_size: int
    connector: Any
    connector_prefix_cache_stats: PrefixCacheStats | None
    current_step: int
    defer_block_free: bool
    deferred_waiting: Collection[Request]
    finished_req_ids: set[str]
    kv_cache_manager: Any
    max_num_active_reqs: int
    max_num_scheduled_tokens: int
    num_waiting_for_streaming_input: int
    pause_state: PauseState
    policy: SchedulingPolicy
    requests: dict[str, Request]
    running: list[Request]
    scheduler_config: SchedulerConfig
    sched_step_seq: int
    use_v2_model_runner: bool
    waiting: Any

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self._plugin: SchedulerSide = self.connector.join(self._hold_back)
        self._lanes = self._plugin.translations.lanes
        self._lane_ids = map(f"lane-{secrets.token_hex(16)}-{{}}".format, itertools.count())
        """Ids that no client can choose; a request that is preempted gets lanes with new ones"""
        self._times, self._stepped_at, self._step_size = StepTimes(), 0.0, (0, 0)
        self._base_share = BaseShare(self._times)
        self._by_cache: CachedFirstQueue | None = None
        if self.policy is SchedulingPolicy.FCFS:
            side, self._capacity = self._plugin, self.kv_cache_manager.block_pool.num_gpu_blocks * self.block_size
            self.waiting = self._by_cache = CachedFirstQueue(
                side.cached_blocks, self._capacity, lambda: self.current_step, side.on_order, self._may_start
            )

    # the order of waiting requests --------------------------------------------------------------------------------

    def _may_start(self, tokens: int, missing: float) -> bool:
        """Return whether a prompt may start beside running requests, see `kedge.policies.service`."""
        running, tracker = sum(request.num_tokens for request in self.running), self._plugin.sessions.ledger.tracker
        return may_start(tokens, missing, running, self._capacity, tracker.returning, self._times)

    def add_request(self, request: Request) -> None:
        if self.policy is SchedulingPolicy.PRIORITY:
            request.priority = priority_of(request)  # reads hints, which takes longer than anything else here
        super().add_request(request)  # type: ignore[misc]
        if self._by_cache is not None and request.request_id in self.requests:
            session = self._plugin.requests[request.request_id].session
            self._by_cache.contexts.began(request.request_id, session, request.num_tokens)

    def _free_request(self, request: Request, *args: Any, **more: Any) -> Any:
        if self._by_cache is not None:
            self._by_cache.contexts.ended(request.request_id, request.num_tokens)
        self._times.answered(request.num_output_tokens)
        return super()._free_request(request, *args, **more)  # type: ignore[misc]

    # lanes --------------------------------------------------------------------------------------------------------

    def _hold_back(self) -> None:
        """Let no more requests run than run now."""
        self.max_num_active_reqs = self._active

    @property
    def _active(self) -> int:
        return len(self.running) + self.num_waiting_for_streaming_input

    def _in_order(self) -> Iterable[Request]:
        """Return the waiting requests in the order of service."""
        return self.waiting if self.waiting else ()  # a queue is false while none of its requests may start

    def schedule(self, *args: Any, **more: Any) -> SchedulerOutput:
        """Schedule a step with its lanes, and measure the time since the one before, in which that was computed."""
        now, (tokens, requests) = time.monotonic(), self._step_size
        if tokens:
            self._times.step(tokens, requests, now - self._stepped_at)
        before = {name: getattr(self, name) for name in LOWERED}
        self._prepare(self._lanes)
        try:
            output: SchedulerOutput = super().schedule(*args, **more)  # type: ignore[misc]
        finally:
            vars(self).update(before)
        self._stepped_at, self._step_size = now, (output.total_num_scheduled_tokens, len(output.num_scheduled_tokens))
        self._add_all(output, self._lanes)
        return output

    def _prepare(self, lanes: LaneGrants) -> None:
        """Have the next request judged, and grant lanes for this step."""
        if self.requests:
            self._base_share.computes()
        if not self.running and (first := next(iter(self._in_order()), None)):
            self.connector.ask_at_once(first)  # beside running requests a step costs it nothing
        if lanes.is_wanted:
            self._reserve(lanes)

    def _add_all(self, output: SchedulerOutput, lanes: LaneGrants) -> None:
        """Add the lanes of this step to what the base class has scheduled."""
        admitted, held = lanes.take()
        for request_id, holes in admitted.items():
            self._add_lanes(output, request_id, holes)
        for lane in held:
            if self.defer_block_free and not output.total_num_scheduled_tokens:
                self.sched_step_seq += 1  # vLLM numbers only the steps with tokens, to know when blocks are free again
            self._add(output, lane.tokens, lane.blocks, lane.span)

    def _reserve(self, lanes: LaneGrants) -> None:
        """Grant lanes, and leave their tokens and rows to them."""
        running = self._active
        rows = self.scheduler_config.max_num_seqs
        budget = LaneBudget(self.max_num_scheduled_tokens - running, rows - running)
        if self.pause_state is not PauseState.UNPAUSED:
            lanes.jobs.stop()
        budget = budget.less(*lanes.jobs.grant_ends(budget, len(self.running)))
        demand = 0  # of running requests, beyond a token each
        for one in self.running:
            wanted = one.num_tokens_with_spec + one.num_output_placeholders - one.num_computed_tokens
            demand += max(0, wanted - 1)
        taken = lanes.grant(self._in_order(), set(self.deferred_waiting), budget, demand)
        left = budget.less(*taken)
        left = left.less(*self._grant_base(lanes, left, demand))
        self.max_num_scheduled_tokens = left.tokens + running
        self.max_num_active_reqs = min(self.max_num_active_reqs, left.rows + running)

    def _grant_base(self, lanes: LaneGrants, left: LaneBudget, demand: int) -> LaneBudget:
        """Grant lanes to base prefills, of what lanes and running requests leave. One row is left to admissions, unless
        a request waits for a base prefill.
        """
        if not lanes.jobs:
            return LaneBudget(0, 0)
        first = next(iter(self._in_order()), None)
        awaited = -(-first.num_tokens // self.block_size) if first else 0
        budget = left.less(demand, 1 if first and not lanes.jobs.has_awaited else 0)
        prefill, idle = demand + (first.num_tokens if first else 0), not self.requests
        most = self._base_share.idle(budget.tokens) if idle else self._base_share.beside(prefill, budget.tokens)
        return lanes.jobs.grant(budget, len(self.running) + awaited, most=most, idle=idle)

    def _add_lanes(self, output: SchedulerOutput, request_id: str, lanes: Holes) -> None:
        """Schedule the lanes of a request that the base class has admitted, after it has finished its own books."""
        request = self.requests[request_id]
        (blocks,) = self.kv_cache_manager.get_block_ids(request_id)
        tokens = request.prompt_token_ids or []
        for lane in lanes:  # with one token more than it computes, so that the runner draws none
            self._add(output, tokens[: lane.stop + 1], blocks[: -(-lane.stop // self.block_size)], lane)
        self._count_as_computed(request, sum(map(len, lanes)))

    def _add(self, output: SchedulerOutput, tokens: list[int], blocks: list[int], lane: range) -> None:
        data = lane_data(next(self._lane_ids), tokens, blocks, lane, tokens if self.use_v2_model_runner else None)
        output.scheduled_new_reqs.append(data)
        output.num_scheduled_tokens[data.req_id] = len(lane)
        output.total_num_scheduled_tokens += len(lane)
        self.finished_req_ids.add(data.req_id)

    def _count_as_computed(self, request: Request, tokens: int) -> None:
        """Correct vLLM's statistics, in which all tokens before the last hole are external hits."""
        is_again = request.num_preemptions > 0
        if request.prefill_stats is not None and not is_again:
            request.prefill_stats.num_computed_tokens += tokens
            request.prefill_stats.num_cached_tokens -= tokens
            request.prefill_stats.num_external_cached_tokens -= tokens
        hits = self.connector_prefix_cache_stats
        if hits is not None and is_again:
            hits.preempted_hits -= tokens
        elif hits is not None:
            hits.hits -= tokens
            for source in (by_source := getattr(hits, "hits_by_source", {})):  # since 0.32
                by_source[source] -= tokens


class StepScheduler(KedgeScheduling, Scheduler):
    """vLLM's scheduler with lanes and with Kedge's order of waiting requests."""


class AsyncStepScheduler(KedgeScheduling, AsyncScheduler):
    """vLLM's scheduler that runs ahead of the device, with lanes and with Kedge's order of waiting requests."""


def lane_data(
    name: str, tokens: list[int], blocks: list[int], lane: range, prefill: list[int] | None
) -> NewRequestData:
    """Return a lane as the runner's new request, whose tokens end one behind it; `prefill` is for Model Runner V2."""
    return NewRequestData(
        req_id=name,
        prompt_token_ids=tokens,
        mm_features=[],
        sampling_params=_LANE_SAMPLING,
        pooling_params=None,
        block_ids=(blocks,),
        num_computed_tokens=lane.start,
        lora_request=None,
        prefill_token_ids=prefill,
    )


def scheduler_refusal() -> str | None:
    """Return the reason why Kedge's scheduler does not fit the installed vLLM, or None."""
    stored = {step.argval for step in dis.get_instructions(Scheduler.__init__) if step.opname == "STORE_ATTR"}
    used = (*KedgeScheduling.__annotations__, "schedule", "add_request", "_free_request")
    if missing := sorted(name for name in used if name not in stored and not hasattr(Scheduler, name)):
        return f"vLLM's Scheduler has no {', '.join(missing)}"
    if unread := [name for name in LOWERED if name not in Scheduler.schedule.__code__.co_names]:
        return f"vLLM's Scheduler.schedule does not read {', '.join(unread)}"
    try:
        lane_data("", [], [], range(0), [])
    except TypeError as error:
        return f"vLLM's NewRequestData differs: {error}"
    unknown = sorted(getattr(CachedFirstQueue, "__abstractmethods__", ()))
    return f"vLLM's queue of requests has a {', '.join(unknown)} that Kedge's has not" if unknown else None


def make_scheduler(vllm_config: VllmConfig, **parts: Any) -> Scheduler:
    """Return the scheduler that fits the configuration: vLLM's own without Kedge's connector, or with another one
    beside it. vLLM calls this as if it were a class.
    """
    is_async, transfer = vllm_config.scheduler_config.async_scheduling, vllm_config.kv_transfer_config
    is_alone = transfer is not None and transfer.kv_connector == NAME
    if refusal := scheduler_refusal() if is_alone else f"--kv-transfer-config does not name {NAME} alone":
        logger.warning("kedge: --scheduler-cls is vLLM's own: %s", refusal)
        return (AsyncScheduler if is_async else Scheduler)(vllm_config=vllm_config, **parts)
    chosen = AsyncStepScheduler if is_async else StepScheduler
    return chosen(vllm_config=vllm_config, **parts)
