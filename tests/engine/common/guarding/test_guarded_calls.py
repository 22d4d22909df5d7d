"""The guard between an engine and its clients: faults are found, and a client sees nothing of how."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.engine.common.guarding import guarded_calls
from kedge.errors import GenerationFailed
from kedge.guard import EVERYTHING, GuardMode, GuardOrders
from kedge.reuse.guard.guard import QualityGuard
from kedge.reuse.guard.record import TRIALS
from kedge.types import FinishReason, ReuseMode, Source, TokenDelta, TokenLogprob
from tests.engine.common.guarding.fakes import FakeEngine, request


def wrong(engine: FakeEngine, count: int, *names: str) -> int:
    """Serve calls and return how many answers began otherwise than dense prefill's."""
    return sum(engine.ask(request(*names)).tokens[0] != 1 for _ in range(count))


def test_a_fault_is_off_after_one_changed_answer_and_earns_its_way_back() -> None:
    engine = FakeEngine()
    assert wrong(engine, 20, "a") == 0
    engine.faulty = frozenset("a")
    assert wrong(engine, 30, "a") == 1
    assert engine.state()["withheld"] and engine.state()["breaches"]
    engine.faulty = frozenset()
    calls = next(n for n in range(1, 2000) if engine.ask(request()).receipt.translated)
    assert calls >= TRIALS and engine.state()["state"] == "canary"
    engine.close()


def test_the_fault_of_one_placeholder_leaves_the_other_translated() -> None:
    engine = FakeEngine(faulty=frozenset("b"))
    wrong(engine, 60, "a", "b")
    engine.ask(request("a", "b"))
    assert engine.state("b")["withheld"] and engine.state("b")["breaches"]
    assert not engine.state("a")["withheld"] and not engine.state("a")["breaches"]
    engine.close()


def test_a_placeholder_that_cannot_be_translated_does_not_starve_another_of_its_trials() -> None:
    engine = FakeEngine(translatable=frozenset("b"))
    shadow = GuardOrders(GuardMode.SHADOW)
    for _ in range(40):
        assert engine.ask(request("a", "b", guard=shadow)).receipt.translated == 0
    assert engine.state("b")["checks"]
    engine.close()


def test_answers_that_are_no_numbers_are_a_fault() -> None:
    engine = FakeEngine(faulty=frozenset("a"), wrong=TokenLogprob(1, math.nan, ((1, math.nan),)))
    engine.ask(request())
    assert engine.state()["withheld"] and math.isfinite(engine.state()["max_kl"])  # type: ignore[arg-type]
    engine.close()


def test_modes_per_request() -> None:
    engine = FakeEngine(faulty=frozenset("a"))
    off, shadow = (GuardOrders(mode) for mode in (GuardMode.OFF, GuardMode.SHADOW))
    for _ in range(5):
        done = engine.ask(request(guard=off))
        assert done.receipt.translated and done.receipt.guard == ()
    assert engine.checks == []
    for _ in range(20):
        assert not engine.ask(request(guard=shadow)).receipt.translated
    assert len(engine.checks) == 20 and engine.state()["withheld"]
    engine.close()


@pytest.mark.parametrize(
    "asked",
    [
        request(max_tokens=0),
        replace(request(), prompt_logprobs=1),
        request(reuse=ReuseMode.EXACT),
        request(reuse=ReuseMode.OFF),
    ],
)
def test_what_cannot_be_compared_is_not_checked(asked: object) -> None:
    """A call without an answer would else count as a clean trial."""
    engine = FakeEngine(faulty=frozenset("a"))
    engine.ask(request())
    engine.checks.clear()
    before = engine.state()
    engine.ask(asked)  # type: ignore[arg-type]
    assert engine.checks == [] and engine.state() == before
    engine.close()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([None, 0, 1, 3, 20, 25]),
    st.sampled_from([ReuseMode.TRANSLATE, ReuseMode.EXACT]),
    st.sampled_from([None, *GuardMode]),
    st.integers(0, 6),
    st.booleans(),
)
def test_a_client_sees_the_log_probabilities_that_it_asked_for(
    logprobs: int | None, reuse: ReuseMode, mode: GuardMode | None, size: int, fails: bool
) -> None:
    engine = FakeEngine()
    asked = request(logprobs=logprobs, reuse=reuse, guard=GuardOrders(mode), max_tokens=size)
    with patch.object(QualityGuard, "notes", side_effect=ValueError if fails else lambda _: ()):
        items = list(engine.submit(asked))
    done = items[-1].completion
    assert done is not None
    seen = [one for item in items for one in item.logprobs]
    assert tuple(seen) == done.logprobs and len(done.logprobs) == (0 if logprobs is None else size)
    assert all(len(one.top) == min(2, logprobs or 0) for one in seen)
    assert engine.calls.checks.drain(10)
    engine.close()


@pytest.mark.parametrize("method", ["translated", "notes", "observe"])
def test_a_guard_that_fails_changes_no_answer(method: str) -> None:
    engine = FakeEngine()
    with patch.object(QualityGuard, method, side_effect=ValueError("a bug")):
        items = list(engine.submit(request()))
        assert engine.calls.checks.drain(10)
    assert [item.completion is not None for item in items] == [False, True]
    assert items[-1].completion is not None and items[-1].completion.logprobs == ()
    engine.close()


def test_a_guard_that_fails_on_arrival_translates_nothing() -> None:
    engine = FakeEngine()
    with patch.object(QualityGuard, "verdict", side_effect=ValueError("a bug")):
        done = engine.ask(request())
        assert engine.calls.ordered(request()).guard.withheld == {EVERYTHING}
    assert done.receipt.translated == 0 and engine.asked[0].guard.withheld == {EVERYTHING}
    engine.close()


def test_errors_and_cancelled_answers_are_passed_on_once_and_not_checked() -> None:
    engine = FakeEngine(translatable=frozenset())
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
    engine.submit(request()).result(10)
    assert engine.calls.checks.drain(10) and len(engine.checks) == 1, "the engine counts as idle"
    engine.close()


def test_a_run_ends_after_its_trials_and_before_the_next_of_its_name() -> None:
    engine = FakeEngine(faulty=frozenset("a"))
    engine.ask(request(run="first"))
    engine.holds_checks = True
    engine.submit(request(run="second")).result(10)
    while not engine.arrived.acquire(timeout=0.2):  # until one is tried
        engine.submit(request(run="second")).result(10)
    engine.end_run("second")
    assert "end second" not in engine.events
    engine.submit(request(run="second")).result(10)
    assert engine.events[-2:] == ["end second", "submit second"]
    engine.close()


def test_32_clients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_calls, "MAX_PENDING", 8)
    engine = FakeEngine(faulty=frozenset("b"))

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
    engine.close()
    assert sum(event.startswith("end") for event in engine.events) == 32 * 20
    figures = engine.calls.stats()
    assert 0 < figures["checks_done"] + figures["checks_dropped"] <= 32 * 20  # type: ignore[operator]
    assert all(one["withheld"] for one in figures["agents"] if one["placeholder"] == "b")  # type: ignore[attr-defined]


def test_a_receipt_has_the_states_of_the_placeholders() -> None:
    engine = FakeEngine(faulty=frozenset("b"))
    engine.ask(request("a"))
    engine.ask(request("b"))
    notes = {note.placeholder: note for note in engine.ask(request("a", "b")).receipt.guard}
    assert notes["a"].state == "canary" and notes["a"].checks == 1 and notes["a"].bound < 1
    assert notes["b"].state == "shadow"
    assert all(span.source is not Source.TRANSLATED for span in engine.ask(request("b")).receipt.spans)
    engine.close()
