"""Checks one by one: when they may run, what is dropped, and the ends of runs that wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kedge.engine.common.guarding import guarded_calls
from kedge.engine.common.guarding.check import Check, dense_check, trial
from kedge.engine.common.guarding.guarded_calls import MAX_WAITING, PATIENCE, CheckThread
from kedge.engine.common.stream import TokenStream
from kedge.errors import EngineClosed, Overloaded, TranslationRefused
from kedge.guard import EVERYTHING
from kedge.reuse.costs import GRACE
from kedge.settings import GuardSettings
from kedge.types import Completion, FinishReason, GenerateRequest, Segment, TenantId, TokenDelta
from tests.engine.common.guarding.fakes import GOOD, request
from tests.reuse.guard.answers import answer

LONG = 1000.0


class Bench:
    """A check thread whose requests end when the test lets them."""

    def __init__(self, **settings: object) -> None:
        self.settings = GuardSettings(**{"budget": 0.5, **settings})
        self.under_way: list[tuple[GenerateRequest, TokenStream]] = []
        self.begun = threading.Semaphore(0)
        self.judged: list[Check] = []
        self.ended: list[str] = []
        self.error: Exception | None = None
        self.checks = CheckThread(self.submit, lambda check, _: self.judged.append(check), self.settings)

    def submit(self, request: GenerateRequest) -> TokenStream:
        if self.error:
            raise self.error
        stream = TokenStream(request.request_id)
        self.under_way.append((request, stream))
        self.begun.release()
        return stream

    def add(
        self,
        run: str = "run",
        agent: str = "solver",
        dense: bool = False,
        size: int = 12,
        tenant: str = "default",
        rungs: Sequence[int | None] = (None,),
        tried: str = "a",
    ) -> Check:
        asked = replace(request(run=run, agent=agent), tenant=TenantId(tenant))
        if size != asked.prompt_tokens:
            asked = GenerateRequest((Segment((1,) * size, "p0"), *asked.segments[1:2]), asked.sampling, asked.reuse)
        done = answer(GOOD)
        check = dense_check(asked, done, []) if dense else trial(asked, done, tried, rungs)
        self.checks.add(check)
        return check

    def finish(self, reason: FinishReason = FinishReason.LENGTH) -> None:
        assert self.begun.acquire(timeout=10)
        _, stream = self.under_way.pop(0)
        stream.put(TokenDelta("", (), answered(reason)))

    def finish_after(self, wait: Callable[[], None]) -> None:
        """End the next request once it has begun and `wait` has been called; return when it has been judged."""
        assert self.begun.acquire(timeout=10)
        wait()
        self.begun.release()
        self.finish()
        assert self.checks.drain(10)

    def end_run(self, run: str) -> None:
        self.checks.end_run(request(run=run).run_key, lambda: self.ended.append(run))


def answered(reason: FinishReason) -> Completion:
    return answer(GOOD, finish_reason=reason)


@contextmanager
def bench(max_pending: int = 4, **settings: object) -> Iterator[Bench]:
    made = Bench(**settings)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(guarded_calls, "MAX_PENDING", max_pending)
        yield made
    made.checks.stop()
    while made.under_way:
        made.finish(FinishReason.CANCELLED)
    made.checks.join()


def test_an_idle_engine_carries_checks_out() -> None:
    with bench() as one:
        check = one.add()
        one.finish()
        assert one.checks.drain(10) and one.judged == [check] and one.checks.done == 1


def test_a_busy_engine_only_within_the_budget() -> None:
    with bench() as one:
        one.checks.arrived()
        one.checks.arrived()
        one.checks.left(1000)
        one.add()
        assert not one.begun.acquire(timeout=0.1), "nothing is saved up"
        one.checks.arrived()
        one.checks.left(1)
        one.finish()
        one.add()
        assert not one.begun.acquire(timeout=0.1), "it has taken more than was there"
        one.checks.left(0)
        one.finish()
        assert one.checks.drain(10)


def test_a_client_without_pauses_has_its_checks_carried_out_within_the_budget() -> None:
    """Between two of its calls the engine is not idle, and during one nothing else happens."""
    with bench() as one:
        one.checks._pause = LONG
        one.add()
        one.checks.arrived()
        one.checks.left(1)
        assert not one.begun.acquire(timeout=0.1)
        one.checks.arrived()
        one.finish()
        assert one.checks.drain(10)


@pytest.mark.parametrize(("took", "pause"), [(3.0, 3.0), (1000.0, PATIENCE)])
def test_a_pause_shorter_than_a_check_is_not_idle_time(
    took: float, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(guarded_calls, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with bench() as one:
        one.add()
        now[0] += GRACE
        one.finish_after(lambda: now.__setitem__(0, now[0] + took))
        one.checks.arrived()
        one.checks.left(0)
        now[0] += pause - 0.1
        one.add()
        assert not one.begun.acquire(timeout=0.1), "a client may only have paused between two calls"
        now[0] += 0.2
        one.add()
        one.finish()
        one.finish()
        assert one.checks.drain(10)


def test_a_check_that_fails_at_once_says_nothing_of_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(guarded_calls, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with bench() as one:
        one.checks.arrived()
        one.add()
        one.checks.left(0)
        now[0] += GRACE
        one.finish_after(lambda: now.__setitem__(0, now[0] + 3.0))
        one.error = Overloaded("n", 1, "full")
        one.add()
        assert one.checks.drain(10) and (one.checks.done, one.checks.dropped) == (1, 1)
        one.error = None
        one.checks.arrived()
        one.checks.left(0)
        now[0] += 2.9
        one.add()
        assert not one.begun.acquire(timeout=0.1), "the last check that was carried out took three seconds"
        now[0] += 0.2
        one.add()
        one.finish()
        one.finish()
        assert one.checks.drain(10)


@pytest.mark.parametrize("noisy", [{"agent": "noisy"}, {"tenant": "noisy"}])
def test_too_many_drop_the_oldest_of_whoever_has_the_most(noisy: dict[str, str]) -> None:
    """An agent of a tenant; and of tenants the one whose agents, of whatever names, have the most together."""
    with bench(max_pending=3) as one:
        one.checks.arrived()
        rare = one.add(agent="rare")
        added = [one.add(**{"agent": f"agent-{number}", **noisy}) for number in range(20)]
        assert one.checks.dropped == 18
        one.checks.left(0)
        for _ in range(3):
            one.finish()
        assert one.checks.drain(10) and one.judged == [rare, *added[-2:]]


def test_a_check_of_several_requests_is_judged_when_all_are_answered() -> None:
    with bench() as one:
        check = one.add(rungs=[0, 1, None])
        for _ in range(3):
            assert one.begun.acquire(timeout=10), "at once"
        one.begun.release(3)
        assert one.checks.is_under_way(check.requests[2].request_id)
        for _ in range(3):
            assert one.judged == []
            one.finish()
        assert one.checks.drain(10) and one.judged == [check] and (one.checks.done, one.checks.dropped) == (1, 0)
        assert not one.checks.is_under_way(check.requests[2].request_id)


def test_where_a_rung_translates_nothing_those_of_its_kind_are_not_tried() -> None:
    """Nothing is known to start from yet: each would compute the whole prompt."""
    with bench() as one:
        check = one.add(rungs=[0, 1, 2, 3, 4, 5])
        one.finish()
        one.finish()
        assert one.checks.drain(10) and one.judged == [check] and not one.under_way


@pytest.mark.parametrize("finished", [0, 1])
def test_a_check_of_which_a_request_is_cancelled_shows_nothing_and_ends(finished: int) -> None:
    with bench() as one:
        one.add(rungs=[0, 1, None])
        for _ in range(finished):
            one.finish()
        one.finish(FinishReason.CANCELLED)
        assert one.checks.drain(10) and one.judged == [] and (one.checks.done, one.checks.dropped) == (0, 1)


def test_what_cannot_be_translated_yet_is_no_more_than_tried_in_vain() -> None:
    with bench() as one:
        check = one.add(rungs=[0, 1, 2])
        for _ in range(2):
            assert one.begun.acquire(timeout=10)
        for request, stream in one.under_way:
            stream.put(TranslationRefused("request_id", request.request_id, "nothing"))
        one.under_way.clear()
        assert one.checks.drain(10) and one.judged == [check] and one.checks.computed == 0


def test_what_a_check_computed_until_it_failed_counts() -> None:
    with bench() as one:
        one.add(rungs=[0, 1, None])
        one.finish()
        assert one.begun.acquire(timeout=10) and one.begun.acquire(timeout=10)
        for request, stream in one.under_way:
            stream.put(Overloaded("request_id", request.request_id, "no room"))
        one.under_way.clear()
        assert one.checks.drain(10) and one.judged == [] and one.checks.computed > 0 and one.checks.dropped == 1


def test_while_requests_are_served_a_check_is_made_on_its_first_rung_alone() -> None:
    with bench() as one:
        one.checks._pause = LONG
        check = one.add(tried=EVERYTHING, rungs=[3, 1, 2])
        assert check.narrowed().requests == (check.requests[0], check.requests[3]), "and its control"
        one.checks.arrived()
        one.checks.left(1)
        one.checks.arrived()
        one.finish()
        one.finish()
        assert one.checks.drain(10) and [len(done.requests) for done in one.judged] == [2]


def test_no_more_of_an_agent_are_wanted_than_the_budget_pays_for() -> None:
    with bench() as one:
        one.checks.arrived()
        for _ in range(MAX_WAITING):
            assert one.checks.wants(request(agent="noisy").workflow_agent)
            one.add(agent="noisy")
        assert not one.checks.wants(request(agent="noisy").workflow_agent)
        assert one.checks.wants(request(agent="rare").workflow_agent)
        one.checks.left(0)
        for _ in range(MAX_WAITING):
            one.finish()
        assert one.checks.drain(10) and one.checks.wants(request(agent="noisy").workflow_agent)


def test_the_end_of_a_run_waits_for_its_trials_only() -> None:
    with bench() as one:
        one.checks.arrived()
        one.add("tried")
        one.add("dense", dense=True)
        for run in ("tried", "dense", "other"):
            one.end_run(run)
        assert one.ended == ["dense", "other"]
        one.checks.left(0)
        one.finish()
        one.finish()
        assert one.checks.drain(10)
        one.checks.stop()
        one.checks.join()
        assert one.ended == ["dense", "other", "tried"]


def test_dropped_trials_let_their_run_end() -> None:
    with bench(max_pending=1) as one:
        one.checks.arrived()
        one.add("first")
        one.end_run("first")
        assert one.ended == []
        one.add("second")
        assert one.ended == ["first"] and one.checks.dropped == 1


@pytest.mark.parametrize("error", [EngineClosed("engine", None, "closed"), Overloaded("n", 1, "full"), ValueError()])
def test_a_check_that_cannot_be_submitted_lets_its_run_end(error: Exception) -> None:
    with bench() as one:
        one.checks.arrived()
        one.error = error
        one.add()
        one.end_run("run")
        one.checks.left(0)
        assert one.checks.drain(10)
        one.checks.stop()
        one.checks.join()
        assert one.ended == ["run"] and (one.checks.done, one.checks.dropped) == (0, 1)


def test_closing_carries_out_the_ends_that_wait() -> None:
    with bench() as one:
        one.checks.arrived()
        one.add()
        one.end_run("run")
        one.checks.stop()
        assert one.ended == ["run"]
        one.add("late")
        one.end_run("late")
        assert one.ended == ["run", "late"] and one.checks.drain(1)


def test_a_run_that_is_used_again_is_not_forgotten_by_the_end_of_the_earlier_one() -> None:
    with bench() as one:
        one.checks.arrived()
        one.add()
        one.add()
        one.end_run("run")
        one.checks.begin_run(request().run_key)
        assert one.ended == ["run"] and one.checks.dropped == 2
        one.checks.left(0)
        assert one.checks.drain(10)
        one.add()
        one.end_run("run")
        one.finish()
        assert one.checks.drain(10)
        one.checks.stop()
        assert one.ended == ["run", "run"]


def test_an_end_that_fails_does_not_end_the_thread() -> None:
    with bench() as one:
        one.checks.arrived()
        one.add()
        one.checks.end_run(request().run_key, lambda: 1 // 0)
        one.checks.left(0)
        one.finish()
        one.add()
        one.finish()
        assert one.checks.drain(10) and one.checks.done == 2
