"""The order of service of every tenant's waiting requests, by what of their prompts is cached."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from kedge.cache import CacheManager
from kedge.engine.local.fair_queue import FairQueue
from kedge.engine.local.sequence import RequestSequence
from kedge.engine.local.sessions import SessionCaching
from kedge.policies.service import LiveContexts, ServiceOrder, missing_share
from kedge.types import TenantId


class ServiceOrders:
    """One `ServiceOrder` per tenant with waiting requests. It applies while the live contexts do not fit the device.

    A pass in which nothing has changed costs O(tenants that wait).
    """

    def __init__(
        self, cache: CacheManager, sessions: SessionCaching, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start empty. `sessions` protects what waits by its place; `clock` is in seconds."""
        self._cache, self._sessions, self._clock = cache, sessions, clock
        self._capacity = cache.num_blocks * cache.block_size
        self._orders: dict[TenantId, ServiceOrder[RequestSequence]] = {}
        self._arranged: dict[TenantId, list[RequestSequence]] = {}
        self._live = LiveContexts()
        self._began: dict[RequestSequence, tuple[Hashable, int]] = {}
        """The sessions of the requests in the engine, and the tokens with which they began"""

    @property
    def overloaded(self) -> bool:
        """Whether the live contexts need more than the device tier has."""
        return self._live.tokens(self._clock()) > self._capacity

    def arrived(self, sequence: RequestSequence) -> None:
        """Take a request that waits from now on."""
        session = sequence.turn.session if sequence.turn else sequence.key
        tokens = len(sequence.tokens)
        self._orders.setdefault(sequence.tenant, ServiceOrder(self._missing)).push(sequence, tokens)
        self._began[sequence] = session, tokens
        self._live.began(session, tokens)

    def left(self, sequence: RequestSequence) -> None:
        """Take note that a request is admitted, steps aside to be loaded, or has ended."""
        order = self._orders.get(sequence.tenant)
        if order is None or sequence not in order:
            return
        order.remove(sequence)
        self._arranged.pop(sequence.tenant, None)
        if not order:
            del self._orders[sequence.tenant]

    def ended(self, sequence: RequestSequence) -> None:
        """Take note that a request has ended, at whatever stage. Requests that never arrived are ignored."""
        if sequence not in self._began:
            return
        self.left(sequence)
        session, tokens = self._began.pop(sequence)
        self._live.ended(session, tokens, len(sequence.tokens), self._clock())
        if sequence.turn is None:  # no request can continue it
            self._live.forget(session)

    def arrange(self, queue: FairQueue[RequestSequence]) -> None:
        """Arrange the waiting requests of every tenant, and protect them by their places where that matters."""
        overloaded, changed = self.overloaded, False
        for tenant, waiting in self._orders.items():
            order = waiting.order(self._cache.version, overloaded)
            arranged = self._arranged.get(tenant)
            if order is not arranged and order != arranged:
                queue.arrange(order)
                self._arranged[tenant] = order
                changed = True
        if changed and overloaded:
            self._sessions.waiting([one.turn for one in queue if one.turn])

    def check_integrity(self) -> None:
        """Raise `PlanError` unless the live contexts add up."""
        self._live.check_integrity()

    def _missing(self, sequence: RequestSequence) -> float:
        """Return the share of a prompt that would have to be computed; translation is not foreseen."""
        total = len(sequence.tokens)
        if (prepared := sequence.preparation) and prepared.admitted:
            return missing_share(total, prepared.ready)
        status = self._cache.status(sequence.namespace, sequence.tokens[: sequence.exact_limit])
        return missing_share(total, status.device_tokens, status.host_tokens)
