"""Lanes in vLLM's scheduler: holes in the middle of a prompt, computed in the pass in which its request is admitted.

vLLM takes external KV only as one run behind a computed prefix. So a request claims everything before its last hole
as external, and the base class schedules that hole. For each earlier one the runners are given a request of their own,
which the scheduler does not know: the same prompt and the same blocks, from the beginning of the hole to its end. Since
it ends before the prompt does, it is a chunk of a prefill, for which nothing is sampled. It is finished with the next
step.

In every layer a pass writes the keys and values of all its tokens before it attends, so a hole reads what the holes
before it compute in the same pass. vLLM itself relies on this for prefix hits within a batch.

Lanes of no running request compute the ends of answers that other agents read and base prefills
(`held_lanes.py`).
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from vllm.config import SchedulerConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request

from kedge.integrations.vllm.plugin.candidates import TranslationCandidate
from kedge.integrations.vllm.plugin.held_lanes import AnswerTails, BaseJobs
from kedge.integrations.vllm.plugin.learning_budget import BaseShare
from kedge.policies.service import StepTimes
from kedge.reuse.holes import Holes
from kedge.reuse.lanes import LaneBudget, WaitingPrompt, grant, lane_tokens

NO_LANES = "the scheduler grants none"
LANE_FIELDS = {
    "req_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "block_ids",
    "num_computed_tokens", "lora_request", "prefill_token_ids",
}  # fmt: skip
"""Fields of `NewRequestData` that a lane sets"""
LOWERED = ("max_num_scheduled_tokens", "max_num_active_reqs")
"""Attributes of vLLM's scheduler that are lower while it schedules, by what lanes take"""


class AdmittedLanes(NamedTuple):
    """The lanes of a request that was admitted in this step: all of its holes but the last."""

    request_id: str
    lanes: Holes


class LaneGrants:
    """The lanes of one scheduler's requests. Without `open`, no request gets any."""

    def __init__(self, candidates: Mapping[str, TranslationCandidate], tails: AnswerTails, bases: BaseJobs) -> None:
        """`candidates`: all requests that may be translated, by vLLM's ids. `tails` and `bases` get lanes too."""
        self._candidates, self.tails, self.bases = candidates, tails, bases
        self.max_lanes = 0
        self.base_share = 0.0
        """The share of a step's time that base prefills may take beside requests"""
        self._hold_back: Callable[[], None] = lambda: None
        self._granted: dict[str, Holes] = {}
        self._admitted: list[AdmittedLanes] = []

    def open(self, max_lanes: int, hold_back: Callable[[], None]) -> None:
        """Let requests have so many lanes each. `hold_back` ends the admissions of the step under way."""
        self.max_lanes, self._hold_back = max_lanes, hold_back

    @property
    def is_wanted(self) -> bool:
        """Whether lanes may be granted in this step: to a request, to the end of an answer or to a base prefill."""
        return self.tails.is_wanted or bool(self.bases) or self._has_gaps

    @property
    def _has_gaps(self) -> bool:
        return any(len(candidate.holes) > 1 for candidate in self._candidates.values())

    def grant_none(self) -> None:
        """Grant no lanes in this step, in which none are wanted."""
        self._granted = {}
        self.tails.take_granted()
        self.bases.take_granted()

    def grant(
        self, waiting: Iterable[Request], deferred: Collection[Request], budget: LaneBudget, demand: int
    ) -> LaneBudget:
        """Grant lanes for this step, see `kedge.reuse.lanes.grant`. Returns what they take.

        `waiting` are vLLM's requests in the order of service, of which `deferred` were not ready when last looked at.
        """
        self._granted = {}
        if self._has_gaps:
            self._granted = grant(self._prompts(waiting, deferred), budget, demand)
        rows = sum(len(holes) - 1 for holes in self._granted.values())
        return LaneBudget(sum(map(lane_tokens, self._granted.values())), rows)

    def _prompts(self, waiting: Iterable[Request], deferred: Collection[Request]) -> Iterator[WaitingPrompt]:
        for request in waiting:
            candidate = self._candidates.get(request.request_id)
            if candidate and len(candidate.holes) > 1:
                yield WaitingPrompt(request.request_id, request.num_tokens, candidate.holes, candidate.refusals)
            elif request not in deferred:
                yield WaitingPrompt(request.request_id, request.num_tokens)

    def holes_of(self, candidate: TranslationCandidate) -> Holes | None:
        """Return the holes to be computed if a request is admitted now; None where it has to wait for its lanes."""
        if len(candidate.holes) <= 1:
            return candidate.holes
        granted = self._granted.get(candidate.request.request_id)
        if granted is None:
            candidate.refusals += 1
            self._hold_back()
        return granted

    def admit(self, candidate: TranslationCandidate) -> None:
        """Take a request that is admitted with its planned holes."""
        candidate.holes = ()
        if len(candidate.planned) > 1:
            self._admitted.append(AdmittedLanes(candidate.request.request_id, candidate.planned[:-1]))

    @property
    def taken(self) -> LaneBudget:
        """What the lanes of this step take of it: of requests admitted in it, ends of answers and base prefills."""
        if not (self._admitted or self.tails.has_granted or self.bases.has_granted):
            return LaneBudget(0, 0)
        lanes = [lane for admitted in self._admitted for lane in admitted.lanes]
        parts = (LaneBudget(sum(map(len, lanes)), len(lanes)), self.tails.taken, self.bases.taken)
        return LaneBudget(*map(sum, zip(*parts, strict=True)))

    def take_admitted(self) -> list[AdmittedLanes]:
        """Return the lanes of the requests that were admitted since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted


class GapLanes:
    """A mixin of vLLM's scheduler, some of whose attributes it names. Without Kedge's connector it changes nothing."""

    _times: StepTimes
    block_size: int
    connector: Any
    connector_prefix_cache_stats: PrefixCacheStats | None
    defer_block_free: bool
    deferred_waiting: Collection[Request]
    finished_req_ids: set[str]
    kv_cache_manager: Any
    max_num_active_reqs: int
    max_num_scheduled_tokens: int
    num_waiting_for_streaming_input: int
    pause_state: PauseState
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
        """Let no more requests run than run now."""
        self.max_num_active_reqs = self._active

    @property
    def _active(self) -> int:
        return len(self.running) + self.num_waiting_for_streaming_input

    def _in_order(self) -> Iterable[Request]:
        """Return the waiting requests in the order of service."""
        return self.waiting if self.waiting else ()  # a queue is false while none of its requests may start

    def schedule(self, *args: Any, **more: Any) -> SchedulerOutput:
        if self._lanes is None:
            return super().schedule(*args, **more)  # type: ignore[misc]
        before = {name: getattr(self, name) for name in LOWERED}
        if self.requests:
            self._base_share.computes()
        if not self.running and (first := next(iter(self._in_order()), None)):
            self.connector.ask_at_once(first)  # beside running requests a step costs it nothing
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
            if self.defer_block_free and not output.total_num_scheduled_tokens:
                self.sched_step_seq += 1  # vLLM numbers only the steps with tokens, to know when blocks are free again
            self._add(output, lane.tokens, lane.blocks, lane.span)
        return output

    def _reserve(self, lanes: LaneGrants) -> None:
        """Grant lanes, and leave their tokens and rows to them."""
        running = self._active
        rows = self.scheduler_config.max_num_seqs
        budget = LaneBudget(self.max_num_scheduled_tokens - running, rows - running)
        is_paused = self.pause_state is not PauseState.UNPAUSED
        tails = lanes.tails.grant(LaneBudget(0, 0) if is_paused else budget, len(self.running))
        budget = budget.less(*tails)
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
        tokens = request.prompt_token_ids or []
        for lane in admitted.lanes:  # with one token more than it computes, so that the runner draws none
            self._add(output, tokens[: lane.stop + 1], blocks[: -(-lane.stop // self.block_size)], lane)
        self._count_as_computed(request, sum(map(len, admitted.lanes)))

    def _add(self, output: SchedulerOutput, tokens: list[int], blocks: list[int], lane: range) -> None:
        data = NewRequestData(
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


SCHEDULER_ATTRIBUTES = GapLanes.__annotations__.keys() - {"_times"}
"""Attributes of vLLM's scheduler that lanes use"""
