"""Who is admitted when, with requests that step aside for a load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from kedge.engine.common.logprobs import LOGIT_ROWS
from kedge.engine.local.scheduler import Scheduler
from kedge.reuse.costs import EngineCosts


@dataclass(eq=False)
class Request:
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
    lets_pass: bool = True
    full: set[str] = field(default_factory=set)
    admitted: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def is_ready(self, request: Request, *, busy: bool) -> bool:  # noqa: ARG002
        self.asked.append(request.name)
        return request.name not in self.loading

    def admit(self, request: Request) -> bool:
        if request.name not in self.full:
            self.admitted.append(request.name)
        return request.name not in self.full


def scheduler_of(world: World, names: str, max_running: int = 16, budget: int = 64) -> Scheduler:
    scheduler = Scheduler(cast(Any, world), EngineCosts(), budget, max_running, 0.5)
    for name in names:
        scheduler.add(cast(Any, Request(name)))
    return scheduler


def names(requests: object) -> str:
    return "".join(request.name for request in cast(Any, requests))


def test_first_come_first_served_where_nothing_loads() -> None:
    world = World()
    scheduler = scheduler_of(world, "abc")
    assert names(work.sequence for work in scheduler.schedule()) == "abc"
    assert not scheduler.unadmitted


def test_a_pass_takes_fewer_tokens_behind_a_long_context() -> None:
    """Attending takes time, too: others would wait for a pass of seconds."""
    scheduler = Scheduler(cast(Any, World()), EngineCosts(), 64, 16, 0.5, reach=100.0)
    for name, context in ("a", 0), ("b", 300):
        scheduler.add(cast(Any, Request(name, [*range(context, context + 500)])))
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
    world = World(loading={"b"}, lets_pass=False)
    scheduler = scheduler_of(world, "abc")
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
    scheduler.add(cast(Any, Request("c")))
    world.loading = set()
    scheduler.schedule()
    assert (world.admitted, names(scheduler.waiting)) == (["b"], "ac"), "c holds nothing either and came later"


def test_who_has_loaded_and_lacks_room_is_not_passed() -> None:
    world = World(loading={"a"})
    scheduler = scheduler_of(world, "a")
    scheduler.schedule()
    scheduler.add(cast(Any, Request("b")))
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
            scheduler.add(cast(Any, Request(name, tenant="another")))
        scheduler.schedule()
        assert world.admitted == ["a", "x"], "the second one is a request like any other"


def test_first_requests_step_aside_only_so_many_at_once() -> None:
    world = World(loading=set("abcdefgh"))
    scheduler = scheduler_of(world, "", max_running=2)
    for name in "abcdefgh":
        scheduler.add(cast(Any, Request(name, tenant=name)))
    scheduler.schedule()
    assert (len(scheduler.loading), world.admitted) == (4, [])


def test_prompts_are_assembled_ahead_beside_few_that_run_and_while_nobody_waits() -> None:
    """By the costs that are assumed at first, 32 tokens take as long as 32 sequences more in a pass."""
    scheduler = scheduler_of(World(), "")
    for running in range(20):
        assert scheduler.works_ahead == (running < 16)
        scheduler.running.append(cast(Any, Request("a", waits_for_first_token=False)))
    scheduler.running.clear()
    scheduler.add(cast(Any, Request("b")))
    assert not scheduler.works_ahead
