"""The order of waiting requests, and lanes (`lanes.py`), for vLLM with

    --scheduler-cls kedge.integrations.vllm.plugin.scheduler.make_scheduler

With `--scheduling-policy priority` it is that of their steps (KVFlow, section 3.3): a request without a priority of its
own gets its agent's steps-to-execution, and the agent that is due first goes first. With vLLM's default, `fcfs`, it is
that of arrival, and what is cached first while the live contexts do not fit the cache.
"""

import itertools
import logging
import math
import secrets
import sys
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import vllm
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from kedge.integrations.vllm.entry_point import NAME, is_plugged, version_refusal
from kedge.integrations.vllm.plugin.hints import read_hints
from kedge.integrations.vllm.plugin.lanes import LaneGrants
from kedge.policies.service import LiveContexts, ServiceOrder, StepTimes, may_start, missing_share
from kedge.reuse.holes import Holes
from kedge.reuse.lanes import LaneBudget
from kedge.reuse.learning import BaseShare
from kedge.types import ReuseMode

if TYPE_CHECKING:
    from kedge.integrations.vllm.plugin.scheduler_side import SchedulerSide

_LANE_SAMPLING = SamplingParams(max_tokens=1, temperature=0)
LOWERED = ("max_num_scheduled_tokens", "max_num_active_reqs")
"""Attributes of vLLM's scheduler that are lower while it schedules, by what lanes take"""
logger = logging.getLogger(__name__)


def priority_of(request: Request) -> int:
    """Return the steps of the request's agent in its own forecast, rounded down, or else the request's priority."""
    tokens = request.prompt_token_ids or ()
    hinted = read_hints(request.request_id, tokens, request.cache_salt, request.kv_transfer_params, ReuseMode.EXACT)
    next_run = hinted.steps.get(hinted.request.agent) if hinted and hinted.steps else None
    if next_run is None or request.priority:
        return request.priority
    return sys.maxsize if math.isinf(next_run.steps) else int(next_run.steps)  # the last one if it never runs


class StepScheduler(Scheduler):
    """vLLM's scheduler with lanes and with Kedge's order of waiting requests."""

    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self._plugin: SchedulerSide = self.connector
        self.connector.open_lanes(self._hold_back)
        self._lanes = self._plugin.translations.lanes
        if reasoner := self.structured_output_manager.reasoner_cls:
            self._plugin.translations.reasoner = reasoner(self.structured_output_manager.tokenizer)
        self._lane_ids = map(f"lane-{secrets.token_hex(16)}-{{}}".format, itertools.count())
        """Ids that no client can choose; a request that is preempted gets lanes with new ones"""
        self._times, self._stepped_at, self._step_size = StepTimes(), 0.0, (0, 0)
        self._base_share = BaseShare(self._times)
        self._capacity = self.kv_cache_manager.block_pool.num_gpu_blocks * self.block_size
        """Tokens"""
        self._contexts, self._was_overloaded = LiveContexts(), False
        self._order: ServiceOrder[Request] = ServiceOrder(self._missing)
        """Requests that have not run yet; none where vLLM goes by priority"""
        self._ordered: list[Request] = []
        """As they were passed on last"""

    # the order of waiting requests --------------------------------------------------------------------------------

    def _missing(self, request: Request) -> float:
        """Return the share of a request's full blocks that has to be computed."""
        hashes = request.block_hashes
        return missing_share(len(hashes), *self._plugin.cached_blocks(hashes)) if hashes else 1.0

    def _sort(self) -> list[Request]:
        """Put the waiting requests into the order of service: that of arrival while the live contexts fit. Those that
        come back, preempted or skipped in a step, stay before all others, as vLLM has it.

        Returns those that may not start in this step, which are taken out: the first that has to wait for running
        requests, and those behind it, or there would be no bound on how many pass it.
        """
        overloaded = bool(self._order) and self._contexts.tokens() > self._capacity
        was_overloaded, self._was_overloaded = self._was_overloaded, overloaded
        if not (overloaded or was_overloaded):
            return []
        waiting = list(self.waiting)
        back = [one for one in waiting if one not in self._order or one in self.deferred_waiting]
        others = set(waiting).difference(back)
        ordered = [*back, *filter(others.__contains__, self._order.order(self.current_step, overloaded))]
        if overloaded and ordered != self._ordered:
            self._ordered = ordered
            self._plugin.on_order(ordered)
        allowed = self._allowed(ordered, len(back)) if overloaded else len(ordered)
        self.waiting.remove_requests(waiting)
        for one in ordered[:allowed]:
            self.waiting.add_request(one)
        return ordered[allowed:]

    def _allowed(self, ordered: Sequence[Request], back: int) -> int:
        """Return how many of the requests may start beside running ones, see `kedge.policies.service`: the first `back`
        of them, and what follows up to one that may not.
        """
        running = sum(request.num_tokens for request in self.running)
        returning = self._plugin.sessions.ledger.tracker.returning
        for place, one in enumerate(ordered):
            missing = self._order.missing(one) if place >= back else 0.0
            if not may_start(one.num_tokens, missing, running, self._capacity, returning, self._times):
                return place
            running += one.num_tokens
        return len(ordered)

    def add_request(self, request: Request) -> None:
        if self.policy is SchedulingPolicy.PRIORITY:
            request.priority = priority_of(request)  # reads hints, which takes longer than anything else here
        super().add_request(request)
        if self.policy is SchedulingPolicy.FCFS and self.requests.get(request.request_id) is request:
            session = self._plugin.requests[request.request_id].session
            self._contexts.began(request.request_id, session, request.num_tokens)
            self._order.push(request, request.num_tokens)

    def _free_request(self, request: Request, *args: Any, **more: Any) -> Any:
        self._contexts.ended(request.request_id, request.num_tokens)
        self._leave(request)
        self._times.answered(request.num_output_tokens)
        return super()._free_request(request, *args, **more)

    def _leave(self, request: Request) -> None:
        if request in self._order:
            self._order.remove(request)

    # lanes --------------------------------------------------------------------------------------------------------

    def _hold_back(self) -> None:
        """Let no more requests run than run now."""
        self.max_num_active_reqs = self._active

    @property
    def _active(self) -> int:
        return len(self.running) + self.num_waiting_for_streaming_input

    def schedule(self, *args: Any, **more: Any) -> SchedulerOutput:
        """Schedule a step with its lanes, and measure the time since the one before, in which that was computed."""
        now, (tokens, requests) = time.monotonic(), self._step_size
        if tokens:
            self._times.step(tokens, requests, now - self._stepped_at)
        before, held_back = {name: getattr(self, name) for name in LOWERED}, self._sort()
        try:
            if self.requests:
                self._base_share.computes()
            self._judge()
            if (self.waiting or self._lanes.prefills) and self._lanes.is_wanted:
                self._reserve(self._lanes)
            output: SchedulerOutput = super().schedule(*args, **more)
        finally:
            self.__dict__.update(before)
            for one in held_back:
                self.waiting.add_request(one)
        for new in output.scheduled_new_reqs:
            self._leave(self.requests[new.req_id])
        self._stepped_at, self._step_size = now, (output.total_num_scheduled_tokens, len(output.num_scheduled_tokens))
        admitted, held = self._lanes.take()
        for request_id, holes in admitted.items():
            self._add_lanes(output, request_id, holes)
        for lane in held:
            if self.defer_block_free and not output.total_num_scheduled_tokens:
                self.sched_step_seq += 1  # vLLM numbers only the steps with tokens, to know when blocks are free again
            self._add(output, lane.tokens, lane.blocks, lane.span)
        return output

    def _judge(self) -> None:
        """Have the first request judged, and those with room behind it: nothing is learned while a verdict waits."""
        room = self.kv_cache_manager.block_pool.get_num_free_blocks() * self.block_size
        rows, tokens = self.max_num_active_reqs - self._active, self.max_num_scheduled_tokens - self._active
        able = self._plugin.translations.able = set[str]()
        for request in self.waiting:
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                room -= request.num_tokens
                if min(rows, tokens) <= 0 or (able and room < 0):
                    return
                able.add(request.request_id)
                self.connector.judge_at_once(request)
                live = self._plugin.requests[request.request_id]
                if not live.awaits:  # it may start; without a verdict it has no holes yet
                    rows, tokens = rows - max(1, len(live.holes)), tokens - sum(map(len, live.holes))

    def _reserve(self, lanes: LaneGrants) -> None:
        """Grant lanes, and leave their tokens and rows to them."""
        running = self._active
        rows = self.scheduler_config.max_num_seqs
        budget = LaneBudget(self.max_num_scheduled_tokens - running, rows - running)
        if self.pause_state is not PauseState.UNPAUSED:
            lanes.prefills.stop()
        demand = 0  # of running requests, beyond a token each
        for one in self.running:
            wanted = one.num_tokens_with_spec + one.num_output_placeholders - one.num_computed_tokens
            demand += max(0, wanted - 1)
        taken = lanes.grant(self.waiting, set(self.deferred_waiting), budget, demand)
        left = budget.less(*taken)
        left = left.less(*self._grant_base(lanes, left, demand))
        self.max_num_scheduled_tokens = left.tokens + running
        self.max_num_active_reqs = min(self.max_num_active_reqs, left.rows + running)

    def _grant_base(self, lanes: LaneGrants, left: LaneBudget, demand: int) -> LaneBudget:
        """Grant lanes to base prefills, of what lanes and running requests leave. One row is left to admissions, unless
        a request waits for a base prefill.
        """
        if not lanes.prefills:
            return LaneBudget(0, 0)
        first = next(iter(self.waiting), None)
        awaited = -(-first.num_tokens // self.block_size) if first else 0
        budget = left.less(demand, 1 if first and not lanes.prefills.has_awaited else 0)
        prefill, idle = demand + (first.num_tokens if first else 0), not self.requests
        most = self._base_share.idle(budget.tokens) if idle else self._base_share.beside(prefill, budget.tokens)
        return lanes.prefills.grant(budget, len(self.running) + awaited, most=most, idle=idle)

    def _add_lanes(self, output: SchedulerOutput, request_id: str, lanes: Holes) -> None:
        """Schedule the lanes of a request that the base class has admitted, after it has finished its own books."""
        request = self.requests[request_id]
        (blocks,) = self.kv_cache_manager.get_block_ids(request_id)
        tokens = array("q", request.prompt_token_ids or ())  # a runner copies 50 times as fast from it as from a list
        for lane in lanes:  # with one token more than it computes, so that the runner draws none
            self._add(output, tokens[: lane.stop + 1], blocks[: -(-lane.stop // self.block_size)], lane)
        self._count_as_computed(request, sum(map(len, lanes)))

    def _add(self, output: SchedulerOutput, tokens: Any, blocks: list[int], lane: range) -> None:
        """Schedule a lane as a new request of the runner's, whose tokens end one behind it."""
        data = NewRequestData(
            req_id=next(self._lane_ids),
            prompt_token_ids=tokens,
            mm_features=[],
            sampling_params=_LANE_SAMPLING,
            pooling_params=None,
            block_ids=(blocks,),
            num_computed_tokens=lane.start,
            lora_request=None,
            prefill_token_ids=tokens if self.use_v2_model_runner else None,
        )
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


class AsyncStepScheduler(StepScheduler, AsyncScheduler):
    """The same, ahead of the device."""


def make_scheduler(vllm_config: VllmConfig, **parts: Any) -> Scheduler:
    """Return the scheduler that fits the configuration: vLLM's own without Kedge's connector, or with another one
    beside it. vLLM calls this as if it were a class.
    """
    is_async, refusal = vllm_config.scheduler_config.async_scheduling, version_refusal(vllm.__version__)
    if not is_plugged(vllm_config):
        refusal = f"--kv-transfer-config does not name {NAME} alone"
    if refusal:
        logger.warning("kedge: --scheduler-cls is vLLM's own: %s", refusal)
        return (AsyncScheduler if is_async else Scheduler)(vllm_config=vllm_config, **parts)
    chosen = AsyncStepScheduler if is_async else StepScheduler
    return chosen(vllm_config=vllm_config, **parts)
