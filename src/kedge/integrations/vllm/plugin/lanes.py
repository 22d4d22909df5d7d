"""Lanes in vLLM's scheduler: holes in the middle of a prompt, computed in the pass in which its request is admitted.

vLLM takes external KV only as one run behind a computed prefix. So a request claims everything before its last hole
as external, and the base class schedules that hole. For each earlier one the runners are given a request of their own,
which the scheduler does not know: the same prompt and the same blocks, from the beginning of the hole to its end. Since
it ends before the prompt does, it is a chunk of a prefill, for which nothing is sampled. It is finished with the next
step.

In every layer a pass writes the keys and values of all its tokens before it attends, so a hole reads what the holes
before it compute in the same pass. vLLM itself relies on this for prefix hits within a batch.

Lanes of no running request compute the ends of answers that other agents read (`answer_tails.py`) and base prefills
(`base_jobs.py`).
"""

from __future__ import annotations

import heapq
import itertools
import secrets
from collections.abc import Collection, Iterable
from typing import Any

from vllm.config import SchedulerConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request

from kedge.integrations.vllm.plugin.adapters import installed
from kedge.integrations.vllm.plugin.base_share import BaseShare
from kedge.integrations.vllm.plugin.held_blocks import HeldLane
from kedge.integrations.vllm.plugin.lane_grants import AdmittedLanes, LaneGrants
from kedge.policies.service import StepTimes
from kedge.reuse.lanes import LaneBudget

LANE_FIELDS = {
    "req_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "block_ids",
    "num_computed_tokens", "lora_request", "prefill_token_ids",
}  # fmt: skip
"""Fields of `NewRequestData` that a lane sets"""
LIMIT = installed().admission_limit
LOWERED = ("max_num_scheduled_tokens", LIMIT)
"""Attributes of vLLM's scheduler that are lower while it schedules, by what lanes take"""
SKIPPED = "skipped_waiting" if installed().skips_apart else "deferred_waiting"
"""The attribute of vLLM's scheduler with the waiting requests that were not ready when last looked at"""


class GapLanes:
    """A mixin of vLLM's scheduler, some of whose attributes it names. Without Kedge's connector it changes nothing."""

    _times: StepTimes
    block_size: int
    connector: Any
    connector_prefix_cache_stats: PrefixCacheStats | None
    defer_block_free: bool
    finished_req_ids: set[str]
    kv_cache_manager: Any
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
        open_lanes = getattr(self.connector, "open_lanes", None)
        self._lanes: LaneGrants | None = open_lanes(self._hold_back) if open_lanes else None
        self._lane_ids = map(f"lane-{secrets.token_hex(16)}-{{}}".format, itertools.count())
        """Ids that no client can choose; a request that is preempted gets lanes with new ones"""
        self._base_share = BaseShare(self._lanes.base_share if self._lanes else 0.0, self._times)
        self._lane_sampling = SamplingParams(max_tokens=1, temperature=0)

    def _hold_back(self) -> None:
        """Let no more requests run than run now: before 0.31, vLLM asserts that no more run than may."""
        setattr(self, LIMIT, self._active)

    @property
    def _active(self) -> int:
        return len(self.running) + self.num_waiting_for_streaming_input

    @property
    def _skipped(self) -> Collection[Request]:
        return getattr(self, SKIPPED)

    def _in_order(self) -> Iterable[Request]:
        """Return the waiting requests in the order of service."""
        waiting = self.waiting if self.waiting else ()  # a queue is false while none of its requests may start
        if not installed().skips_apart:
            return waiting
        if self.policy is SchedulingPolicy.PRIORITY:
            return heapq.merge(self._skipped, waiting)
        return itertools.chain(self._skipped, waiting)

    def schedule(self, *args: Any, **more: Any) -> SchedulerOutput:
        if self._lanes is None:
            return super().schedule(*args, **more)  # type: ignore[misc]
        before = {name: getattr(self, name) for name in LOWERED}
        if self.requests:
            self._base_share.computes()
        if self._lanes.is_wanted:
            self._reserve(self._lanes)
        else:
            self._lanes.grant_none()
        try:
            output: SchedulerOutput = super().schedule(*args, **more)  # type: ignore[misc]
        finally:
            vars(self).update(before)
        for admitted in self._lanes.take_admitted():
            self._add_lanes(output, admitted)
        for lane in (*self._lanes.tails.take_granted(), *self._lanes.bases.take_granted()):
            self._add_held(output, lane)
        return output

    def _reserve(self, lanes: LaneGrants) -> None:
        """Grant lanes, and leave their tokens and rows to them."""
        running = self._active
        rows = self.scheduler_config.max_num_seqs
        budget = LaneBudget(self.max_num_scheduled_tokens - running, rows - running)
        is_paused = self.pause_state is not PauseState.UNPAUSED
        tails = lanes.tails.grant(LaneBudget(0, 0) if is_paused else budget, len(self.running))
        budget = budget.less(*tails)
        demand = sum(max(0, _wanted(request) - 1) for request in self.running)
        taken = lanes.grant(self._in_order(), set(self._skipped), budget, demand)
        left = budget.less(*taken)
        left = left.less(*self._grant_base(lanes, left, demand))
        self.max_num_scheduled_tokens = left.tokens + running
        setattr(self, LIMIT, min(getattr(self, LIMIT), left.rows + running))

    def _grant_base(self, lanes: LaneGrants, left: LaneBudget, demand: int) -> LaneBudget:
        """Grant lanes to base prefills, of what lanes and running requests leave. One row is left to admissions, unless
        a request waits for a base prefill.
        """
        if self.pause_state is not PauseState.UNPAUSED:
            lanes.bases.stop()
        if not lanes.bases:
            return LaneBudget(0, 0)
        first = next(iter(self._in_order()), None)
        awaited = -(-first.num_tokens // self.block_size) if first else 0
        budget = left.less(demand, 1 if first and not lanes.bases.awaited else 0)
        prefill, idle = demand + (first.num_tokens if first else 0), not self.requests
        most = self._base_share.idle(budget.tokens) if idle else self._base_share.beside(prefill, budget.tokens)
        return lanes.bases.grant(budget, len(self.running) + awaited, most=most, idle=idle)

    def _add_lanes(self, output: SchedulerOutput, admitted: AdmittedLanes) -> None:
        """Schedule the lanes of a request that the base class has admitted, after it has finished its own books."""
        request = self.requests[admitted.request_id]
        (blocks,) = self.kv_cache_manager.get_block_ids(admitted.request_id)
        for lane in admitted.lanes:
            self._add(output, request.prompt_token_ids, blocks[: -(-lane.stop // self.block_size)], lane)
        self._count_as_computed(request, sum(map(len, admitted.lanes)))

    def _add_held(self, output: SchedulerOutput, lane: HeldLane) -> None:
        """Schedule a lane of no running request.

        vLLM numbers only the steps with tokens, by which it knows when blocks may be used again.
        """
        if self.defer_block_free and not output.total_num_scheduled_tokens:
            self.sched_step_seq += 1
        self._add(output, lane.tokens, lane.blocks, lane.span)

    def _add(self, output: SchedulerOutput, tokens: list[int] | None, blocks: list[int], lane: range) -> None:
        data = self._lane(tokens, blocks, lane)
        output.scheduled_new_reqs.append(data)
        output.num_scheduled_tokens[data.req_id] = len(lane)
        output.total_num_scheduled_tokens += len(lane)
        self.finished_req_ids.add(data.req_id)

    def _lane(self, tokens: list[int] | None, blocks: list[int], lane: range) -> NewRequestData:
        return NewRequestData(
            req_id=next(self._lane_ids),
            prompt_token_ids=tokens,
            mm_features=[],
            sampling_params=self._lane_sampling,
            pooling_params=None,
            block_ids=(blocks,),
            num_computed_tokens=lane.start,
            lora_request=None,
            prefill_token_ids=tokens if self.use_v2_model_runner else None,
        )

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


SCHEDULER_ATTRIBUTES = (GapLanes.__annotations__.keys() - {"_times"}) | {LIMIT, SKIPPED}
"""Attributes of vLLM's scheduler that lanes use"""


def _wanted(request: Request) -> int:
    """Return how many tokens a running request would take of a step."""
    return request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
