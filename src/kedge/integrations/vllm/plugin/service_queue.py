"""vLLM's waiting requests in the order of service: what is cached first, while the live contexts do not fit the pool.

For the policy `fcfs` of vLLM's scheduler, whose order it keeps where all fits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from kedge.policies.service import LiveContexts, ServiceOrder, missing_share

Cached = Callable[[Sequence[BlockHash]], tuple[int, int]]
"""Returns how many leading blocks of a prompt are on the device, and how many after them can be loaded"""
MayStart = Callable[[int, float], bool]
"""Returns whether a prompt of so many tokens, a share of which has to be computed, may start beside running requests"""


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
        return iter(self._arranged())

    def _arranged(self) -> list[Request]:
        """Return the requests in the order of service, and pass it on where it has changed."""
        overloaded = self._is_overloaded
        ordered = [*self._returned, *self._order.order(self._step(), overloaded)]
        if overloaded and ordered != self._ordered:
            self._ordered = ordered
            self._on_order(ordered)
        return ordered
