"""The order of waiting requests, for vLLM with

    --scheduler-cls kedge.integrations.vllm.plugin.scheduler.make_scheduler

With `--scheduling-policy priority` it is that of their steps (KVFlow, section 3.3): a request without a priority of its
own gets its agent's steps-to-execution, and the agent that is due first goes first. With vLLM's default, `fcfs`, it is
that of arrival, and what is cached first while the live contexts do not fit the cache.
"""

from __future__ import annotations

import math
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kedge.integrations.vllm.plugin.hints import read_hints
from kedge.integrations.vllm.plugin.service_queue import CachedFirstQueue
from kedge.types import ReuseMode

LAST_PRIORITY = 1 << 20
"""The priority of an agent that never runs according to its forecast."""


def priority_of(request: Request) -> int:
    """Return the steps of the request's agent in its own forecast, rounded down, or else the request's priority."""
    tokens = tuple(request.prompt_token_ids or ())
    hinted = read_hints(request.request_id, tokens, request.cache_salt, request.kv_transfer_params, ReuseMode.EXACT)
    next_run = hinted.steps.get(hinted.request.agent) if hinted and hinted.steps else None
    if next_run is None or request.priority:
        return request.priority
    return LAST_PRIORITY if math.isinf(next_run.steps) else min(int(next_run.steps), LAST_PRIORITY)


class _Ordered:
    """A mixin that sets a request's priority before the request is queued, or replaces the queue that needs none."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self._by_cache: CachedFirstQueue | None = None
        if self.policy is SchedulingPolicy.FCFS:  # type: ignore[attr-defined]
            pool = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
            capacity = pool.num_gpu_blocks * self.block_size  # type: ignore[attr-defined]
            self.waiting = self._by_cache = CachedFirstQueue(pool, capacity, lambda: self.current_step)  # type: ignore[attr-defined]

    def add_request(self, request: Request) -> None:
        request.priority = priority_of(request)
        super().add_request(request)  # type: ignore[misc]

    def _free_request(self, request: Request, *args: Any, **more: Any) -> Any:
        if self._by_cache is not None:
            self._by_cache.contexts.ended(request)
        return super()._free_request(request, *args, **more)  # type: ignore[misc]


class StepScheduler(_Ordered, Scheduler):
    """vLLM's scheduler with Kedge's order of waiting requests."""


class AsyncStepScheduler(_Ordered, AsyncScheduler):
    """vLLM's scheduler that runs ahead of the device, with Kedge's order of waiting requests."""


def make_scheduler(vllm_config: VllmConfig, **parts: Any) -> Scheduler:
    """Return the scheduler that fits the configuration. vLLM calls this as if it were a class."""
    chosen = AsyncStepScheduler if vllm_config.scheduler_config.async_scheduling else StepScheduler
    return chosen(vllm_config=vllm_config, **parts)
