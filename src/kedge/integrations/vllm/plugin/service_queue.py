"""vLLM's waiting requests in the order of service: what is cached first, while the live contexts do not fit the pool.

For the policy `fcfs` of vLLM's scheduler, whose order it keeps where all fits.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import chain, count

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from kedge.integrations.vllm.plugin.block_pools import cached_block
from kedge.policies.service import LiveContexts, ServiceOrder, missing_share
from kedge.policies.sessions.links import SessionLinks
from kedge.structures.bounded import BoundedDict
from kedge.types import Namespace, TenantId

MAX_SESSIONS = 4096
"""Sessions whose next request is recognised; the one that was active longest ago is forgotten first."""
SPACE = Namespace(TenantId("vllm"))
"""One namespace for all: a cache salt is in the blocks' hashes already."""


def missing_of(pool: BlockPool, request: Request) -> float:
    """Return the share of a request's full blocks that has to be computed. O(log blocks): of a prefix the first blocks
    are evicted last.
    """
    hashes = request.block_hashes
    cached = bisect_left(hashes, True, key=lambda one: cached_block(pool, one) is None)
    return missing_share(len(hashes), cached) if hashes else 1.0


class RequestContexts:
    """The live contexts of the requests in the engine, and of idle sessions, which are found by hashes of blocks."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._numbers = clock, count()
        self._live, self._links = LiveContexts(), SessionLinks()
        self._sizes: BoundedDict[Hashable, int] = BoundedDict(MAX_SESSIONS, lambda key, _: self._links.drop(key))
        """Blocks of each session after its last turn"""
        self._began: dict[str, tuple[Hashable, int]] = {}
        """Request id -> its session, and the tokens with which it began"""

    def __len__(self) -> int:
        """Return how many requests have begun and not ended."""
        return len(self._began)

    def began(self, request: Request) -> None:
        """Take a request that has arrived; one that is queued again is ignored."""
        if request.request_id in self._began:
            return
        found = self._links.find(SPACE, request.block_hashes)
        session = next(self._numbers) if found is None else found
        self._began[request.request_id] = session, request.num_tokens
        self._live.began(session, request.num_tokens)

    def ended(self, request: Request) -> None:
        """Take the end of a request, however it ended; unknown ones are ignored."""
        session, began_with = self._began.pop(request.request_id, (None, 0))
        if session is None:
            return
        self._live.ended(session, began_with, request.num_tokens, self._clock())
        blocks = len(request.block_hashes)
        self._links.put(session, SPACE, request.block_hashes, self._sizes.get(session, blocks - 1))
        self._sizes[session] = blocks

    def tokens(self) -> int:
        """Return the tokens of all live contexts."""
        return self._live.tokens(self._clock())


class CachedFirstQueue(RequestQueue):
    """Waiting requests by `ServiceOrder`. Those that come back, preempted or skipped in a step, go before all others,
    as vLLM has it; what was peeked at is what is popped.
    """

    def __init__(
        self, pool: BlockPool, capacity: int, step: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start empty. `capacity` is in tokens; `step` returns the number of the scheduler's step."""
        self._capacity, self._step = capacity, step
        self.contexts = RequestContexts(clock)
        self._order: ServiceOrder[Request] = ServiceOrder(partial(missing_of, pool))
        self._returned: deque[Request] = deque()
        self._head: Request | None = None

    def add_request(self, request: Request) -> None:
        self._order.push(request, request.num_tokens)
        self.contexts.began(request)

    def peek_request(self) -> Request:
        """Return the next request. Raises `IndexError` where none waits."""
        self._head = next(iter(self), None)
        if self._head is None:
            raise IndexError("no request waits")
        return self._head

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
        return len(self) > 0

    def __len__(self) -> int:
        return len(self._returned) + len(self._order)

    def __iter__(self) -> Iterator[Request]:
        overloaded = self.contexts.tokens() > self._capacity
        return chain(tuple(self._returned), tuple(self._order.order(self._step(), overloaded)))
