"""Weighted fair queueing by tokens between tenants.

Every tenant has a virtual counter of the tokens that it received, divided by its weight, and the tenant with the least
counter is next (VTC: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A returning tenant is
lifted to the least counter of those that wait, so that idle time earns no credit.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Generic, TypeVar

from kedge.errors import ConfigError, PlanError
from kedge.types import TenantId

MAX_IDLE_TENANTS = 1024
"""Counters of tenants without a waiting item that a priority class remembers."""
MAX_IDLE_CLASSES = 16
"""Priority classes without a waiting item that a queue remembers."""
NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})
T = TypeVar("T", bound=Hashable)


class FairQueue(Generic[T]):
    """The waiting items of many tenants: by priority (lower numbers first), fair by tokens within a priority, and first
    come, first served within a tenant, unless `arrange` is called. Items are hashable and distinct.

    Counters are kept per priority, so that service in one class does not affect another. Not thread-safe.
    """

    def __init__(self, weights: Mapping[str, float] = NO_WEIGHTS) -> None:
        """Create an empty queue; a tenant that `weights` does not name has weight 1. Raises `ConfigError`."""
        for tenant, weight in weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ConfigError(f"weights.{tenant}", weight, "must be a finite number above 0")
        self._weights = dict(weights)
        self._classes: dict[int, _PriorityClass[T]] = {}
        self._places: dict[T, tuple[int, TenantId]] = {}
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: object) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[T]:
        """Iterate over the items in the order of service, if each costs what it was pushed with and none comes.

        O(n log tenants) for all n items, and lazy: the first few cost little. The queue must not change meanwhile.
        """
        for priority in sorted(self._classes):
            yield from self._classes[priority].in_order()

    def peek(self) -> T | None:
        """Return the next item, or None. O(tenants + classes)."""
        waiting = [priority for priority, one in self._classes.items() if one.queues]
        return self._classes[min(waiting)].peek() if waiting else None

    def heads(self) -> list[T]:
        """Return the next item of every tenant in the first non-empty class, in the order of service.

        O(tenants log tenants + classes).
        """
        waiting = [priority for priority, one in self._classes.items() if one.queues]
        return self._classes[min(waiting)].heads() if waiting else []

    def push(self, item: T, tenant: TenantId, cost: float, priority: int = 0) -> None:
        """Add an item that will cost about `cost` tokens (above 0). O(1), or O(tenants) if its tenant was idle.

        Raises `PlanError` for a duplicate item or an invalid cost.
        """
        if item in self._places:
            raise PlanError("item", item, "waits already")
        if not cost > 0:
            raise PlanError("cost", cost, "must be above 0 tokens")
        self._class(priority).push(item, tenant, _Waiting(self._virtual(tenant, cost), next(self._arrivals)))
        self._places[item] = priority, tenant

    def take(self, item: T, tokens: float | None = None) -> None:
        """Remove an item to serve it, and charge its tenant `tokens`, by default the item's cost.

        Raises `PlanError` for an item that does not wait.
        """
        priority, owner = self._place(item)
        of_class = self._classes[priority]
        virtual = of_class.queues[owner][item].cost if tokens is None else self._virtual(owner, tokens)
        of_class.charge(owner, virtual)
        self.remove(item)

    def remove(self, item: T) -> None:
        """Remove an item without serving it, at no cost. Raises `PlanError` for an item that does not wait."""
        priority, owner = self._place(item)
        self._classes[priority].remove(item, owner)
        del self._places[item]

    def arrange(self, items: Sequence[T]) -> None:
        """Put waiting items before the others of their tenants and priorities, in this order. O(items).

        Raises `PlanError` for an item that does not wait.
        """
        for item in reversed(items):
            priority, owner = self._place(item)
            self._classes[priority].queues[owner].move_to_end(item, last=False)

    def charge(self, tenant: TenantId, tokens: float, priority: int = 0) -> None:
        """Charge a tenant for service beyond `take`, such as the tokens of an answer."""
        self._class(priority).charge(tenant, self._virtual(tenant, tokens))

    def _place(self, item: T) -> tuple[int, TenantId]:
        if item not in self._places:
            raise PlanError("item", item, "does not wait")
        return self._places[item]

    def _virtual(self, owner: TenantId, tokens: float) -> float:
        if not (math.isfinite(tokens) and tokens >= 0):
            raise PlanError("tokens", tokens, "must be a finite number of at least 0")
        return tokens / self._weights.get(owner, 1.0)

    def _class(self, priority: int) -> _PriorityClass[T]:
        if priority not in self._classes:
            idle = [number for number, one in self._classes.items() if not one.queues]
            for number in idle[: max(0, len(idle) + 1 - MAX_IDLE_CLASSES)]:
                del self._classes[number]
            self._classes[priority] = _PriorityClass()
        return self._classes[priority]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The sort key of a waiting item: its cost divided by its tenant's weight, and its arrival number."""

    cost: float
    arrival: int


class _PriorityClass(Generic[T]):
    """The waiting items of one priority and the virtual counters of their tenants."""

    def __init__(self) -> None:
        self.queues: dict[TenantId, OrderedDict[T, _Waiting]] = {}
        """Items by tenant, in the order of service; only tenants that have some"""
        self._active: dict[TenantId, float] = {}
        """Counters of the tenants in `queues`"""
        self._idle: dict[TenantId, float] = {}
        """Counters of other known tenants"""
        self._last: TenantId | None = None
        """The tenant that left last; its counter is the level for newcomers while no item waits"""
        self._level = 0.0

    def peek(self) -> T:
        return next(iter(self.queues[min(self.queues, key=self._rank)]))

    def heads(self) -> list[T]:
        return [next(iter(self.queues[tenant])) for tenant in sorted(self.queues, key=self._rank)]

    def in_order(self) -> Iterator[T]:
        """Iterate over the items as they would be served one after the other."""
        left = {tenant: iter(queue.items()) for tenant, queue in self.queues.items()}
        heads = {tenant: next(items) for tenant, items in left.items()}
        heap = [(*self._rank(tenant), tenant) for tenant in self.queues]
        heapq.heapify(heap)
        while heap:
            counter, cost, _, tenant = heap[0]
            yield heads[tenant][0]
            if following := next(left[tenant], None):
                heads[tenant] = following
                heapq.heapreplace(heap, (counter + cost, following[1].cost, following[1].arrival, tenant))
            else:
                heapq.heappop(heap)

    def push(self, item: T, tenant: TenantId, waiting: _Waiting) -> None:
        if tenant not in self.queues:
            self._active[tenant] = max(self._idle.pop(tenant, 0.0), self._least())
            self.queues[tenant] = OrderedDict()
        self.queues[tenant][item] = waiting

    def remove(self, item: T, tenant: TenantId) -> None:
        queue = self.queues[tenant]
        del queue[item]
        if not queue:
            del self.queues[tenant]
            self._last, self._level = tenant, self._active.pop(tenant)
            self._remember(tenant, self._level)

    def charge(self, tenant: TenantId, virtual: float) -> None:
        if tenant in self._active:
            self._active[tenant] += virtual
            return
        counter = self._idle.get(tenant, self._least()) + virtual
        self._remember(tenant, counter)
        if tenant == self._last:
            self._level = counter

    def _rank(self, tenant: TenantId) -> tuple[float, float, int]:
        """Return the rank of a tenant, least first: of equal counters the cheaper item, then the older one."""
        head = next(iter(self.queues[tenant].values()))
        return self._active[tenant], head.cost, head.arrival

    def _least(self) -> float:
        """Return the least counter of tenants that wait, to which newcomers are lifted."""
        return min(self._active.values()) if self._active else self._level

    def _remember(self, tenant: TenantId, counter: float) -> None:
        """Keep an idle tenant's counter; beyond the limit, forget those that would be lifted anyway, then the least."""
        self._idle[tenant] = counter
        if len(self._idle) > MAX_IDLE_TENANTS:
            level = self._least()
            self._idle = {one: value for one, value in self._idle.items() if value > level}
        if len(self._idle) > MAX_IDLE_TENANTS:
            del self._idle[min(self._idle, key=self._idle.__getitem__)]
