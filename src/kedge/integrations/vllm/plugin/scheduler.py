"""Waiting requests in the order of their steps (KVFlow, section 3.3), for `--scheduling-policy priority`.

    --scheduling-policy priority --scheduler-cls kedge.integrations.vllm.plugin.scheduler.make_scheduler

A request without a priority of its own gets its agent's steps-to-execution: the agent that is due first goes first.
"""

from __future__ import annotations

import math
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kedge.integrations.vllm.plugin.hints import read_hints
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


class _StepPriority:
    """A mixin that sets a request's priority before the request is queued."""

    def add_request(self, request: Request) -> None:
        request.priority = priority_of(request)
        super().add_request(request)  # type: ignore[misc]


class StepScheduler(_StepPriority, Scheduler):
    """vLLM's scheduler with priorities by step."""


class AsyncStepScheduler(_StepPriority, AsyncScheduler):
    """vLLM's scheduler that runs ahead of the device, with priorities by step."""


def make_scheduler(vllm_config: VllmConfig, **parts: Any) -> Scheduler:
    """Return the scheduler that fits the configuration. vLLM calls this as if it were a class."""
    chosen = AsyncStepScheduler if vllm_config.scheduler_config.async_scheduling else StepScheduler
    return chosen(vllm_config=vllm_config, **parts)
