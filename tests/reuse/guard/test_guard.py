"""The guard of an engine: orders, which calls are checked, what a receipt says, and bounds."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kedge.guard import EVERYTHING, DecisionKind, DecisionNote, GuardMode, GuardNote, GuardOrders, GuardState
from kedge.reuse.guard import guard as guard_module
from kedge.reuse.guard.comparison import DecisionComparison
from kedge.reuse.guard.guard import QualityGuard
from kedge.reuse.guard.record import SETTLED, TRIALS, SentinelFinding
from kedge.settings import GuardSettings
from kedge.types import (
    AgentId,
    GenerateRequest,
    Namespace,
    ReuseMode,
    SampleId,
    Segment,
    TenantId,
    WorkflowId,
)

CLEAN = DecisionComparison({DecisionKind.FAR: False}, 0.0)
SAME = DecisionComparison({DecisionKind.FAR: False}, 0.0)
CHANGED = DecisionComparison({DecisionKind.FAR: True}, 2.0)
ALL = GuardSettings(share=1.0)
AS_SET = GuardOrders()
NONE = GuardSettings(share=0.0)


def request(
    *names: str, agent: str = "solver", tenant: str = "default", guard: GuardOrders = AS_SET
) -> GenerateRequest:
    """A request with these placeholders."""
    values = [Segment((1, 2), name, SampleId.parse(f"input_{name}@0")) for name in names]
    return GenerateRequest(
        (Segment((0,), "p0"), *values, Segment((3,), "p1")), reuse=ReuseMode.TRANSLATE, guard=guard,
        tenant=TenantId(tenant), workflow=WorkflowId("team"), agent=AgentId(agent),
    )  # fmt: skip


def breach(guard: QualityGuard, of: GenerateRequest, placeholder: str) -> None:
    before = guard.orders(of).epoch
    while guard.orders(of).epoch == before:
        guard.observe(of, (placeholder,), CHANGED)


def test_at_first_nothing_is_withheld_and_a_share_is_checked() -> None:
    verdicts = [QualityGuard(settings).verdict(request("a")) for settings in (ALL, NONE)]
    assert [verdict.is_checked for verdict in verdicts] == [True, False]
    assert all(
        verdict.orders == GuardOrders(sentinels=2, watched=frozenset("a")) and not verdict.tried for verdict in verdicts
    )


def test_the_checked_share_falls_when_all_placeholders_are_on() -> None:
    guard = QualityGuard(GuardSettings(share=0.1))
    guard.translated(request("a", "b"), ("a", "b"))
    for _ in range(400):
        guard.observe(request("a", "b"), ("a",), CLEAN)
    assert 120 < sum(guard.verdict(request("a", "b")).is_checked for _ in range(400)) < 200
    assert 20 < sum(guard.verdict(request("a")).is_checked for _ in range(400)) < 65
    assert guard.notes(request("a"))[0].state is GuardState.ON


def test_a_suspect_placeholder_is_withheld_and_tried_in_calls_that_are_not_learned_from() -> None:
    guard = QualityGuard(NONE)
    guard.observe(request("a", "b"), ("b",), CHANGED)
    verdicts = [guard.verdict(request("a", "b")) for _ in range(100)]
    assert all(verdict.orders.withheld == {"b"} for verdict in verdicts)
    tried = [verdict for verdict in verdicts if verdict.tried]
    assert all(verdict.is_checked and verdict.tried == "b" and verdict.orders.held_out for verdict in tried)
    assert 30 < len(tried) < 70 and sum(verdict.orders.held_out for verdict in verdicts) == len(tried)
    assert not guard.verdict(request("a")).orders.withheld
    assert not guard.verdict(request("b", agent="critic")).orders.withheld
    assert not guard.verdict(request("b", tenant="other")).orders.withheld


def test_what_is_translated_is_checked_also_while_another_placeholder_is_withheld() -> None:
    guard = QualityGuard(ALL)
    guard.observe(request("a", "b"), ("b",), CHANGED)
    verdicts = [guard.verdict(request("a", "b")) for _ in range(40)]
    assert {verdict.tried for verdict in verdicts} == {"", "b"} and all(verdict.is_checked for verdict in verdicts)
    guard.observe(request("a", "b"), ("a",), CHANGED)
    verdicts = [guard.verdict(request("a", "b")) for _ in range(60)]
    assert {verdict.tried for verdict in verdicts} == {"", "a", "b"}, "none of both is starved"
    assert not any(verdict.is_checked for verdict in verdicts if not verdict.tried)


def test_every_breach_of_any_placeholder_is_a_new_epoch() -> None:
    """Otherwise the second one's anchors would be used on."""
    guard = QualityGuard(NONE)
    for expected, placeholder in enumerate("abab", 1):
        breach(guard, request("a", "b"), placeholder)
        assert guard.orders(request("a", "b")).epoch == expected


def test_modes_of_a_request_override_the_settings() -> None:
    guard = QualityGuard(NONE)
    guard.observe(request("a"), ("a",), CHANGED)
    off, shadow = (request("a", guard=GuardOrders(mode)) for mode in (GuardMode.OFF, GuardMode.SHADOW))
    assert guard.verdict(off).orders == off.guard and not guard.verdict(off).is_checked and guard.notes(off) == ()
    fresh = QualityGuard(NONE.model_copy(update={"mode": GuardMode.OFF}))
    verdicts = [fresh.verdict(shadow) for _ in range(20)]
    assert all(one.is_checked and one.tried == EVERYTHING and one.orders.withholds("a") for one in verdicts)
    assert fresh.to_try(shadow, EVERYTHING) == [None], "as the settings say: nothing has to be proved"
    assert not fresh.verdict(request("a")).is_checked and not fresh.orders(request("a")).withheld


@pytest.mark.parametrize(
    "plain",
    [replace(request("a"), reuse=ReuseMode.EXACT), replace(request("a"), reuse=ReuseMode.OFF), request()],
)
def test_what_is_not_translated_anyway_is_not_watched(plain: GenerateRequest) -> None:
    guard = QualityGuard(ALL)
    guard.observe(request("a"), ("a",), CHANGED)
    verdict = guard.verdict(plain)
    assert not verdict.is_checked and not verdict.orders.withheld and guard.notes(plain) == ()


def test_a_note_has_the_state_and_its_evidence() -> None:
    guard = QualityGuard(NONE)
    guard.translated(request("a"), ("a",))
    guard.observe(request("a"), ("a",), CLEAN)
    (note,) = guard.notes(request("a", "b", "a"))
    decisions = (DecisionNote(DecisionKind.FAR, 1, 0, note.bound),)
    assert note == GuardNote("a", GuardState.CANARY, 1, 0, note.bound, decisions) and 0.3 < note.bound < 1


def test_a_tenant_sees_its_own_records() -> None:
    guard = QualityGuard(NONE)
    for tenant in ("acme", "other"):
        guard.translated(request("a", tenant=tenant, agent=f"of-{tenant}"), ("a",))
    (mine,) = guard.stats(lambda namespace: namespace == Namespace(TenantId("acme")))
    assert mine["agent"] == "of-acme" and "acme" not in str({**mine, "agent": ""})
    assert len(guard.stats()) == 2
    guard.clear()
    assert guard.stats() == []


def test_requests_are_served_between_any_two_records_of_a_report() -> None:
    """All records were copied under the lock that every request takes."""
    guard = QualityGuard(NONE)
    asked = [request("a", agent=f"agent-{number}") for number in range(3)]
    for one in asked:
        guard.translated(one, ("a",))
    with ThreadPoolExecutor(1) as another:

        def owns(_: Namespace) -> bool:
            return all(another.submit(guard.notes, one).result(timeout=60) for one in asked)

        assert [entry["agent"] for entry in guard.stats(owns)] == ["agent-0", "agent-1", "agent-2"]


def test_records_are_bounded_and_one_in_use_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is only asked for: an agent that is withheld would else come back by others' translations."""
    monkeypatch.setattr(guard_module, "ENTRIES", 8)
    guard = QualityGuard(NONE)
    guard.observe(request("a"), ("a",), CHANGED)
    for number in range(100):
        guard.translated(request("a", agent=f"other-{number}"), ("a",))
        assert guard.orders(request("a")).withheld == {"a"}
    assert len(guard.stats()) == 8


def test_an_agent_that_reads_in_place_only_is_not_tried() -> None:
    """Its translation is its own KV, whatever is found out."""
    guard = QualityGuard(NONE.model_copy(update={"fidelity": 0.002}))
    asked = request("a", guard=GuardOrders(fidelity=0.002))
    head, value, end = asked.segments
    in_place = replace(asked, segments=(head, replace(value, base_context=head.tokens, in_context=True), end))
    assert [guard.verdict(one).is_checked for one in (asked, in_place)] == [True, False]
    assert guard.verdict(in_place).orders.withheld


def test_another_tenant_pushes_out_no_records_and_what_was_condemned_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "ENTRIES", 8)
    guard = QualityGuard(NONE)
    breach(guard, request("a"), "a")
    for number in range(50):
        other = replace(request("a", agent=f"other-{number}", tenant="b"), partition=f"salt-{number}")
        guard.observe(other, ("a",), SAME)
    assert guard.orders(request("a")).withheld == {"a"} and guard.orders(request("a")).epoch == 1
    for number in range(50):  # its own do
        guard.observe(request("a", agent=f"other-{number}"), ("a",), SAME)
    assert guard.orders(request("a")).epoch == 1
    breach(guard, request("a"), "a")
    assert guard.orders(request("a")).epoch == 2


def test_changes_are_logged_in_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    guard = QualityGuard(NONE)
    with caplog.at_level(logging.INFO):
        hostile = request("a", agent="x\nERROR forged")
        guard.translated(hostile, ("a",))
        breach(guard, hostile, "a")
    assert len(caplog.messages) == 3  # canary, suspect, breach
    assert not any("\n" in message for message in caplog.messages)


def test_32_threads_at_once_count_everything() -> None:
    guard, each = QualityGuard(ALL), 200

    def work(number: int) -> None:
        mine = request("a", "b", agent=f"agent-{number % 4}")
        for _ in range(each):
            guard.verdict(mine)
            guard.translated(mine, ("a",))
            guard.observe(mine, ("a",), CLEAN)
            guard.notes(mine)
            guard.stats()[:1]

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(work, range(32)))
    assert [entry["checks"] for entry in guard.stats()] == [8 * each] * 4


def test_sentinels_refute_by_the_mean_of_a_call() -> None:
    """A single token, so a placeholder of few, may be far off by chance."""
    one, asked = QualityGuard(NONE), request("a", "b")
    assert one.sentinels_read(asked, {"a": [1.1], "b": [0.1] * 3}) is SentinelFinding.USUAL
    assert not one.orders(asked).withheld
    assert one.sentinels_read(asked, {"a": [1.1], "b": [0.1]}) is SentinelFinding.REFUTED
    assert one.orders(asked).withheld == {"a"}


def test_what_is_usual_is_not_learned_from_a_refuted_call() -> None:
    one, asked = QualityGuard(NONE), request("a", "b")
    one.sentinels_read(asked, {"a": [0.1], "b": [0.1]})
    one.sentinels_read(asked, {"a": [9.0], "b": [0.2]})
    assert [entry["sentinel_error"] for entry in one.stats()] == [0.1, 0.1]


def test_refutations_in_a_row_discard_the_anchors() -> None:
    one, asked = QualityGuard(NONE), request("a")
    for _ in range(2):
        one.sentinels_read(asked, {"a": [0.9]})
        assert one.orders(asked).epoch == 0
    one.sentinels_read(asked, {"a": [0.9]})
    assert one.orders(asked).epoch == 1 and (one.suspicions, one.breaches) == (2, 1)


def test_rare_refutations_discard_nothing() -> None:
    """As seen in 10,000 calls without a fault: two of them, of 0.58 and 0.51."""
    one, asked = QualityGuard(NONE), request("a")
    for _ in range(6):
        for _ in range(200):
            one.sentinels_read(asked, {"a": [0.1]})
        assert one.sentinels_read(asked, {"a": [0.9]}) is SentinelFinding.REFUTED
    assert one.orders(asked).epoch == 0 and (one.suspicions, one.breaches) == (6, 0)


def test_weak_tokens_refute_only_by_a_multiple_of_what_is_usual_of_them() -> None:
    one, asked = QualityGuard(NONE), request("a")
    assert one.sentinels_read(asked, {"a": [0.9] * 6}, weak=True) is SentinelFinding.USUAL
    for _ in range(SETTLED):
        assert one.sentinels_read(asked, {"a": [0.9] * 6}, weak=True) is SentinelFinding.USUAL
    assert one.sentinels_read(asked, {"a": [1.4] * 6}, weak=True) is SentinelFinding.UNUSUAL
    assert one.sentinels_read(asked, {"a": [2.4] * 6}, weak=True) is SentinelFinding.REFUTED
    assert one.orders(asked).withheld == {"a"}


def grown_up(*names: str) -> QualityGuard:
    """A guard that has seen these placeholders translated often enough to know them."""
    one = QualityGuard(NONE)
    for _ in range(SETTLED):
        one.translated(request(*names), names)
    return one


def test_translated_tokens_of_what_is_new_are_drawn_in_every_call() -> None:
    one, asked = QualityGuard(NONE), request("a", "b")
    for _ in range(SETTLED):
        assert one.orders(asked).watched == {"a", "b"}
        one.translated(asked, ("a", "b"))
    assert any(not one.orders(asked).watched for _ in range(20))


def test_later_all_are_watched_in_a_share_of_the_calls_and_what_is_new_in_all() -> None:
    one, asked = grown_up("a", "b", "d"), request("a", "b", "c", "d")  # c was never translated
    seen = [one.orders(asked) for _ in range(400)]
    assert {orders.watched for orders in seen} == {frozenset("c"), frozenset("abcd")}
    assert all(orders.sentinels == 2 for orders in seen)
    assert 70 < [orders.watched for orders in seen].count(frozenset("abcd")) < 130


def test_while_one_is_new_it_alone_is_watched_and_while_one_is_withheld_all_are() -> None:
    one, asked = grown_up("a", "b"), request("a", "b", "c")
    one.translated(asked, ("c",))
    assert {one.orders(asked).watched for _ in range(40)} == {frozenset("c"), frozenset("abc")}
    one = grown_up("a", "b")
    one.observe(asked, ("a",), CHANGED)
    assert all(one.orders(asked).watched == {"a", "b", "c"} for _ in range(20))


def test_after_a_suspicion_it_is_new_again() -> None:
    one, asked = QualityGuard(NONE), request("a")
    for _ in range(SETTLED):
        one.translated(asked, ("a",))
    one.observe(asked, ("a",), CHANGED)
    for _ in range(TRIALS):
        one.observe(asked, ("a",), CLEAN)
    assert all(one.orders(asked).watched == {"a"} and not one.orders(asked).withheld for _ in range(20))
