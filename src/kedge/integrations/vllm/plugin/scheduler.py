"""The order of waiting requests, and lanes (`lanes.py`), for vLLM with

    --scheduler-cls kedge.integrations.vllm.plugin.scheduler.make_scheduler

With `--scheduling-policy priority` it is that of their steps (KVFlow, section 3.3): a request without a priority of its
own gets its agent's steps-to-execution, and the agent that is due first goes first. With vLLM's default, `fcfs`, it is
that of arrival, and what is cached first while the live contexts do not fit the cache.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kedge.integrations.vllm.plugin.adapters import installed, missing_attributes
from kedge.integrations.vllm.plugin.block_pools import cached_prefix
from kedge.integrations.vllm.plugin.hints import read_hints
from kedge.integrations.vllm.plugin.lanes import GapLanes
from kedge.integrations.vllm.plugin.scheduler_calls import SchedulerCalls
from kedge.integrations.vllm.plugin.service_queue import CachedFirstQueue
from kedge.policies.service import StepTimes, may_start
from kedge.types import ReuseMode

logger = logging.getLogger(__name__)
ORDER_ATTRIBUTES = (
    "block_size", "connector", "current_step", "kv_cache_manager", "policy", "requests", "running", "waiting",
    "schedule", "get_grammar_bitmask", "add_request", "_free_request",
)  # fmt: skip
"""What an order of requests needs of vLLM's scheduler"""
LAST_PRIORITY = 1 << 20
"""The priority of an agent that never runs according to its forecast."""


def priority_of(request: Request) -> int:
    """Return the steps of the request's agent in its own forecast, rounded down, or else the request's priority."""
    tokens = request.prompt_token_ids or ()
    hinted = read_hints(request.request_id, tokens, request.cache_salt, request.kv_transfer_params, ReuseMode.EXACT)
    next_run = hinted.steps.get(hinted.request.agent) if hinted and hinted.steps else None
    if next_run is None or request.priority:
        return request.priority
    return LAST_PRIORITY if math.isinf(next_run.steps) else min(int(next_run.steps), LAST_PRIORITY)


class _Ordered:
    """A mixin that sets a request's priority before the request is queued, or replaces the queue that needs none."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        connector = self.connector  # type: ignore[attr-defined]
        self._plugin = connector if isinstance(connector, SchedulerCalls) else None
        if self._plugin:
            self._plugin.open_upkeep()
            if not installed().binds_manager:
                self._plugin.guard_cache(self.kv_cache_manager)  # type: ignore[attr-defined]
        self._by_cache: CachedFirstQueue | None = None
        self._times, self._stepped_at, self._step_size = StepTimes(), 0.0, (0, 0)
        if self.policy is SchedulingPolicy.FCFS:  # type: ignore[attr-defined]
            pool = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
            cached = self._plugin.cached_blocks if self._plugin else lambda hashes: (cached_prefix(pool, hashes), 0)
            self._capacity = pool.num_gpu_blocks * self.block_size  # type: ignore[attr-defined]
            on_order = self._plugin.on_order if self._plugin else lambda _: None
            self._by_cache = CachedFirstQueue(cached, self._capacity, self._step, on_order, self._may_start)
            self.waiting = self._by_cache

    def _step(self) -> int:
        return self.current_step  # type: ignore[attr-defined]

    def _may_start(self, tokens: int, missing: float) -> bool:
        """Return whether a prompt may start beside running requests, see `kedge.policies.service`."""
        returning = self._plugin.returning if self._plugin else 0.0
        running = sum(request.num_tokens for request in self.running)  # type: ignore[attr-defined]
        return may_start(tokens, missing, running, self._capacity, returning, self._times)

    def schedule(self, *args: Any, **more: Any) -> SchedulerOutput:
        """Schedule a step, and measure the time since the one before, in which that was computed."""
        now, (tokens, requests) = time.monotonic(), self._step_size
        if tokens:
            self._times.step(tokens, requests, now - self._stepped_at)
        output: SchedulerOutput = super().schedule(*args, **more)  # type: ignore[misc]
        self._stepped_at, self._step_size = now, (output.total_num_scheduled_tokens, len(output.num_scheduled_tokens))
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Any:
        """Return what vLLM's own does: it is called once the workers compute a step, and vLLM waits for them next."""
        bitmask = super().get_grammar_bitmask(scheduler_output)  # type: ignore[misc]
        if self._plugin:
            self._plugin.keep_up()
        return bitmask

    def add_request(self, request: Request) -> None:
        if self.policy is SchedulingPolicy.PRIORITY:  # type: ignore[attr-defined]
            request.priority = priority_of(request)  # reads hints, which takes longer than anything else here
        super().add_request(request)  # type: ignore[misc]
        if self._by_cache is not None and request.request_id in self.requests:  # type: ignore[attr-defined]
            session = self._plugin.session_of(request) if self._plugin else None
            self._by_cache.contexts.began(request, session)

    def _free_request(self, request: Request, *args: Any, **more: Any) -> Any:
        if self._by_cache is not None:
            self._by_cache.contexts.ended(request)
        self._times.answered(request.num_output_tokens)
        return super()._free_request(request, *args, **more)  # type: ignore[misc]


class StepScheduler(GapLanes, _Ordered, Scheduler):
    """vLLM's scheduler with lanes and with Kedge's order of waiting requests."""


class AsyncStepScheduler(GapLanes, _Ordered, AsyncScheduler):
    """vLLM's scheduler that runs ahead of the device, with lanes and with Kedge's order of waiting requests."""


def order_refusal() -> str | None:
    """Return the reason why the installed vLLM's scheduler cannot be given an order of requests, or None."""
    if missing := missing_attributes(Scheduler, ORDER_ATTRIBUTES):
        return f"vLLM's Scheduler has no {', '.join(missing)}"
    unknown = sorted(getattr(CachedFirstQueue, "__abstractmethods__", ()))
    return f"vLLM's queue of requests has a {', '.join(unknown)} that Kedge's has not" if unknown else None


def make_scheduler(vllm_config: VllmConfig, **parts: Any) -> Scheduler:
    """Return the scheduler that fits the configuration. vLLM calls this as if it were a class."""
    is_async = vllm_config.scheduler_config.async_scheduling
    if refusal := order_refusal():
        logger.warning("kedge: --scheduler-cls is vLLM's own: %s", refusal)
        return (AsyncScheduler if is_async else Scheduler)(vllm_config=vllm_config, **parts)
    chosen = AsyncStepScheduler if is_async else StepScheduler
    return chosen(vllm_config=vllm_config, **parts)
