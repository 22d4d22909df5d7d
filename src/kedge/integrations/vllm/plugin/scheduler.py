"""Waiting requests in the order of their steps (KVFlow, section 3.3), for `--scheduling-policy priority`.

    --scheduling-policy priority --scheduler-cls kedge.integrations.vllm.plugin.scheduler.make_scheduler

A request that names no priority of its own gets its agent's steps-to-execution: who is due goes first.
"""

from __future__ import annotations

import math
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kedge.integrations.vllm.plugin.hints import read_call
from kedge.types import ReuseMode

LAST = 1 << 20
"""The priority of what never comes as far as its forecast knows."""


def priority_of(request: Request) -> int:
    """Steps of the request's agent by its own forecast, rounded down; its own priority where it says none."""
    tokens = tuple(request.prompt_token_ids or ())
    call = read_call(request.request_id, tokens, request.cache_salt, request.kv_transfer_params, ReuseMode.EXACT)
    next_run = call.steps.get(call.request.agent) if call and call.steps else None
    if next_run is None or request.priority:
        return request.priority
    return LAST if math.isinf(next_run.steps) else min(int(next_run.steps), LAST)


class _ByStep:
    """Sets the priority before the request is queued: afterwards it would be in the wrong place."""

    def add_request(self, request: Request) -> None:
        request.priority = priority_of(request)
        super().add_request(request)  # type: ignore[misc]


class StepScheduler(_ByStep, Scheduler):
    """vLLM's scheduler, by step."""


class AsyncStepScheduler(_ByStep, AsyncScheduler):
    """vLLM's scheduler that runs ahead of the device, by step."""


def make_scheduler(vllm_config: VllmConfig, **parts: Any) -> Scheduler:
    """The scheduler that fits the configuration; vLLM calls it as if it were a class."""
    chosen = AsyncStepScheduler if vllm_config.scheduler_config.async_scheduling else StepScheduler
    return chosen(vllm_config=vllm_config, **parts)
