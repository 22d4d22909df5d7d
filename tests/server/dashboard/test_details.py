"""What the dashboard keeps of single calls: those of a run, texts where they are allowed, failures."""

from __future__ import annotations

from kedge.engine.echo import EchoEngine
from kedge.server.dashboard.history import History
from kedge.server.dashboard.texts import CallTexts
from kedge.server.failures import MAX_REASON, CallFailure
from kedge.types import (
    RequestId,
    TenantId,
)
from tests.server.dashboard.histories import ACME, Clock, answer, completion, receipt, request


def test_a_run_has_its_calls_wherever_they_are() -> None:
    history = History(Clock())
    answer(history, request(1, "a", run="r"), receipt(device=2, computed=3))
    history.submitted(request(2, "b", run="r"))
    history.ended(ACME, RequestId("r2"))
    history.submitted(request(3, "c", run="r"))
    answer(history, request(4, "other", run="s"), receipt(computed=5))
    first, second = (run["number"] for run in reversed(history.state(ACME)["runs"]))
    found = history.run(ACME, first)
    assert found is not None
    assert [(one["agent"], one["state"], "tokens" in one) for one in found["calls"]] == [
        ("a", "done", True),
        ("b", "stopped", False),
        ("c", "waiting", False),
    ]
    assert found["calls"][0]["parts_ms"] == {}
    assert [one["agent"] for one in (history.run(ACME, second) or {})["calls"]] == ["other"]
    assert history.run(ACME, 99) is None
    assert history.run(TenantId("other"), first) is None


def test_texts_are_kept_of_those_who_allow_it_and_go_with_their_budget() -> None:
    history = History(Clock(), keeps_texts=lambda tenant: tenant == ACME)
    for tenant in (ACME, TenantId("other")):
        answer(history, request(1, tenant=tenant), receipt(device=2, computed=3))
    (_, mine), (_, theirs) = history.call(ACME, 1) or (), history.call(TenantId("other"), 1) or ()
    assert theirs is None
    assert mine is not None
    with EchoEngine() as engine:
        text = mine.to_dict(engine.tokenizer)
    assert text["answer"] == "a"
    pieces = [(one["segment"], one["source"], len(one["text"])) for one in text["prompt"]]
    assert pieces == [("p0", "device", 2), ("p0", "computed", 1), ("p1", "computed", 2)]
    texts = CallTexts(max_tokens=20)
    for number in range(6):
        texts.add(number, request(number), completion(receipt(computed=5)))
    assert [texts.get(number) is not None for number in range(6)] == [False, False, False, True, True, True]


def test_failures_are_counted_and_like_ones_share_a_line() -> None:
    clock = Clock()
    history = History(clock)
    for number in range(3):
        history.failed(ACME, CallFailure(429, "rate_limit_exceeded", f"tokens_per_minute={number}", "POST /v1/x"))
        clock.now += 1
    history.failed(ACME, CallFailure(503, "engine_closed", "x" * 2 * MAX_REASON, run="r"))
    told = history.state(ACME)["failures"]
    assert (told["refused"], told["failed"]) == (3, 1)
    failed, refused = told["list"]
    assert (refused["count"], refused["age_s"], refused["reason"]) == (3, 1.0, "tokens_per_minute=2")
    assert (failed["kind"], failed["run"], len(failed["reason"])) == ("failed", "r", MAX_REASON + 1)
    assert history.state(TenantId("other"))["failures"] == {"refused": 0, "failed": 0, "list": []}


def test_only_a_refusal_for_want_of_room_is_overload() -> None:
    clock = Clock()
    history = History(clock)
    history.failed(ACME, CallFailure(429, "rate_limit_exceeded", "…"))
    assert history.seconds_since_overload(ACME) is None
    history.failed(ACME, CallFailure(503, "overloaded", "…"))
    clock.now += 4
    assert history.seconds_since_overload(ACME) == 4
    assert history.state(ACME)["failures"]["refused"] == 2
