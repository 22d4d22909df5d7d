"""Who is admitted when: in the order of service, with requests that step aside for a load, and fair between tenants: a
backlog is its owner's, and whoever comes beside it waits for a share of a pass at most.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kedge.engine.common.logprobs import LOGIT_ROWS
from kedge.engine.local.core import EngineCore
from kedge.engine.local.scheduler import FairQueue, Scheduler
from kedge.engine.local.sequence import RequestSequence, Work, flatten
from kedge.policies.service import PATIENCE
from kedge.reuse.costs import EngineCosts
from kedge.structures.bounded import ENTRIES
from kedge.types import FinishReason, GenerateRequest, Namespace, ReuseMode
from tests.engine.local.stepping import Stepped
from tests.engine.local.test_engine import prompt as tokens
from tests.engine.local.test_engine import request as exact_request

NEIGHBOUR, STRANGER = "neighbour", "stranger"
_ids = count()


def call(
    tenant: str = NEIGHBOUR,
    seed: int = 1,
    size: int = 60,
    answer: int = 8,
    reuse: ReuseMode = ReuseMode.EXACT,
    prompt_logprobs: int | None = None,
) -> GenerateRequest:
    """A tenant's call; every seed is another prompt."""
    space = Namespace.parse(tenant)
    return replace(
        exact_request(tokens(seed, size), reuse, max_tokens=answer), request_id=f"{seed}-{tenant}-{next(_ids)}",
        tenant=space.tenant, partition=space.partition, logprobs=0, prompt_logprobs=prompt_logprobs,
    )  # fmt: skip


def alone(request: GenerateRequest, **settings: object) -> RequestSequence:
    """The same call with an engine of its own."""
    engine = Stepped(**settings)
    sequence = engine.submit(request)
    engine.rest()
    return sequence


def of_tenant(work: list[Work], tenant: str) -> list[Work]:
    return [item for item in work if item.sequence.tenant == tenant]


def backlog(engine: Stepped, many: int = 64, steps: int = 6, **kind: int) -> list[RequestSequence]:
    """A neighbour's calls, of which the first ones run."""
    sequences = [engine.submit(call(seed=seed, **kind)) for seed in range(many)]
    engine.step(steps)
    return sequences


# a place --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_running", [1, 4, 16])
def test_a_tenants_first_call_is_admitted_in_the_next_pass_whoever_runs(max_running: int) -> None:
    engine = Stepped(max_running=max_running, kv_memory="512 blocks")
    backlog(engine, answer=50)
    assert len(engine.core.scheduler.running) == max_running
    sequence = engine.submit(call(STRANGER, seed=99, answer=4))
    engine.step()
    assert sequence in engine.core.scheduler.running
    assert [item.sequence for item in of_tenant(engine.passes[-1], STRANGER)] == [sequence]


def test_partitions_of_a_tenant_are_one_tenant() -> None:
    engine = Stepped(max_running=4, kv_memory="512 blocks")
    backlog(engine, answer=50)
    other = engine.submit(call(f"{NEIGHBOUR}/part", seed=99))
    first = engine.submit(call(f"{STRANGER}/a", seed=98, answer=50))
    second = engine.submit(call(f"{STRANGER}/b", seed=97))
    engine.step(5)
    assert [one.admitted for one in (other, first, second)] == [False, True, False]


def test_only_twice_as_many_run_however_many_tenants_come() -> None:
    engine = Stepped(max_running=3, kv_memory="512 blocks")
    backlog(engine, answer=50)
    for at in range(10):
        engine.submit(call(f"tenant-{at}", seed=90 + at, answer=50))
    for _ in range(5):
        engine.step()
        assert len(engine.core.scheduler.running) <= 6
    assert len(engine.core.scheduler.running) == 6


def test_no_order_of_all_that_wait_is_made_to_step_or_to_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    last = backlog(engine := Stepped(max_running=1), answer=50)[-1]
    monkeypatch.delattr(FairQueue, "__iter__")
    assert not engine.core.idle and engine.core.requests.cancel(last.request.request_id) and last.is_over


# a share of a pass ----------------------------------------------------------------------------------------------------


BUSY = pytest.mark.parametrize("neighbours", [{"size": 60, "answer": 50}, {"size": 500, "answer": 2}])


def beside(request: GenerateRequest, neighbours: dict[str, int]) -> tuple[Stepped, list[list[Work]], list[list[Work]]]:
    """An engine, the passes from a call's arrival under a backlog to its end, and those that it takes alone."""
    settings = {"max_running": 16, "kv_memory": "1024 blocks", "max_batch_tokens": 256}
    lone, engine = Stepped(**settings), Stepped(**settings)
    lone.serve(request)
    backlog(engine, **neighbours)
    before, sequence = len(engine.passes), engine.submit(request)
    engine.until(lambda: sequence.is_over)
    return engine, engine.passes[before:], lone.passes


def filling(engine: Stepped) -> float:
    """What one token of one more sequence adds to a pass."""
    return engine.core.parts.costs.added_seconds(1, 1)


@BUSY
@pytest.mark.parametrize(("size", "answer"), [(60, 4), (5, 1), (70, 12)])
def test_beside_a_backlog_a_short_call_takes_as_many_passes_as_alone_each_at_most_twice_as_long(
    size: int, answer: int, neighbours: dict[str, int]
) -> None:
    """But for what fills a pass up: one token of one sequence."""
    engine, passes, lone = beside(call(STRANGER, 99, size, answer), neighbours)
    own, filled = [engine.cost(of_tenant(work, STRANGER)) for work in passes], filling(engine)
    assert own == pytest.approx([engine.cost(work) for work in lone])
    assert all(engine.cost(work) <= 2 * mine + filled for work, mine in zip(passes, own, strict=True))


@BUSY
@pytest.mark.parametrize(("size", "answer"), [(300, 10), (900, 1)])
def test_beside_a_backlog_a_long_call_takes_at_most_twice_its_time_and_one_pass(
    size: int, answer: int, neighbours: dict[str, int]
) -> None:
    engine, passes, lone = beside(call(STRANGER, 99, size, answer), neighbours)
    alone, longest = sum(engine.cost(work) for work in lone), max(engine.cost(work) for work in passes)
    assert sum(engine.cost(work) for work in passes) <= 2 * alone + longest


def test_a_tenant_with_long_prompts_holds_up_nobodys_answers() -> None:
    engine = Stepped(max_batch_tokens=256, kv_memory="1024 blocks")
    short = [engine.submit(call(NEIGHBOUR, seed, answer=40)) for seed in range(2)]
    engine.until(lambda: all(one.first_token for one in short))
    engine.submit(call(STRANGER, 99, size=900))
    while not all(one.is_over for one in short):
        engine.step()
        mine = of_tenant(engine.passes[-1], NEIGHBOUR)
        assert len(mine) == sum(not one.is_over or one.last_pass == engine.core.scheduler.passes for one in short)
        assert engine.cost(engine.passes[-1]) <= 2 * engine.cost(mine) + filling(engine)
        assert of_tenant(engine.passes[-1], STRANGER), "which goes on all the while"


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_short_request_waits_for_no_long_prompts_of_its_tenant(prompts: int) -> None:
    engine = Stepped(max_batch_tokens=256, kv_memory="1024 blocks")
    long = [engine.submit(call(seed=seed, size=900)) for seed in range(prompts)]
    engine.step()
    short = [engine.submit(call(seed=50 + at, size=60)) for at in range(4)]
    engine.step()
    assert [bool(one.first_token) for one in short] == [True, True, False, False], "they take half of a pass"
    assert sum(len(item.positions) for item in engine.passes[-1] if item.sequence is long[0]) == 256 - 2 * 60
    engine.step()
    assert all(one.first_token for one in short) and not any(one.first_token for one in long)
    engine.rest()
    assert all(len(one.response) == 8 for one in (*long, *short))


def test_a_tenant_alone_fills_its_passes() -> None:
    engine = Stepped(max_batch_tokens=256, kv_memory="1024 blocks")
    for part in "ab":
        engine.submit(call(f"{NEIGHBOUR}/{part}", size=400))
    engine.step()
    assert sum(len(item.positions) for item in engine.passes[-1]) == 256


@pytest.mark.parametrize("num_blocks", [40, 1024])
def test_the_neighbour_does_not_starve(num_blocks: int) -> None:
    """Under a tenant that always has a call in flight, on a full pool, too."""
    engine = Stepped(max_running=4, kv_memory=f"{num_blocks} blocks")
    calls = backlog(engine, many=12)
    sequence, done = engine.submit(call(STRANGER, 99)), 0
    while not all(one.is_over for one in calls):
        engine.step()
        assert of_tenant(engine.passes[-1], NEIGHBOUR)
        assert len(engine.passes) < 1000
        if sequence.is_over:
            done += 1
            sequence = engine.submit(call(STRANGER, 100 + done))
    assert done >= 3
    assert all(len(one.response) == 8 for one in calls)


# a full pool ----------------------------------------------------------------------------------------------------------

ROOM = {"kv_memory": "26 blocks", "max_batch_tokens": 64}
"""For three calls as of `crowded`, but for no other one"""


def crowded(steps: int = 5, **kind: Any) -> tuple[Stepped, list[RequestSequence]]:
    """A neighbour's calls in an engine of their own, so many steps after the youngest, a long one, was admitted."""
    engine = Stepped(**ROOM)
    sequences = [engine.submit(call(seed=at, size=size, answer=20, **kind)) for at, size in enumerate((60, 60, 200))]
    engine.until(lambda: sequences[-1].admitted)
    engine.step(steps)
    assert engine.core.scheduler.running == sequences
    return engine, sequences


def logprobs(sequence: RequestSequence) -> list[tuple[int, float]]:
    """Of the prompt, then of the answer."""
    noted = (*sequence.logprobs.prompt, *sequence.logprobs.answer)
    return [(one.token, one.logprob) for one in noted if one is not None]


@pytest.mark.parametrize("reuse", [ReuseMode.OFF, ReuseMode.EXACT])
@pytest.mark.parametrize("steps", [0, 1, 2, 4, 8, 15])
@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_the_neighbours_youngest_call_steps_aside_and_ends_as_it_would_have_alone(
    steps: int, reuse: ReuseMode, prompt_logprobs: int | None
) -> None:
    """Whether it reads its prompt still or answers already."""
    engine, sequences = crowded(steps, reuse=reuse, prompt_logprobs=prompt_logprobs)
    youngest, answered = sequences[-1], list(sequences[-1].response)
    stranger = engine.submit(call(STRANGER, 99, reuse=reuse))
    engine.step()
    assert stranger in engine.core.scheduler.running
    assert list(engine.core.scheduler.preempted) == [youngest]
    assert youngest.response == answered, "what it has answered stays"
    engine.rest()
    for sequence in (*sequences, stranger):
        lone = alone(sequence.request)
        assert sequence.response == lone.response
        assert [token for token, _ in logprobs(sequence)] == [token for token, _ in logprobs(lone)]
        assert [value for _, value in logprobs(sequence)] == pytest.approx([v for _, v in logprobs(lone)], abs=1e-3)
    engine.learn()
    assert engine.leased == 0


def test_who_was_preempted_goes_on_before_later_calls_of_its_tenant() -> None:
    engine, (*_, youngest) = crowded()
    later = engine.submit(call(seed=50, size=200, answer=20))
    engine.submit(call(STRANGER, 99))
    engine.step()
    assert list(engine.core.scheduler.preempted) == [youngest]
    engine.until(lambda: later.admitted)
    assert youngest.admitted or youngest.is_over


def test_nobodys_only_call_is_preempted() -> None:
    engine = Stepped(kv_memory="16 blocks")
    only = engine.submit(call(size=200, answer=20))
    engine.until(lambda: only.first_token)
    stranger = engine.submit(call(STRANGER, 99))
    while not only.is_over:
        assert not stranger.admitted and not engine.core.scheduler.preempted
        engine.step()
    engine.rest()
    assert (only.response, stranger.response) == (alone(only.request).response, alone(stranger.request).response)


def test_a_tenant_takes_nothing_for_its_second_call() -> None:
    engine, _ = crowded()
    first = engine.submit(call(STRANGER, 98, answer=20))
    engine.step()
    second = engine.submit(call(STRANGER, 99, size=200))
    engine.step()
    assert (first.admitted, second.admitted, len(engine.core.scheduler.preempted)) == (True, False, 1)


def test_a_check_takes_no_blocks_of_others_and_gives_its_own_to_a_tenants_first_call() -> None:
    engine, _ = crowded()
    check = engine.sequence(call(STRANGER, 97, size=200))
    check.is_check = True
    engine.core.scheduler.add(check)
    engine.step()
    assert not check.admitted and not engine.core.scheduler.preempted
    engine.until(lambda: check.admitted)
    running = [engine.submit(call(seed=at, size=60, answer=20)) for at in (51, 52)]
    engine.until(lambda: running[-1].admitted)
    first = engine.submit(call(STRANGER, 99, size=100))
    engine.step()
    assert first.admitted and list(engine.core.scheduler.preempted) == [check], "of the same tenant, which has no other"
    engine.rest()
    assert all(one.response for one in (check, first, *running))


@pytest.mark.parametrize(
    "end",
    [lambda core, one: core.requests.cancel(one.request.request_id), lambda core, _: core.shut(None)],
    ids=["cancelled", "shut"],
)
def test_who_was_preempted_can_be_ended(end: Callable[[EngineCore, RequestSequence], object]) -> None:
    engine, (*_, youngest) = crowded(steps=8)
    engine.submit(call(STRANGER, 99))
    engine.step()
    answered = tuple(youngest.response)
    assert answered and youngest in engine.core.scheduler.preempted
    end(engine.core, youngest)
    done = youngest.stream.result(0)
    assert (done.finish_reason, done.tokens) == (FinishReason.CANCELLED, answered)
    engine.rest()
    engine.learn()
    assert engine.leased == 0


# with stand-ins for requests ------------------------------------------------------------------------------------------


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
    is_check: bool = False
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


@pytest.mark.parametrize(("tenants", "most"), [(1, 2), (8, 4)])
def test_only_so_many_step_aside_and_twice_as_many_where_each_is_its_tenants_first(tenants: int, most: int) -> None:
    world = World(loading=set("abcdefgh"))
    scheduler = scheduler_of(world, "", max_running=2)
    for number, name in enumerate("abcdefgh"):
        scheduler.add(cast(Any, Waiter(name, tenant=f"{number % tenants}")))
    scheduler.schedule()
    assert (len(scheduler.loading), len(scheduler.waiting), world.admitted) == (most, 8 - most, [])


def test_nobody_is_asked_for_whom_there_is_no_place() -> None:
    world = World()
    scheduler = scheduler_of(world, "abc", max_running=1)
    scheduler.schedule()
    assert (world.asked, names(scheduler.waiting)) == (["a"], "bc")


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


def test_prompts_are_assembled_ahead_beside_few_that_run_and_while_nobody_waits() -> None:
    """By the costs that are assumed at first, 32 tokens take as long as 32 sequences more in a pass."""
    scheduler = scheduler_of(World(), "")
    for running in range(20):
        assert scheduler.works_ahead == (running < 16)
        scheduler.running.append(cast(Any, Waiter("a", waits_for_first_token=False)))
    scheduler.running.clear()
    scheduler.add(cast(Any, Waiter("b")))
    assert not scheduler.works_ahead


TENANTS = [*"abcdef"]
COSTS = st.sampled_from([1, 2, 3, 64, 300])
"""Few enough tokens that all that waits is looked up at once"""


def test_memory_of_idle_tenants_is_bounded() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("stays", "a", 1)
    for number in range(3 * ENTRIES):
        queue.push(f"{number}", f"t{number}", 5 + number)
        queue.take(f"{number}")
        queue.charge(f"s{number}", number)
    assert len(queue._counters) <= ENTRIES and len(queue._queues) == 1
    assert list(queue) == queue.heads() == ["stays"]


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


class Twin:
    """The same discipline, written down as in the paper, with no thought of cost or memory."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = defaultdict(float)
        self.waiting: list[tuple[str, str, float]] = []
        self.numbers, self.pushed, self.first = dict[str, int](), Counter[str](), set[str]()
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

    def place(self, waiting: tuple[str, str, float]) -> tuple[bool, float, int]:
        """Whether others go first, then a number of arrival among the tenant's, and a slack for what is missing, which
        few arrivals go before.
        """
        item, tenant, _ = waiting
        slack = PATIENCE * sum(one[1] == tenant for one in self.waiting) * self.overloaded
        return item not in self.first, self.numbers[item] + slack * self.missing.get(item, 1.0), self.numbers[item]

    def heads(self) -> list[str]:
        heads = {one[1]: one for one in sorted(self.waiting, key=self.place, reverse=True)}.values()
        return [item for *_, item in sorted((self.counters[two], cost, int(one), one) for one, two, cost in heads)]

    def take(self, item: str) -> None:
        self.charge(*next(one[1:] for one in self.waiting if one[0] == item))
        self.remove(item)

    def order(self) -> list[str]:
        """The order of service, if nothing more comes."""
        rest, order = deepcopy(self), []
        rest.place = {one: self.place(one) for one in self.waiting}.__getitem__  # by as many as wait now
        while heads := rest.heads():
            order.append(heads[0])
            rest.take(heads[0])
        return order


class AgainstTheTwin(RuleBasedStateMachine):
    """Any history of calls leads to the same next item."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[str] = FairQueue(lambda item: self.twin.missing[item])
        self.twin = Twin()
        self.numbers, self.versions, self.told = count(), count(), list[str]()

    @rule(tenant=st.sampled_from(TENANTS), cost=COSTS, is_first=st.sampled_from([False, False, True]))
    def push(self, tenant: str, cost: int, is_first: bool) -> None:
        item = f"{next(self.numbers)}"
        self.queue.push(item, tenant, cost, is_first=is_first)
        self.twin.push(item, tenant, cost)
        self.twin.first |= {item} if is_first else set()

    @precondition(lambda self: self.twin.waiting)
    @rule()
    def take_the_next(self) -> None:
        self.take(self.twin.heads()[0])

    @precondition(lambda self: self.twin.waiting)
    @rule(data=st.data())
    def take_any(self, data: st.DataObject) -> None:
        self.take(data.draw(st.sampled_from(self.twin.waiting))[0])

    def take(self, item: str) -> None:
        self.queue.take(item)
        self.twin.take(item)

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
            shares = st.sampled_from([0.0, 0.25, 0.5, 1.0])  # no rounding: ties are ties
            self.twin.missing = {item: data.draw(shares) for item, *_ in self.twin.waiting}
        is_new = self.queue.arrange(next(self.versions), overloaded)
        assert is_new or list(self.queue) == before
        assert is_new or not overloaded or list(self.queue) == self.told
        self.told = list(self.queue) if overloaded else []

    @rule(tenant=st.sampled_from(TENANTS), tokens=COSTS)
    def charge(self, tenant: str, tokens: int) -> None:
        self.queue.charge(tenant, tokens)
        self.twin.charge(tenant, tokens)

    @invariant()
    def the_same_is_next(self) -> None:
        assert self.queue.heads() == self.twin.heads()
        assert list(self.queue) == self.twin.order() and len(self.queue) == len(self.twin.waiting)


TestAgainstTheTwin = AgainstTheTwin.TestCase


SMALL = {"kv_memory": "18 blocks", "max_running": 1}
"""Room for two contexts of `TURN` tokens and their answers, in blocks of 16"""
TURN = 128


def turn_of(seed: int, size: int = TURN, tenant: str = "tenant", reuse: ReuseMode = ReuseMode.EXACT) -> GenerateRequest:
    """A turn of the session `seed`, whose prompts begin alike."""
    return call(tenant, seed, size, answer=4, reuse=reuse)


def in_order(engine: Stepped) -> list[str]:
    return [one.request.request_id.split("-")[0] for one in engine.core.scheduler.waiting]


def held_up(**settings: Any) -> Stepped:
    """An engine that has served a turn of three sessions, where a call of one block runs and all others wait for it."""
    engine = Stepped(**{**SMALL, **settings})
    for seed in (1, 2, 3):
        engine.submit(turn_of(seed))
        engine.rest()
    running = engine.submit(turn_of(99, 8))
    engine.step()
    assert running.admitted and not running.is_over
    return engine


@pytest.mark.parametrize(("settings", "order"), [({}, ["3", "1"]), ({"kv_memory": "64 blocks"}, ["1", "3"])])
def test_under_overload_alone_who_is_cached_goes_before_who_was_evicted(settings: Any, order: list[str]) -> None:
    """In a small pool the KV of session 1 made room for that of session 3."""
    engine = held_up(**settings)
    for seed in (1, 3):
        engine.submit(turn_of(seed, TURN + 16))
    engine.core.scheduler.schedule()
    assert in_order(engine) == order
    engine.rest()
    assert engine.leased == 0


def test_who_was_evicted_is_not_passed_for_ever() -> None:
    """A session whose turns follow each other goes on while another one waits, but only so many times."""
    engine = held_up()
    evicted, passed = engine.submit(turn_of(1)), 0
    while not evicted.admitted:
        cached = engine.submit(turn_of(3))
        engine.until(lambda one=cached: one.is_over or evicted.admitted)
        passed += cached.is_over
    assert 1 <= passed <= 2 * 4, "with two waiting"


def test_what_waits_is_protected_by_its_place_in_the_order_of_service() -> None:
    engine = held_up()
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
        engine.step(rng.randrange(4))
        if number % 7 == 0:
            engine.core.requests.cancel(rng.choice(calls).request.request_id)
        service = engine.core.scheduler._service
        service.live.check_integrity()
    engine.rest()
    assert all(one.is_over for one in calls)
    assert not service.live and not engine.core.scheduler.waiting._queues


def test_every_pass_is_timed_until_its_result_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that ends no prompt: a GPU would else be at work on it in the time of the next."""
    engine, read, seen = Stepped(max_batch_tokens=16), list[int](), list[tuple[int, int]]()
    parts, item = engine.core.parts, torch.Tensor.item
    monkeypatch.setattr(parts.costs, "observe_pass", lambda count, *_: seen.append((count, len(read))))
    monkeypatch.setattr(torch.Tensor, "item", lambda one: (read.append(1), item(one))[1])
    engine.submit(call(size=40))
    engine.step(3)
    assert seen == [(16, 1), (16, 2), (8, 3)]


def test_the_positions_of_a_pass_are_sent_to_the_device_once() -> None:
    engine = Stepped()
    for seed in range(3):
        engine.submit(call(seed=seed))
    engine.step()
    batch = flatten(engine.passes[-1], engine.core.parts.storage)
    assert len(batch.sequences) == 3 and all(one.positions._base is batch.positions for one in batch.sequences)
