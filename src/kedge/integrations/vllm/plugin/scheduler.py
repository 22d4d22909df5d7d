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
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kedge.integrations.vllm.plugin.adapters import missing_attributes
from kedge.integrations.vllm.plugin.block_pools import cached_prefix
from kedge.integrations.vllm.plugin.connector import KedgeConnector
from kedge.integrations.vllm.plugin.hints import read_hints
from kedge.integrations.vllm.plugin.lanes import GapLanes
from kedge.policies.service import LiveContexts, ServiceOrder, StepTimes, may_start, missing_share
from kedge.types import ReuseMode

Cached = Callable[[Sequence[BlockHash]], tuple[int, int]]
"""Returns how many leading blocks of a prompt are on the device, and how many after them can be loaded"""
MayStart = Callable[[int, float], bool]
"""Returns whether a prompt of so many tokens, a share of which has to be computed, may start beside running requests"""
logger = logging.getLogger(__name__)
ORDER_ATTRIBUTES = (
    "block_size", "connector", "current_step", "kv_cache_manager", "policy", "requests", "running", "waiting",
    "schedule", "get_grammar_bitmask", "add_request", "_free_request",
)  # fmt: skip
"""What an order of requests needs of vLLM's scheduler"""
LAST_PRIORITY = 1 << 20
"""The priority of an agent that never runs according to its forecast."""


def missing_of(request: Request, cached: Cached) -> float:
    """Return the share of a request's full blocks that has to be computed."""
    hashes = request.block_hashes
    return missing_share(len(hashes), *cached(hashes)) if hashes else 1.0


class RequestContexts:
    """The live contexts of the requests in the engine, and of idle sessions."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._live = clock, LiveContexts()
        self._began: dict[str, tuple[Hashable, int]] = {}
        """Request id -> its session, and the tokens with which it began"""

    def __len__(self) -> int:
        """Return how many requests have begun and not ended."""
        return len(self._began)

    def began(self, request: Request, session: Hashable | None) -> None:
        """Take a request that has arrived, with its session if that is known; one that is queued again is ignored."""
        if request.request_id in self._began:
            return
        context = request.request_id if session is None else session
        self._began[request.request_id] = context, request.num_tokens
        self._live.began(context, request.num_tokens)

    def ended(self, request: Request) -> None:
        """Take the end of a request, however it ended; unknown ones are ignored."""
        context, began_with = self._began.pop(request.request_id, (None, 0))
        if context is None:
            return
        self._live.ended(context, began_with, request.num_tokens, self._clock())
        if context == request.request_id:  # no request can continue it
            self._live.forget(context)

    def tokens(self) -> int:
        """Return the tokens of all live contexts."""
        return self._live.tokens(self._clock())


class CachedFirstQueue(RequestQueue):
    """Waiting requests by `ServiceOrder`. Those that come back, preempted or skipped in a step, go before all others,
    as vLLM has it; what was peeked at is what is popped.
    """

    def __init__(
        self,
        cached: Cached,
        capacity: int,
        step: Callable[[], int],
        on_order: Callable[[Sequence[Request]], None] = lambda _: None,
        may_start: MayStart = lambda _tokens, _missing: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start empty. `capacity` is in tokens; `step` returns the number of the scheduler's step; `on_order` takes the
        requests in the order of service whenever that has changed while the live contexts do not fit, and `may_start`
        decides then about the first of them.
        """
        self._capacity, self._step, self._on_order, self._may_start = capacity, step, on_order, may_start
        self._ordered: list[Request] = []
        self.contexts = RequestContexts(clock)
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
    return LAST_PRIORITY if math.isinf(next_run.steps) else min(int(next_run.steps), LAST_PRIORITY)


class _Ordered:
    """A mixin that sets a request's priority before the request is queued, or replaces the queue that needs none."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        connector = self.connector  # type: ignore[attr-defined]
        manager = self.kv_cache_manager  # type: ignore[attr-defined]
        self._plugin = connector.join() if isinstance(connector, KedgeConnector) else None
        self._by_cache: CachedFirstQueue | None = None
        self._times, self._stepped_at, self._step_size = StepTimes(), 0.0, (0, 0)
        if self.policy is SchedulingPolicy.FCFS:  # type: ignore[attr-defined]
            pool = manager.block_pool
            cached = self._plugin.cached_blocks if self._plugin else lambda hashes: (cached_prefix(pool, hashes), 0)
            self._capacity = pool.num_gpu_blocks * self.block_size  # type: ignore[attr-defined]
            on_order = self._plugin.on_order if self._plugin else lambda _: None
            self._by_cache = CachedFirstQueue(
                cached,
                self._capacity,
                lambda: self.current_step,  # type: ignore[attr-defined]
                on_order,
                self._may_start,
            )
            self.waiting = self._by_cache

    def _may_start(self, tokens: int, missing: float) -> bool:
        """Return whether a prompt may start beside running requests, see `kedge.policies.service`."""
        returning = self._plugin.sessions.ledger.steps.tracker.returning if self._plugin else 0.0
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
        if self._plugin and self._plugin.upkeep.is_open:
            self._plugin.upkeep.run()
        return bitmask

    def add_request(self, request: Request) -> None:
        if self.policy is SchedulingPolicy.PRIORITY:  # type: ignore[attr-defined]
            request.priority = priority_of(request)  # reads hints, which takes longer than anything else here
        super().add_request(request)  # type: ignore[misc]
        if self._by_cache is not None and request.request_id in self.requests:  # type: ignore[attr-defined]
            session = self._plugin.sessions.session_of(request) if self._plugin else None
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
