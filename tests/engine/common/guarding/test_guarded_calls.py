"""The guard between an engine and its clients: faults are found, and a client sees nothing of how."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.engine.base import Item
from kedge.engine.common.guarding import guarded_calls
from kedge.engine.common.guarding.check import Check, dense_check, trial
from kedge.engine.common.guarding.guarded_calls import GRACE, MAX_PAUSE, MAX_WAITING, CheckThread, GuardedCalls
from kedge.engine.common.stream import TokenStream
from kedge.errors import EngineClosed, GenerationFailed, Overloaded, TranslationRefused
from kedge.guard import EVERYTHING, GuardMode, GuardOrders
from kedge.reuse.guard.fidelity import Proof
from kedge.reuse.guard.guard import QualityGuard
from kedge.reuse.guard.record import SETTLED, TRIALS
from kedge.reuse.plan import Sentinel
from kedge.settings import GuardSettings
from kedge.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    ReuseMode,
    SampleId,
    SamplingParams,
    Segment,
    Source,
    Span,
    TokenDelta,
    TokenLogprob,
)
from tests.reuse.guard.answers import answer, position

GOOD = position({1: 0.9, 2: 0.1})
BAD = position({2: 0.9, 1: 0.1})
EAGER = GuardSettings(share=1.0)
"""Checks every call."""
AS_SET = GuardOrders()


def request(
    *names: str,
    run: str = "run",
    agent: str = "solver",
    guard: GuardOrders = AS_SET,
    reuse: ReuseMode = ReuseMode.TRANSLATE,
    logprobs: int | None = None,
    **sampling: object,
) -> GenerateRequest:
    """A request with these placeholders, of ten tokens each."""
    values = [Segment(tuple(range(10)), name, SampleId.parse(f"input_{name}@0")) for name in names or ("a",)]
    params = SamplingParams(**{"max_tokens": 4, **sampling})
    return GenerateRequest(
        (Segment((0,), "p0"), *values, Segment((3,), "p1")), params, reuse, guard=guard, logprobs=logprobs,
        workflow="team", agent=agent, run=run,
    )  # fmt: skip


ELSEWHERE = request(run="else").run_key


def spans_of(request: GenerateRequest, translated: frozenset[str]) -> list[Span]:
    """The spans of a receipt with these placeholders translated, as far as the guard does not withhold them."""
    spans, start = [], 0
    for segment in request.segments:
        stop = start + len(segment.tokens)
        moved = segment.name in translated and not request.guard.withholds(segment.name)
        moved &= request.reuse is ReuseMode.TRANSLATE
        spans.append(Span(start, stop, Source.TRANSLATED if moved else Source.COMPUTED))
        start = stop
    return spans


@dataclass
class FakeEngine:
    """Translates what it can unless withheld; with a faulty placeholder among it, the answer begins otherwise."""

    settings: GuardSettings = EAGER
    translatable: frozenset[str] = frozenset("ab")
    faulty: frozenset[str] = frozenset()
    wrong: TokenLogprob = BAD
    asked: list[GenerateRequest] = field(default_factory=list)
    """What was served to clients, as it arrived in the engine"""
    checks: list[GenerateRequest] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.calls = GuardedCalls(self.submit, self.settings)

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Serve a request at once; as `LocalEngine.submit` does."""
        served, tap = self.calls.begin(request)
        self.events.append(f"submit {request.run}")
        stream = TokenStream(request.request_id)
        stream.tap = tap
        (self.asked if tap else self.checks).append(served)
        done = self.completion(served, FinishReason.LENGTH)
        if done.logprobs:
            stream.put(TokenDelta("x", done.tokens[:1], logprobs=done.logprobs[:1]))
        stream.put(TokenDelta("x", done.tokens[1:], done, done.logprobs[1:]))
        return stream

    def completion(self, served: GenerateRequest, reason: FinishReason) -> Completion:
        """The answer to a request."""
        spans = spans_of(served, self.translatable)
        moved = {s.name for s, span in zip(served.segments, spans, strict=True) if span.source is Source.TRANSLATED}
        first = self.wrong if moved & self.faulty else GOOD
        size = served.sampling.max_tokens
        made = answer(*[first, *[GOOD] * (size - 1)][:size], spans=spans, finish_reason=reason)
        if served.logprobs is None:
            return replace(made, logprobs=())
        return replace(made, logprobs=tuple(replace(one, top=one.top[: served.logprobs]) for one in made.logprobs))

    def ask(self, request: GenerateRequest) -> Completion:
        """Serve a request and carry out its checks."""
        done = self.submit(request).result(10)
        assert self.calls.checks.drain(10)
        return done

    def end_run(self, run: str) -> None:
        """End a run, as `LocalEngine.end_run` does."""
        self.calls.checks.end_run(request(run=run).run_key, lambda: self.events.append(f"end {run}"))

    def state(self, placeholder: str = "a") -> dict[str, object]:
        """The record of a placeholder."""
        (entry,) = [one for one in self.calls.stats()["agents"] if one["placeholder"] == placeholder]  # type: ignore[attr-defined]
        return entry

    def close(self) -> None:
        """Close as `LocalEngine` does."""
        self.calls.checks.stop()
        self.calls.checks.join()


Fake = Callable[..., FakeEngine]


@pytest.fixture
def fake() -> Iterator[Fake]:
    """Make engines, which are closed when the test has ended."""
    with ExitStack() as made:
        yield lambda **given: made.enter_context(closing(FakeEngine(**given)))


def wrong(engine: FakeEngine, count: int, *names: str) -> int:
    """Serve calls and return how many answers began otherwise than dense prefill's."""
    return sum(engine.ask(request(*names)).tokens[0] != 1 for _ in range(count))


def test_a_fault_is_off_after_one_changed_answer_and_earns_its_way_back(fake: Fake) -> None:
    engine = fake()
    assert wrong(engine, 20, "a") == 0
    engine.faulty = frozenset("a")
    assert wrong(engine, 30, "a") == 1
    assert engine.state()["withheld"] and engine.state()["breaches"]
    engine.faulty = frozenset()
    calls = next(n for n in range(1, 2000) if engine.ask(request()).receipt.translated)
    assert calls >= TRIALS and engine.state()["state"] == "canary"


def test_the_fault_of_one_placeholder_leaves_the_other_translated(fake: Fake) -> None:
    engine = fake(faulty=frozenset("b"))
    wrong(engine, 60, "a", "b")
    engine.ask(request("a", "b"))
    assert engine.state("b")["withheld"] and engine.state("b")["breaches"]
    assert not engine.state("a")["withheld"] and not engine.state("a")["breaches"]


def test_a_placeholder_that_cannot_be_translated_does_not_starve_another_of_its_trials(fake: Fake) -> None:
    engine = fake(translatable=frozenset("b"))
    shadow = GuardOrders(GuardMode.SHADOW)
    for _ in range(40):
        assert engine.ask(request("a", "b", guard=shadow)).receipt.translated == 0
    assert engine.state("b")["checks"]


def test_answers_that_are_no_numbers_are_a_fault(fake: Fake) -> None:
    engine = fake(faulty=frozenset("a"), wrong=TokenLogprob(1, math.nan, ((1, math.nan),)))
    engine.ask(request())
    assert engine.state()["withheld"] and math.isfinite(engine.state()["max_kl"])  # type: ignore[arg-type]


def test_a_call_is_one_trial_whichever_of_its_sentinel_tokens_are_off(fake: Fake) -> None:
    calls = fake().calls
    for error in (*[0.1] * SETTLED, 0.9):
        asked, _ = calls.begin(request())
        refuted = calls.sentinels_read(asked, {Sentinel(at, is_weak=at > 2): error for at in range(1, 9)})
        assert refuted == (error > 0.5)
    assert calls.guard.suspicions == 1


@pytest.mark.parametrize(
    "asked", [request(max_tokens=0), replace(request(), prompt_logprobs=1), request(reuse=ReuseMode.EXACT)]
)
def test_what_cannot_be_compared_is_not_checked(fake: Fake, asked: object) -> None:
    """A call without an answer would else count as a clean trial."""
    engine = fake(faulty=frozenset("a"))
    engine.ask(request())
    engine.checks.clear()
    before = engine.state()
    engine.ask(asked)  # type: ignore[arg-type]
    assert engine.checks == [] and engine.state() == before


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([None, 0, 1, 3, 20, 25]),
    st.sampled_from([ReuseMode.TRANSLATE, ReuseMode.EXACT]),
    st.sampled_from([None, *GuardMode]),
    st.integers(0, 6),
    st.sampled_from([None, "translated", "notes", "observe"]),
)
def test_a_client_sees_the_log_probabilities_that_it_asked_for_even_where_the_guard_fails(
    logprobs: int | None, reuse: ReuseMode, mode: GuardMode | None, size: int, fails: str | None
) -> None:
    engine = FakeEngine()
    asked = request(logprobs=logprobs, reuse=reuse, guard=GuardOrders(mode), max_tokens=size)
    with patch.object(QualityGuard, fails, side_effect=ValueError("a bug")) if fails else nullcontext():
        items = list(engine.submit(asked))
        assert engine.calls.checks.drain(10)
    done = items[-1].completion
    assert done is not None and not any(item.completion for item in items[:-1])
    seen = [one for item in items for one in item.logprobs]
    assert tuple(seen) == done.logprobs and len(done.logprobs) == (0 if logprobs is None else size)
    assert all(len(one.top) == min(2, logprobs or 0) for one in seen)
    engine.close()


def test_a_trial_can_wait_where_many_have_proved_nothing(fake: Fake) -> None:
    engine = fake()
    with patch.object(Proof, "is_settled", new=True), patch.object(engine.calls.checks, "add") as add:
        engine.submit(request(guard=GuardOrders(GuardMode.SHADOW, fidelity=0.002))).result(10)
    assert add.call_args.args[0].is_settled and add.call_args.args[0].tried == EVERYTHING


def test_a_guard_that_fails_on_arrival_translates_nothing(fake: Fake) -> None:
    engine = fake()
    with patch.object(QualityGuard, "verdict", side_effect=ValueError("a bug")):
        done = engine.ask(request())
        assert engine.calls.ordered(request()).guard.withheld == {EVERYTHING}
    assert done.receipt.translated == 0 and engine.asked[0].guard.withheld == {EVERYTHING}


def test_errors_and_cancelled_answers_are_passed_on_once_and_not_checked(fake: Fake) -> None:
    engine = fake(translatable=frozenset())
    heard = []
    for reason in (FinishReason.CANCELLED, None):
        served, tap = engine.calls.begin(request())
        assert tap is not None
        error = GenerationFailed("request", "r", "it failed")
        item = TokenDelta("", (), engine.completion(served, reason)) if reason else error
        heard.append(tap(item))
    assert heard[1] is error and heard[0].completion.finish_reason is FinishReason.CANCELLED
    assert engine.calls.checks.drain(1) and engine.checks == []
    engine.ask(request())
    engine.translatable = frozenset("a")
    engine.ask(request())
    asked = [one.logprobs for one in engine.asked]
    assert engine.checks == [] and asked == [20, None], "the first had nothing to compare"
    engine.submit(request()).result(10)
    assert engine.calls.checks.drain(10) and len(engine.checks) == 1, "the engine counts as idle"


def test_log_probabilities_are_asked_of_no_more_answers_at_once_than_may_wait(fake: Fake) -> None:
    engine = fake()
    begun = [engine.calls.begin(replace(request(), request_id=f"r{number}")) for number in range(2 * MAX_WAITING)]
    assert [one.logprobs for one, _ in begun] == [20] * MAX_WAITING + [None] * MAX_WAITING
    for served, tap in begun:
        assert tap is not None
        tap(TokenDelta("", (), engine.completion(served, FinishReason.CANCELLED)))
    assert engine.calls.begin(request())[0].logprobs == 20


def test_few_agents_are_remembered_that_had_nothing_to_compare(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_calls, "ENTRIES", 4)
    engine = fake(translatable=frozenset())
    for number in range(10):
        engine.ask(request(agent=f"agent-{number}"))
        assert 0 < len(engine.calls._incomparable) <= 4


def test_a_run_ends_after_its_trials_and_before_the_next_of_its_name(fake: Fake) -> None:
    engine = fake(faulty=frozenset("a"))
    engine.ask(request(run="first"))
    engine.calls.checks.arrived(ELSEWHERE)  # while somebody is served, checks wait
    while not engine.calls.checks._waiting:  # until one is tried
        engine.submit(request(run="second")).result(10)
    engine.end_run("second")
    assert "end second" not in engine.events
    engine.submit(request(run="second")).result(10)
    assert engine.events[-2:] == ["end second", "submit second"]


def test_32_clients_at_once(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_calls, "MAX_PENDING", 8)
    engine = fake(faulty=frozenset("b"))

    def client(number: int) -> int:
        agent, wrong = f"agent-{number % 4}", 0
        for turn in range(20):
            asked = request("a", "b", agent=agent, run=f"run-{number}-{turn}")
            done = engine.submit(asked).result(10)
            wrong += done.tokens[0] != 1
            assert done.logprobs == ()
            engine.end_run(asked.run)
        return wrong

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(client, range(32)))
    assert engine.calls.checks.drain(60)
    assert sum(event.startswith("end") for event in engine.events) == 32 * 20
    figures = engine.calls.stats()
    assert 0 < figures["checks_done"] + figures["checks_dropped"] <= 32 * 20  # type: ignore[operator]
    assert all(one["withheld"] for one in figures["agents"] if one["placeholder"] == "b")  # type: ignore[attr-defined]


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
        tenant: str = "default",
        rungs: Sequence[int | None] = (None,),
        tried: str = "a",
        settled: bool = False,
    ) -> Check:
        asked, done = replace(request(run=run, agent=agent), tenant=tenant), answer(GOOD)
        is_dense = dense or settled
        check = dense_check(asked, done, [], is_settled=settled) if is_dense else trial(asked, done, tried, rungs)
        self.checks.add(check)
        return check

    def finish(self, reason: FinishReason = FinishReason.LENGTH) -> None:
        assert self.begun.acquire(timeout=10)
        _, stream = self.under_way.pop(0)
        stream.put(TokenDelta("", (), answer(GOOD, finish_reason=reason)))

    def finish_all(self, count: int = 1) -> None:
        """End so many requests, after which nothing is left."""
        for _ in range(count):
            self.finish()
        assert self.checks.drain(10)

    def finish_after(self, wait: Callable[[], None]) -> None:
        """End the next request once it has begun and `wait` has been called; return when it has been judged."""
        assert self.begun.acquire(timeout=10)
        wait()
        self.begun.release()
        self.finish_all()

    def end_run(self, run: str) -> None:
        self.checks.end_run(request(run=run).run_key, lambda: self.ended.append(run))

    def close(self) -> None:
        self.checks.stop()
        while self.under_way:
            self.finish(FinishReason.CANCELLED)
        self.checks.join()


@contextmanager
def bench(max_pending: int = 4, busy: int = 0, **settings: object) -> Iterator[Bench]:
    """With so many requests of clients in the engine."""
    made = Bench(**settings)
    for _ in range(busy):
        made.checks.arrived(ELSEWHERE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(guarded_calls, "MAX_PENDING", max_pending)
        yield made
    made.close()


def test_a_busy_engine_only_within_the_budget() -> None:
    with bench(busy=2) as one:
        one.checks.left(1000)
        one.add()
        assert not one.begun.acquire(timeout=0.1), "nothing is saved up"
        one.checks.arrived(ELSEWHERE)
        one.checks.left(1)
        one.finish()
        one.add()
        assert not one.begun.acquire(timeout=0.1), "it has taken more than was there"
        one.checks.left(0)
        one.finish_all()


def test_a_client_without_pauses_has_its_checks_carried_out_within_the_budget() -> None:
    """Between two of its calls the engine is not idle, and during one nothing else happens."""
    with bench() as one:
        one.checks._pause = LONG
        one.add()
        one.checks.arrived(ELSEWHERE)
        one.checks.left(1)
        assert not one.begun.acquire(timeout=0.1)
        one.checks.arrived(ELSEWHERE)
        one.finish_all()


@pytest.mark.parametrize(("took", "pause", "fails"), [(3.0, 3.0, False), (1000.0, MAX_PAUSE, False), (3.0, 3.0, True)])
def test_a_pause_shorter_than_a_check_is_not_idle_time(
    took: float, pause: float, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Than the last one that was carried out: what fails at once says nothing of pauses."""
    now = [100.0]
    monkeypatch.setattr(guarded_calls, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with bench() as one:
        one.add()
        now[0] += GRACE
        one.finish_after(lambda: now.__setitem__(0, now[0] + took))
        if fails:
            one.error = Overloaded("n", 1, "full")
            one.add()
            assert one.checks.drain(10) and (one.checks.done, one.checks.dropped) == (1, 1)
            one.error = None
        one.checks.arrived(ELSEWHERE)
        one.checks.left(0)
        now[0] += pause - 0.1
        one.add()
        assert not one.begun.acquire(timeout=0.1), "a client may only have paused between two calls"
        now[0] += 0.2
        one.add()
        one.finish_all(2)


@pytest.mark.parametrize("noisy", [{"agent": "noisy"}, {"tenant": "noisy"}])
def test_too_many_drop_the_oldest_of_whoever_has_the_most(noisy: dict[str, str]) -> None:
    """An agent of a tenant; and of tenants the one whose agents, of whatever names, have the most together."""
    with bench(max_pending=3, busy=1) as one:
        rare = one.add(agent="rare")
        added = [one.add(**{"agent": f"agent-{number}", **noisy}) for number in range(20)]
        assert one.checks.dropped == 18
        one.checks.left(0)
        one.finish_all(3)
        assert one.judged == [rare, *added[-2:]]


def test_where_a_rung_translates_nothing_those_of_its_kind_are_not_tried() -> None:
    """Nothing is known to start from yet: each would compute the whole prompt."""
    with bench() as one:
        check = one.add(rungs=[0, 1, 2, 3, 4, 5])
        one.finish_all(2)
        assert one.judged == [check] and not one.under_way


ANSWERED = TokenDelta("", (), answer(GOOD))
CANCELLED = TokenDelta("", (), answer(GOOD, finish_reason=FinishReason.CANCELLED))
NO_ROOM = Overloaded("request_id", "r", "no room")
IN_VAIN = TranslationRefused("request_id", "r", "nothing can be translated yet")


@pytest.mark.parametrize(
    ("ends", "is_judged"),
    [
        ([CANCELLED] * 3, False),
        ([ANSWERED, CANCELLED, CANCELLED], False),
        ([ANSWERED, NO_ROOM, NO_ROOM], False),
        ([IN_VAIN] * 3, True),
        ([ANSWERED] * 3, True),
    ],
    ids=["cancelled", "then cancelled", "then no room", "in vain", "all are answered"],
)
def test_a_check_of_several_requests_is_judged_unless_one_fails_and_what_it_computed_counts(
    ends: list[Item], is_judged: bool
) -> None:
    with bench() as one:
        check = one.add(rungs=[0, 1, None])
        for _ in ends:
            assert one.begun.acquire(timeout=10)
        for (request, stream), end in zip(one.under_way, ends, strict=True):
            assert one.judged == [] and one.checks.is_under_way(request.request_id)
            stream.put(end)
        one.under_way.clear()
        assert one.checks.drain(10) and one.judged == [check] * is_judged
        assert (one.checks.done, one.checks.dropped) == (is_judged, not is_judged)
        assert (one.checks.computed > 0) == (ends[0] is not IN_VAIN)


def test_while_requests_are_served_a_check_is_made_on_its_first_rung_alone() -> None:
    with bench() as one:
        one.checks._pause = LONG
        check = one.add(tried=EVERYTHING, rungs=[3, 1, 2])
        assert check.narrowed().requests == (check.requests[0], check.requests[3]), "and its control"
        one.checks.arrived(ELSEWHERE)
        one.checks.left(1)
        one.checks.arrived(ELSEWHERE)
        one.finish_all(2)
        assert [len(done.requests) for done in one.judged] == [2]


def test_no_more_of_an_agent_are_wanted_than_the_budget_pays_for() -> None:
    with bench(busy=1) as one:
        for _ in range(MAX_WAITING):
            assert one.checks.wants(request(agent="noisy").workflow_agent, is_settled=False)
            one.add(agent="noisy")
        assert not one.checks.wants(request(agent="noisy").workflow_agent, is_settled=False)
        assert one.checks.wants(request(agent="rare").workflow_agent, is_settled=False)
        one.checks.left(0)
        one.finish_all(MAX_WAITING)
        assert one.checks.wants(request(agent="noisy").workflow_agent, is_settled=False)


def test_checks_of_settled_agents_let_others_go_first_and_take_a_fifth_of_the_budget() -> None:
    with bench(budget=1e-3, busy=4) as one:
        one.add(settled=True)
        new = one.add()
        assert one.checks.wants(new.of.workflow_agent, is_settled=False), "those that can wait are not counted"
        assert not one.checks.wants(new.of.workflow_agent, is_settled=True)
        one.checks.left(1000)
        one.finish()
        while not one.checks.done:
            time.sleep(0.001)
        one.checks.left(2000 * one.checks.computed)
        assert not one.begun.acquire(timeout=0.1), "twice what the first took, of which it has a fifth"
        one.checks.left(4000 * one.checks.computed)
        one.finish_all()
        assert [check.is_settled for check in one.judged] == [False, True]


def test_the_agent_whose_checks_took_fewer_tokens_of_late_goes_first_and_its_tenant_before_that() -> None:
    """All readers of a team are proved together, and another tenant's waits behind none of many agents."""
    with bench(max_pending=8) as one:
        one.add(agent="dear")
        one.finish_all()
        assert one.checks.computed
        one.checks.arrived(ELSEWHERE)
        waiting = [one.add(agent="dear"), one.add(agent="cheap"), one.add(agent="other", tenant="other")]
        one.checks.left(0)
        one.finish_all(len(waiting))
        assert one.judged[1:] == waiting[::-1]


def test_checks_of_what_is_served_have_half_of_the_tokens_whatever_new_agents_come() -> None:
    with bench(max_pending=64, busy=1) as one:
        trials = [one.add(agent=f"new-{number}") for number in range(20)]
        served = [one.add(agent="served", dense=True) for _ in range(4)]
        one.checks.left(0)
        one.finish_all(len(trials) + len(served))
        assert all(check in one.judged[:8] for check in served)


def test_the_end_of_a_run_waits_for_its_trials_only() -> None:
    with bench(busy=1) as one:
        one.add("tried")
        one.add("dense", dense=True)
        for run in ("tried", "dense", "other"):
            one.end_run(run)
        assert one.ended == ["dense", "other"]
        one.checks.left(0)
        one.finish_all(2)
        one.close()
        assert one.ended == ["dense", "other", "tried"]


@pytest.mark.parametrize("error", [EngineClosed("engine", None, "closed"), Overloaded("n", 1, "full"), ValueError()])
def test_a_check_that_cannot_be_submitted_lets_its_run_end(error: Exception) -> None:
    with bench(busy=1) as one:
        one.error = error
        one.add()
        one.end_run("run")
        one.checks.left(0)
        assert one.checks.drain(10)
        one.close()
        assert one.ended == ["run"] and (one.checks.done, one.checks.dropped) == (0, 1)


def test_closing_carries_out_the_ends_that_wait() -> None:
    with bench(busy=1) as one:
        one.add()
        one.end_run("run")
        one.checks.stop()
        assert one.ended == ["run"]
        one.add("late")
        one.end_run("late")
        assert one.ended == ["run", "late"] and one.checks.drain(1)


def test_a_run_that_is_used_again_is_not_forgotten_by_the_end_of_the_earlier_one() -> None:
    with bench(busy=1) as one:
        one.add()
        one.add()
        one.end_run("run")
        one.checks.arrived(request().run_key)
        assert one.ended == ["run"] and one.checks.dropped == 2
        for _ in range(2):
            one.checks.left(0)
        assert one.checks.drain(10)
        one.add()
        one.end_run("run")
        one.finish_all()
        one.checks.stop()
        assert one.ended == ["run", "run"]


def test_an_end_that_fails_does_not_end_the_thread() -> None:
    with bench(busy=1) as one:
        one.add()
        one.checks.end_run(request().run_key, lambda: 1 // 0)
        one.checks.left(0)
        one.finish()
        one.add()
        one.finish_all()
        assert one.checks.done == 2
