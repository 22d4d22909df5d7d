"""Fair queueing between tenants: order, the bound on what one tenant is ahead of another, and no credit for idling."""

from __future__ import annotations

from collections import defaultdict
from itertools import count
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kedge.engine.local.scheduler import FairQueue
from kedge.structures.bounded import ENTRIES
from kedge.types import TenantId

A, B, C = map(TenantId, "abc")
TENANTS = [A, B, C, TenantId("d"), TenantId("e"), TenantId("f")]
COSTS = st.sampled_from([1, 2, 3, 64, 500])


def peek(queue: FairQueue[Any]) -> Any:
    """Return the next item, or None."""
    return next(iter(queue.heads()), None)


def served(queue: FairQueue[str]) -> list[str]:
    """Take what is next until nothing waits."""
    order = []
    while item := peek(queue):
        queue.take(item)
        order.append(item)
    return order


def test_the_heads_are_every_tenants_next_item_in_the_order_of_service() -> None:
    queue: FairQueue[str] = FairQueue()
    assert queue.heads() == []
    for tenant, name, cost in ((A, "a0", 500), (A, "a1", 1), (B, "b0", 30), (C, "c0", 7)):
        queue.push(name, tenant, cost)
    assert queue.heads() == ["c0", "b0", "a0"]
    queue.take("c0")
    assert queue.heads() == ["b0", "a0"]
    queue.charge(B, 100)
    assert queue.heads() == ["a0", "b0"]


def test_memory_of_idle_tenants_is_bounded() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("stays", A, 1)
    for number in range(3 * ENTRIES):
        queue.push(f"{number}", TenantId(f"t{number}"), 5 + number)
        queue.take(f"{number}")
        queue.charge(TenantId(f"s{number}"), number)
    assert len(queue._counters) <= ENTRIES and len(queue._queues) == 1
    assert served(queue) == ["stays"]


# properties -----------------------------------------------------------------------------------------------------------

BACKLOG = st.lists(COSTS, min_size=1, max_size=40)


@given(st.lists(BACKLOG, min_size=2, max_size=5))
def test_backlogged_tenants_differ_by_no_more_than_one_item_each(backlogs: list[list[int]]) -> None:
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for tenant, costs in enumerate(backlogs):
        for number, cost in enumerate(costs):
            queue.push((tenant, number), TenantId(f"t{tenant}"), cost)
    bound = max(map(max, backlogs))
    received = [0] * len(backlogs)
    waiting = [len(costs) for costs in backlogs]
    while all(waiting):
        tenant, number = item = peek(queue) or (0, 0)
        queue.take(item)
        received[tenant] += backlogs[tenant][number]
        waiting[tenant] -= 1
        assert max(received) - min(received) <= bound


@given(st.lists(st.tuples(st.sampled_from(TENANTS), COSTS), max_size=40))
def test_iteration_foretells_the_order_of_service(pushed: list[tuple[TenantId, int]]) -> None:
    queue: FairQueue[str] = FairQueue()
    for number, (tenant, cost) in enumerate(pushed):
        queue.push(f"{number}", tenant, cost)
    foretold = list(queue)
    assert foretold == served(queue)
    assert len(foretold) == len(pushed)


class Twin:
    """The same discipline, written down as in the paper, with no thought of cost or memory."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = defaultdict(float)
        self.waiting: list[tuple[str, str, float]] = []
        self.last = "nobody"

    def level(self) -> float:
        return min(self.counters[name] for name in {one[1] for one in self.waiting} or {self.last})

    def push(self, item: str, tenant: str, cost: float) -> None:
        if tenant not in {one[1] for one in self.waiting}:
            self.counters[tenant] = max(self.counters[tenant], self.level())
        self.waiting.append((item, tenant, cost))

    def remove(self, item: str) -> None:
        tenant = next(one[1] for one in self.waiting if one[0] == item)
        self.waiting = [one for one in self.waiting if one[0] != item]
        if tenant not in {one[1] for one in self.waiting}:
            self.last = tenant

    def charge(self, tenant: str, tokens: float) -> None:
        if tenant not in self.counters:
            self.counters[tenant] = self.level()
        self.counters[tenant] += tokens

    def arrange(self, items: list[str]) -> None:
        places = {item: at - len(items) for at, item in enumerate(items)}
        self.waiting.sort(key=lambda one: places.get(one[0], 0))

    def next(self) -> str | None:
        heads = {one[1]: one for one in reversed(self.waiting)}.values()
        ranked = ((self.counters[tenant], cost, int(item), item) for item, tenant, cost in heads)
        return min(ranked)[-1] if self.waiting else None


class AgainstTheTwin(RuleBasedStateMachine):
    """Any history of calls leads to the same next item."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[str] = FairQueue()
        self.twin = Twin()
        self.numbers = count()

    @rule(tenant=st.sampled_from(TENANTS), cost=COSTS)
    def push(self, tenant: TenantId, cost: int) -> None:
        item = f"{next(self.numbers)}"
        self.queue.push(item, tenant, cost)
        self.twin.push(item, tenant, cost)

    @precondition(lambda self: self.twin.waiting)
    @rule()
    def take_the_next(self) -> None:
        item = self.twin.next()
        self.take(next(one for one in self.twin.waiting if one[0] == item))

    @precondition(lambda self: self.twin.waiting)
    @rule(data=st.data())
    def take_any(self, data: st.DataObject) -> None:
        self.take(data.draw(st.sampled_from(self.twin.waiting)))

    def take(self, waiting: tuple[str, str, float]) -> None:
        item, tenant, cost = waiting
        self.queue.take(item)
        self.twin.charge(tenant, cost)
        self.twin.remove(item)

    @precondition(lambda self: self.twin.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.twin.waiting))[0]
        self.queue.remove(item)
        self.twin.remove(item)

    @rule(data=st.data())
    def arrange(self, data: st.DataObject) -> None:
        waiting = [one[0] for one in self.twin.waiting]
        items = data.draw(st.permutations(waiting))[: data.draw(st.integers(0, len(waiting)))]
        self.queue.arrange(items)
        self.twin.arrange(items)

    @rule(tenant=st.sampled_from(TENANTS), tokens=COSTS)
    def charge(self, tenant: TenantId, tokens: int) -> None:
        self.queue.charge(tenant, tokens)
        self.twin.charge(tenant, tokens)

    @invariant()
    def the_same_is_next(self) -> None:
        assert peek(self.queue) == self.twin.next()
        assert len(self.queue) == len(self.twin.waiting)
        assert next(iter(self.queue), None) == self.twin.next()


TestAgainstTheTwin = AgainstTheTwin.TestCase
