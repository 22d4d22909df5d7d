"""Who is admitted when: fair between tenants, in the order of service, with requests that step aside for a load."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kedge.engine.common.logprobs import LOGIT_ROWS
from kedge.engine.local.scheduler import FairQueue, Scheduler
from kedge.engine.local.sequence import RequestSequence
from kedge.policies.service import PATIENCE
from kedge.reuse.costs import EngineCosts
from kedge.structures.bounded import ENTRIES
from kedge.types import GenerateRequest, ReuseMode, TenantId
from tests.engine.local.stepping import Stepped
from tests.engine.local.test_fairness import STRANGER, call


@dataclass(eq=False)
class Waiter:
    """Of a sequence what the scheduler looks at."""

    name: str
    todo: list[int] = field(default_factory=lambda: [0])
    waits_for_first_token: bool = True
    needs_all_logits: bool = False
    tenant: str = "tenant"
    tokens: list[int] = field(default_factory=lambda: [0])
    is_over: bool = False
    last_pass: int = 0


@dataclass
class World:
    """Says who waits for a load, who finds room, and keeps the order of admissions."""

    loading: set[str] = field(default_factory=set)
    full: set[str] = field(default_factory=set)
    admitted: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def is_ready(self, request: Waiter) -> bool:
        self.asked.append(request.name)
        return request.name not in self.loading

    def admit(self, request: Waiter) -> bool:
        if request.name not in self.full:
            self.admitted.append(request.name)
        return request.name not in self.full


def scheduler_of(world: World, names: str, max_running: int = 16, budget: int = 64, **more: float) -> Scheduler:
    one: Any = world
    scheduler = Scheduler(one.admit, one.is_ready, EngineCosts(), budget, max_running, deque(), deque(), [], **more)
    for name in names:
        scheduler.add(cast(Any, Waiter(name)))
    return scheduler


def names(requests: object) -> str:
    return "".join(request.name for request in cast(Any, requests))


def test_a_pass_takes_fewer_tokens_behind_a_long_context() -> None:
    """Attending takes time, too: others would wait for a pass of seconds."""
    scheduler = scheduler_of(World(), "", reach=100.0)
    for name, context in ("a", 0), ("b", 300):
        scheduler.add(cast(Any, Waiter(name, [*range(context, context + 500)])))
        (work,) = [one for one in scheduler.schedule() if cast(Any, one.sequence).name == name]
        assert len(work.positions) == (64 if name == "a" else 16)
        scheduler.done(work.sequence)


def test_others_go_before_who_waits_for_a_load() -> None:
    world = World(loading={"a", "c"})
    scheduler = scheduler_of(world, "abcd")
    scheduler.schedule()
    assert (world.admitted, names(scheduler.loading), names(scheduler.unadmitted)) == (["b", "d"], "ac", "ac")
    world.loading = {"a"}
    scheduler.schedule()
    assert (world.admitted, names(scheduler.loading)) == (["b", "d", "c"], "a")
    assert not scheduler.idle and scheduler.someone_waits


def test_a_load_holds_up_the_queue_where_none_may_pass() -> None:
    world = World(loading={"b"})
    scheduler = scheduler_of(world, "abc")
    scheduler.lets_pass = False
    scheduler.schedule()
    assert (world.admitted, names(scheduler.unadmitted), names(scheduler.loading)) == (["a"], "bc", "")
    assert scheduler.someone_waits
    world.loading = set()
    scheduler.schedule()
    assert world.admitted == ["a", "b", "c"]


def test_who_has_loaded_goes_before_who_holds_nothing() -> None:
    world = World(loading={"b"}, full={"a"})
    scheduler = scheduler_of(world, "ba")
    scheduler.schedule()
    assert world.admitted == []
    scheduler.add(cast(Any, Waiter("c")))
    world.loading = set()
    scheduler.schedule()
    assert (world.admitted, names(scheduler.waiting)) == (["b"], "ac"), "c holds nothing either and came later"


def test_who_has_loaded_and_lacks_room_is_not_passed() -> None:
    world = World(loading={"a"})
    scheduler = scheduler_of(world, "a")
    scheduler.schedule()
    scheduler.add(cast(Any, Waiter("b")))
    world.loading, world.full = set(), {"a"}
    scheduler.schedule()
    assert world.admitted == []
    world.full = set()
    scheduler.schedule()
    assert world.admitted == ["a", "b"]


def test_only_so_many_step_aside() -> None:
    world = World(loading=set("abcd"))
    scheduler = scheduler_of(world, "abcdef", max_running=2)
    scheduler.schedule()
    assert (names(scheduler.loading), names(scheduler.waiting), world.admitted) == ("ab", "cdef", [])


def test_nobody_is_asked_for_whom_there_is_no_place() -> None:
    world = World()
    scheduler = scheduler_of(world, "abc", max_running=1)
    scheduler.schedule()
    assert (world.asked, names(scheduler.waiting)) == (["a"], "bc")


def test_done_takes_out_who_stepped_aside() -> None:
    world = World(loading={"a"})
    scheduler = scheduler_of(world, "a")
    scheduler.schedule()
    scheduler.done(scheduler.loading[0])
    assert scheduler.idle


def test_logits_of_whole_prompts_are_bounded_for_all_together_and_hold_nobody_up() -> None:
    scheduler = scheduler_of(World(), "abcd", budget=10_000)
    prompts = dict(zip("abcd", cast(Any, scheduler.waiting), strict=True))
    for name in "abd":
        prompts[name].todo, prompts[name].needs_all_logits = list(range(LOGIT_ROWS - 50)), True
    prompts["c"].todo = list(range(5000))
    work = {cast(Any, item.sequence).name: item for item in scheduler.schedule()}
    assert {name: len(item.positions) for name, item in work.items()} == {"a": LOGIT_ROWS - 50, "b": 50, "c": 5000}
    assert {name: item.logit_rows for name, item in work.items()} == {"a": LOGIT_ROWS - 50, "b": 50, "c": 1}


def test_a_tenants_first_request_is_held_up_neither_by_others_that_step_aside_nor_by_those_without_room() -> None:
    for world in (World(loading=set("bcd")), World(full=set("bcd"))):
        scheduler = scheduler_of(world, "abcd", max_running=2)
        scheduler.schedule()
        for name in "xy":
            scheduler.add(cast(Any, Waiter(name, tenant="another")))
        scheduler.schedule()
        assert world.admitted == ["a", "x"], "the second one is a request like any other"


def test_first_requests_step_aside_only_so_many_at_once() -> None:
    world = World(loading=set("abcdefgh"))
    scheduler = scheduler_of(world, "", max_running=2)
    for name in "abcdefgh":
        scheduler.add(cast(Any, Waiter(name, tenant=name)))
    scheduler.schedule()
    assert (len(scheduler.loading), world.admitted) == (4, [])


def test_prompts_are_assembled_ahead_beside_few_that_run_and_while_nobody_waits() -> None:
    """By the costs that are assumed at first, 32 tokens take as long as 32 sequences more in a pass."""
    scheduler = scheduler_of(World(), "")
    for running in range(20):
        assert scheduler.works_ahead == (running < 16)
        scheduler.running.append(cast(Any, Waiter("a", waits_for_first_token=False)))
    scheduler.running.clear()
    scheduler.add(cast(Any, Waiter("b")))
    assert not scheduler.works_ahead


A, B, C = map(TenantId, "abc")
TENANTS = [A, B, C, "d", "e", "f"]
COSTS = st.sampled_from([1, 2, 3, 64, 300])
"""Few enough tokens that all that waits is looked up at once"""


def served(queue: FairQueue[str]) -> list[str]:
    """Take what is next until nothing waits."""
    order = []
    while heads := queue.heads():
        queue.take(item := heads[0])
        order.append(item)
    return order


def test_memory_of_idle_tenants_is_bounded() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("stays", A, 1)
    for number in range(3 * ENTRIES):
        queue.push(f"{number}", f"t{number}", 5 + number)
        queue.take(f"{number}")
        queue.charge(f"s{number}", number)
    assert len(queue._counters) <= ENTRIES and len(queue._queues) == 1
    assert served(queue) == ["stays"]


# properties -----------------------------------------------------------------------------------------------------------

BACKLOG = st.lists(COSTS, min_size=1, max_size=40)


@given(st.lists(BACKLOG, min_size=2, max_size=5))
def test_backlogged_tenants_differ_by_no_more_than_one_item_each(backlogs: list[list[int]]) -> None:
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for tenant, costs in enumerate(backlogs):
        for number, cost in enumerate(costs):
            queue.push((tenant, number), f"t{tenant}", cost)
    bound = max(map(max, backlogs))
    received = [0] * len(backlogs)
    waiting = [len(costs) for costs in backlogs]
    while all(waiting):
        tenant, number = item = queue.heads()[0]
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
        self.numbers, self.pushed = dict[str, int](), Counter[str]()
        self.missing, self.overloaded, self.last = dict[str, float](), False, "nobody"

    def level(self) -> float:
        return min(self.counters[name] for name in {one[1] for one in self.waiting} or {self.last})

    def push(self, item: str, tenant: str, cost: float) -> None:
        if tenant not in {one[1] for one in self.waiting}:
            self.counters[tenant] = max(self.counters[tenant], self.level())
        self.waiting.append((item, tenant, cost))
        self.pushed[tenant] += 1
        self.numbers[item] = self.pushed[tenant]

    def remove(self, item: str) -> None:
        tenant = next(one[1] for one in self.waiting if one[0] == item)
        self.waiting = [one for one in self.waiting if one[0] != item]
        if tenant not in {one[1] for one in self.waiting}:
            self.last = tenant

    def charge(self, tenant: str, tokens: float) -> None:
        if tenant not in self.counters:
            self.counters[tenant] = self.level()
        self.counters[tenant] += tokens

    def place(self, waiting: tuple[str, str, float]) -> tuple[float, int]:
        """A number of arrival among the tenant's, and a slack for what is missing, which few arrivals go before."""
        item, tenant, _ = waiting
        slack = PATIENCE * sum(one[1] == tenant for one in self.waiting) * self.overloaded
        return self.numbers[item] + slack * self.missing.get(item, 1.0), self.numbers[item]

    def heads(self) -> list[str]:
        heads = {one[1]: one for one in sorted(self.waiting, key=self.place, reverse=True)}.values()
        return [item for *_, item in sorted((self.counters[two], cost, int(one), one) for one, two, cost in heads)]


class AgainstTheTwin(RuleBasedStateMachine):
    """Any history of calls leads to the same next item."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[str] = FairQueue(lambda item: self.twin.missing[item])
        self.twin = Twin()
        self.numbers, self.versions = count(), count()

    @rule(tenant=st.sampled_from(TENANTS), cost=COSTS)
    def push(self, tenant: TenantId, cost: int) -> None:
        item = f"{next(self.numbers)}"
        self.queue.push(item, tenant, cost)
        self.twin.push(item, tenant, cost)

    @precondition(lambda self: self.twin.waiting)
    @rule()
    def take_the_next(self) -> None:
        item = self.twin.heads()[0]
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
        self.queue.take(item, is_served=False)
        self.twin.remove(item)

    @rule(data=st.data(), overloaded=st.booleans())
    def arrange(self, data: st.DataObject, overloaded: bool) -> None:
        before, self.twin.overloaded = list(self.queue), overloaded
        if overloaded:
            shares = st.sampled_from([0.0, 0.2, 0.5, 1.0])
            self.twin.missing = {item: data.draw(shares) for item, *_ in self.twin.waiting}
        is_new = self.queue.arrange(next(self.versions), overloaded)
        assert is_new or list(self.queue) == before

    @rule(tenant=st.sampled_from(TENANTS), tokens=COSTS)
    def charge(self, tenant: TenantId, tokens: int) -> None:
        self.queue.charge(tenant, tokens)
        self.twin.charge(tenant, tokens)

    @invariant()
    def the_same_is_next(self) -> None:
        assert self.queue.heads() == self.twin.heads()
        assert len(self.queue) == len(self.twin.waiting)
        assert list(self.queue)[:1] == self.twin.heads()[:1]


TestAgainstTheTwin = AgainstTheTwin.TestCase


SMALL = {"kv_memory": "18 blocks", "max_running": 1}
"""Room for two contexts of `TURN` tokens and their answers, in blocks of 16"""
TURN = 128


def turn_of(seed: int, size: int = TURN, tenant: str = "tenant", reuse: ReuseMode = ReuseMode.EXACT) -> GenerateRequest:
    """A turn of the session `seed`, whose prompts begin alike."""
    return call(tenant, seed, size, answer=4, reuse=reuse)


def in_order(engine: Stepped) -> list[str]:
    return [one.request.request_id.split("-")[0] for one in engine.core.scheduler.waiting]


def serve_turn(engine: Stepped, seed: int) -> None:
    """Serve a turn of a session to its end."""
    engine.submit(turn_of(seed))
    engine.rest()


def held_up(engine: Stepped) -> RequestSequence:
    """Let a call of one block run, behind which all others wait."""
    running = engine.submit(turn_of(99, 8))
    engine.step()
    assert running.admitted and not running.is_over
    return running


def test_under_overload_who_is_cached_goes_before_who_was_evicted() -> None:
    engine = Stepped(**SMALL)
    for seed in (1, 2, 3):
        serve_turn(engine, seed)
    held_up(engine)
    for seed in (1, 3):
        engine.submit(turn_of(seed, TURN + 16))
    engine.core.scheduler.schedule()
    assert in_order(engine) == ["3", "1"], "the KV of session 1 made room for that of session 3"
    engine.rest()
    assert engine.leased == 0


def test_without_overload_the_order_is_that_of_arrival() -> None:
    engine = Stepped(kv_memory="64 blocks", max_running=1)
    serve_turn(engine, 3)
    held_up(engine)
    for seed in (1, 3):
        engine.submit(turn_of(seed, TURN + 16))
    engine.core.scheduler.schedule()
    assert in_order(engine) == ["1", "3"]


def test_who_was_evicted_is_not_passed_for_ever() -> None:
    """A session whose turns follow each other goes on while another one waits, but only so many times."""
    engine = Stepped(**SMALL)
    for seed in (1, 2, 3):
        serve_turn(engine, seed)
    held_up(engine)
    evicted, passed = engine.submit(turn_of(1)), 0
    while not evicted.admitted:
        cached = engine.submit(turn_of(3))
        engine.until(lambda one=cached: one.is_over or evicted.admitted)
        passed += cached.is_over
    assert 1 <= passed <= 2 * 4, "with two waiting"


def test_what_waits_is_protected_by_its_place_in_the_order_of_service() -> None:
    engine = Stepped(**SMALL)
    for seed in (1, 2, 3):
        serve_turn(engine, seed)
    held_up(engine)
    calls = {seed: engine.submit(turn_of(seed, TURN + 16)) for seed in (1, 2, 3)}
    engine.core.scheduler.schedule()
    assert in_order(engine)[-1] == "1"
    places = engine.core.parts.sessions.ledger._places
    assert in_order(engine) == [str(one) for one in sorted(calls, key=lambda one: places[calls[one].turn.session])]  # type: ignore[union-attr]


def test_thirty_two_sessions_of_two_tenants_on_a_small_pool_all_end() -> None:
    """With aborts and calls without reuse among them, and never out of its books."""
    rng, engine = Random(0), Stepped(kv_memory="40 blocks", max_running=3)
    calls = []
    for number in range(96):
        seed = rng.randrange(32)
        reuse = rng.choice([ReuseMode.EXACT, ReuseMode.EXACT, ReuseMode.OFF])
        tenant = STRANGER if seed % 4 == 0 else "tenant"
        request = turn_of(seed, rng.choice([40, 100, 160]), tenant, reuse)
        calls.append(engine.submit(request))
        for _ in range(rng.randrange(4)):
            engine.step()
        if number % 7 == 0:
            engine.core.requests.cancel(rng.choice(calls).request.request_id)
        service = engine.core.scheduler._service
        assert service is not None
        service.live.check_integrity()
    engine.rest()
    assert all(one.is_over for one in calls)
    assert not service.live and not engine.core.scheduler.waiting._queues
