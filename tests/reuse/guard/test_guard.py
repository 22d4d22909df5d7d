"""The guard of an engine: orders, which calls are checked, what a receipt says, and bounds."""

import itertools
import json
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from math import inf

import pytest

from kedge.guard import EVERYTHING, DecisionKind, GuardMode, GuardNote, GuardOrders, GuardState
from kedge.reuse.guard import fidelity
from kedge.reuse.guard import guard as guard_module
from kedge.reuse.guard.comparison import DecisionComparison
from kedge.reuse.guard.fidelity import LEARNING, LEAST, RUNGS, RungFinding
from kedge.reuse.guard.fidelity import SETTLED as ENOUGH
from kedge.reuse.guard.guard import MORE, QualityGuard, SavedGroup
from kedge.reuse.guard.record import SETTLED, TRIALS
from kedge.settings import GuardSettings
from kedge.types import AgentId, GenerateRequest, Namespace, ReuseMode, SampleId, Segment, TenantId, WorkflowId

CLEAN = DecisionComparison({DecisionKind.FAR: False}, 0.0)
CHANGED = DecisionComparison({DecisionKind.FAR: True}, 2.0)
ALL = GuardSettings(share=1.0)
NONE = GuardSettings(share=0.0)
AS_SET = GuardOrders()


def request(
    *names: str, agent: str = "solver", tenant: str = "default", guard: GuardOrders = AS_SET
) -> GenerateRequest:
    """A request with these placeholders."""
    values = [Segment((1, 2), name, SampleId.parse(f"input_{name}@0")) for name in names]
    return GenerateRequest(
        (Segment((0,), "p0"), *values, Segment((3,), "p1")), reuse=ReuseMode.TRANSLATE, guard=guard,
        tenant=TenantId(tenant), workflow=WorkflowId("team"), agent=AgentId(agent),
    )  # fmt: skip


def orders(guard: QualityGuard, of: GenerateRequest) -> GuardOrders:
    return guard.verdict(of).orders


def breach(guard: QualityGuard, of: GenerateRequest, placeholder: str) -> None:
    before = orders(guard, of).epoch
    while (now := orders(guard, of)).epoch == before:
        guard.observe(replace(of, guard=now), (placeholder,), CHANGED)


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
        assert orders(guard, request("a", "b")).epoch == expected


def test_modes_of_a_request_override_the_settings() -> None:
    guard = QualityGuard(NONE)
    guard.observe(request("a"), ("a",), CHANGED)
    off, shadow = (request("a", guard=GuardOrders(mode)) for mode in (GuardMode.OFF, GuardMode.SHADOW))
    assert guard.verdict(off).orders == off.guard and not guard.verdict(off).is_checked and guard.notes(off) == ()
    fresh = QualityGuard(NONE.model_copy(update={"mode": GuardMode.OFF}))
    verdicts = [fresh.verdict(shadow) for _ in range(20)]
    assert all(one.is_checked and one.tried == EVERYTHING and one.orders.withholds("a") for one in verdicts)
    assert fresh.to_try(shadow, EVERYTHING) == [None], "as the settings say: nothing has to be proved"
    assert not fresh.verdict(request("a")).is_checked and not orders(fresh, request("a")).withheld
    verdict = proved().verdict(shadow)
    assert verdict.is_checked and verdict.tried == EVERYTHING and verdict.orders.withholds("a")
    assert orders(proved(), off) == off.guard and proved().fidelity(off) is None


@pytest.mark.parametrize(
    "plain", [replace(request("a"), reuse=ReuseMode.EXACT), replace(request("a"), reuse=ReuseMode.OFF), request()]
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
    assert note == GuardNote("a", GuardState.CANARY, 1, 0, note.bound) and 0.3 < note.bound < 1


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
        assert orders(guard, request("a")).withheld == {"a"}
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
        guard.observe(other, ("a",), CLEAN)
    assert orders(guard, request("a")).withheld == {"a"} and orders(guard, request("a")).epoch == 1
    for number in range(50):  # its own do
        guard.observe(request("a", agent=f"other-{number}"), ("a",), CLEAN)
    assert orders(guard, request("a")).epoch == 1
    guard, saved = QualityGuard(NONE), guard.saved()
    guard.restore({group: SavedGroup.model_validate(data) for group, data in saved.items()})
    breach(guard, request("a"), "a")
    assert orders(guard, request("a")).epoch == 2


def test_changes_are_logged_in_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    guard = QualityGuard(NONE)
    with caplog.at_level(logging.INFO):
        hostile = request("a", agent="x\nERROR forged")
        guard.translated(hostile, ("a",))
        breach(guard, hostile, "a")
    assert len(caplog.messages) == 3  # canary, suspect, breach
    assert not any("\n" in message for message in caplog.messages)


def test_sentinels_refute_by_the_mean_of_a_call() -> None:
    """A single token, so a placeholder of few, may be far off by chance."""
    one, asked = QualityGuard(NONE), request("a", "b")
    assert not one.sentinels_read(asked, {"a": [1.1], "b": [0.1] * 3}, {})
    assert not orders(one, asked).withheld
    assert one.sentinels_read(asked, {"a": [1.1], "b": [0.1]}, {})
    assert orders(one, asked).withheld == {"a"}


@pytest.mark.parametrize(("times", "between", "breaches"), [(2, 0, 0), (3, 0, 1), (6, 200, 0)])
def test_only_refutations_in_a_row_discard_the_anchors(times: int, between: int, breaches: int) -> None:
    """As seen in 10,000 calls without a fault: two of them, of 0.58 and 0.51."""
    one, asked = QualityGuard(NONE), request("a")
    for _ in range(times):
        for _ in range(between):
            one.sentinels_read(asked, {"a": [0.1]}, {})
        assert one.sentinels_read(asked, {"a": [0.9]}, {})
    assert orders(one, asked).epoch == breaches == one.breaches and one.suspicions == times - breaches


def test_weak_tokens_refute_only_by_a_multiple_of_what_is_usual_of_them() -> None:
    one, asked = QualityGuard(NONE), request("a")
    assert not one.sentinels_read(asked, {}, {"a": [0.9] * 6})
    for _ in range(SETTLED):
        assert not one.sentinels_read(asked, {}, {"a": [0.9] * 6})
    assert not one.sentinels_read(asked, {}, {"a": [1.4] * 6})
    for _ in range(20):  # it is not learned from a refuted call what is usual
        assert one.sentinels_read(asked, {}, {"a": [2.4] * 6})
    assert orders(one, asked).withheld == {"a"}


def grown_up(*names: str) -> QualityGuard:
    """A guard that has seen these placeholders translated often enough to know them."""
    one = QualityGuard(NONE)
    for _ in range(SETTLED):
        one.translated(request(*names), names)
    return one


def test_later_all_are_watched_in_a_share_of_the_calls_and_what_is_new_in_all() -> None:
    one, asked = grown_up("a", "b", "d"), request("a", "b", "c", "d")  # c was never translated
    assert orders(QualityGuard(NONE), asked).watched == {*"abcd"}
    seen = [orders(one, asked) for _ in range(400)]
    assert {each.watched for each in seen} == {frozenset("c"), frozenset("abcd")}
    assert all(each.sentinels == 2 for each in seen)
    assert 70 < [each.watched for each in seen].count(frozenset("abcd")) < 130
    one.observe(asked, ("a",), CHANGED)
    assert all(orders(one, asked).watched == {*"abcd"} for _ in range(20)), "while one is withheld"


def test_after_a_suspicion_it_is_new_again() -> None:
    one, asked = QualityGuard(NONE), request("a")
    for _ in range(SETTLED):
        assert orders(one, asked).watched == {"a"}
        one.translated(asked, ("a",))
    one.observe(asked, ("a",), CHANGED)
    for _ in range(TRIALS):
        one.observe(asked, ("a",), CLEAN)
    assert all(orders(one, asked).watched == {"a"} and not orders(one, asked).withheld for _ in range(20))


# with a budget of fidelity -----------------------------------------------------------------------------------------

BUDGET = 0.002
SETTINGS = GuardSettings(fidelity=BUDGET, share=0.1)
MOVED, ANCHORS = 0, 1
new_tokens = itertools.count()
assert not RUNGS[MOVED].by_anchors and RUNGS[ANCHORS].by_anchors
SHADOW, OFF = (GuardOrders(mode) for mode in (GuardMode.SHADOW, GuardMode.OFF))


def unlike(of: GenerateRequest) -> GenerateRequest:
    """A request like this with a value of its own."""
    return replace(of, segments=(of.segments[0], replace(of.segments[1], tokens=(next(new_tokens),)), *of.segments[2:]))


def find(guard: QualityGuard, of: GenerateRequest, rung: int, divergence: float = 0.0, times: int = LEAST) -> None:
    """Let so many comparisons of a rung come in, each of another prompt."""
    for _ in range(times):
        guard.verdict(of)
        guard.found(unlike(of), ("a",), [RungFinding(rung, divergence, 0.1 + 0.01 * rung)])


def proved(rung: int = ANCHORS, settings: GuardSettings = SETTINGS) -> QualityGuard:
    guard = QualityGuard(settings)
    find(guard, request("a"), rung)
    return guard


def checked(guard: QualityGuard, of: GenerateRequest, times: int = 400) -> float:
    """The share of an agent's translated calls that are compared."""
    count = 0
    for _ in range(times):
        count += guard.verdict(of).is_checked
        guard.translated(of, ("a",))
    return count / times


def test_until_a_rung_is_proved_nothing_is_translated_and_all_are_tried() -> None:
    guard, asked = QualityGuard(SETTINGS), request("a", "b")
    for _ in range(20):
        verdict = guard.verdict(asked)
        assert verdict.orders.withholds("a") and verdict.orders.withholds("b")
        assert (verdict.is_checked, verdict.tried, verdict.orders.rung) == (True, EVERYTHING, LEARNING)
        assert not verdict.orders.held_out, "anchors are learned from it"
        tried = guard.to_try(replace(asked, guard=verdict.orders), EVERYTHING)
        assert set(tried) == {*range(len(RUNGS))}
    assert RUNGS[LEARNING].by_anchors


def test_a_proved_rung_serves_its_agent_alone() -> None:
    guard = proved()
    orders = guard.verdict(request("a")).orders
    assert orders.rung == ANCHORS and not orders.withheld
    for other in (request("a", agent="critic"), request("a", tenant="other")):
        assert guard.verdict(other).orders.withholds("a")
        assert guard.fidelity(other) is not None and guard.fidelity(other).rung == ""  # type: ignore[union-attr]


def test_another_wording_of_its_template_is_proved_by_itself() -> None:
    """Also for what is moved without anchors: the new role may want the opposite of what the old one did."""
    guard, asked = proved(MOVED), request("a")
    checked(guard, asked, SETTLED)
    head, value, end = asked.segments
    for segments in ((replace(head, tokens=(9,)), value, end), (head, replace(value, base_context=(9,)), end)):
        other = replace(asked, segments=segments)
        assert guard.verdict(other).orders.withholds("a") and guard.fidelity(other).checks == 0  # type: ignore[union-attr]
        find(guard, other, MOVED)
        assert guard.verdict(other).orders.rung == MOVED and checked(guard, other, SETTLED) == 1.0
        guard.verdict(unproved := replace(asked, segments=(head, *segments)))
        assert guard.stats()[0]["fidelity"] == asdict(guard.fidelity(unproved)), "of the wording that was asked last"
    assert guard.verdict(asked).orders.rung == MOVED and guard.verdict(asked).is_settled


def test_a_request_may_have_a_budget_of_its_own() -> None:
    guard = QualityGuard(SETTINGS)
    find(guard, request("a"), MOVED, BUDGET / 5, times=30)
    assert guard.verdict(request("a")).orders.rung == MOVED
    strict, free = (request("a", guard=GuardOrders(fidelity=budget)) for budget in (BUDGET / 100, inf))
    assert guard.verdict(strict).orders.withholds("a")
    anything = guard.verdict(free).orders
    assert anything.rung is None and not anything.withheld and guard.fidelity(free) is None
    assert guard.fidelity(strict).budget == BUDGET / 100  # type: ignore[union-attr]
    assert guard.verdict(request("a")).orders.rung == MOVED, "which changes nothing of the others"


def test_comparisons_wait_once_the_first_calls_were_compared_unless_the_mean_seems_to_rise() -> None:
    guard, asked = proved(), request("a")
    assert not guard.verdict(asked).is_settled
    checked(guard, asked, SETTLED)
    assert guard.verdict(asked).is_settled
    find(guard, asked, ANCHORS, 0.6 * BUDGET, times=1)
    assert guard.verdict(asked).is_settled and checked(guard, asked, 20) == 1.0, "it is looked at, and may wait"
    find(guard, asked, ANCHORS, 0.6 * BUDGET, times=3)
    assert guard.verdict(asked).orders.rung == ANCHORS and not guard.verdict(asked).is_settled


def test_more_is_compared_near_the_budget_and_while_decisions_are_not_known_well() -> None:
    guard, asked = proved(), request("a")
    assert checked(guard, asked, SETTLED) == 1.0
    assert 0.3 < checked(guard, asked) < 0.5, f"{MORE} times as many"
    for _ in range(400):
        guard.observe(asked, ("a",), CLEAN)
    assert guard.notes(asked)[0].state is GuardState.ON
    assert 0.06 < checked(guard, asked) < 0.14
    find(guard, asked, ANCHORS, 0.4 * BUDGET, times=60)
    assert 0.2 < checked(guard, asked) < 0.4


def test_all_are_compared_while_the_mean_may_be_above_the_budget_and_wait_once_more_would_not_say() -> None:
    guard, asked = QualityGuard(SETTINGS), request("a")
    find(guard, asked, MOVED, 0.2 * BUDGET, times=16)
    checked(guard, asked, SETTLED)
    assert guard.verdict(asked).is_settled and checked(guard, asked) < 0.5
    for _ in range(20):  # the mean stays below the budget, and the second of each pair says that it does not rise
        for share in (1.3, 0.15):
            find(guard, asked, MOVED, share * BUDGET, times=1)
        found = guard.fidelity(asked)
        assert found and found.rung == RUNGS[MOVED].name and found.bound
        if found.bound > BUDGET:
            assert checked(guard, asked, 50) == 1.0
            assert guard.verdict(asked).is_settled == (found.checks >= ENOUGH)
    assert found.bound > BUDGET and found.checks > ENOUGH


@pytest.mark.parametrize(("noise", "counts"), [(0.0, False), (1e-6, False), (3e-4, True)])
def test_a_control_is_needed_until_rounding_is_known_not_to_count(noise: float, counts: bool) -> None:
    """Rounding is the model's, so that those of any two agents say it."""
    guard = QualityGuard(SETTINGS)
    for asked in (request("a"), request("a", agent="critic")):
        guard.verdict(asked)
        assert guard.needs_control(asked)
        guard.found(unlike(asked), ("a",), [], noise=noise)
    assert guard.needs_control(request("a", agent="third")) is counts


def test_beside_a_check_of_what_is_served_one_that_may_be_cheaper_is_tried() -> None:
    guard, asked = proved(), request("a")
    assert set(guard.to_try(asked, "")) == {MOVED}
    find(guard, asked, MOVED, 30 * BUDGET, times=40)
    assert MOVED not in {rung for _ in range(60) for rung in guard.to_try(asked, "")}


def test_once_so_many_comparisons_have_proved_nothing_others_can_wait() -> None:
    """An agent that is never proved would else take all of the budget for ever."""
    guard, asked = QualityGuard(SETTINGS), request("a")
    find(guard, asked, ANCHORS, BUDGET, times=fidelity.SETTLED - 1)
    assert guard.verdict(asked).tried == EVERYTHING and not guard.verdict(asked).is_settled
    find(guard, asked, ANCHORS, BUDGET, times=1)
    assert guard.verdict(asked).tried == EVERYTHING and guard.verdict(asked).is_settled


@pytest.mark.parametrize(("mode", "is_tried"), [(GuardMode.ON, False), (GuardMode.SHADOW, True)])
def test_a_call_that_was_computed_while_its_agent_was_proved_is_not_tried(mode: GuardMode, is_tried: bool) -> None:
    """Unless nothing is ever translated, and all is measured."""
    guard, asked = proved(), request("a", guard=GuardOrders(mode))
    assert bool(guard.to_try(asked, EVERYTHING)) is is_tried


def test_a_withheld_placeholder_is_tried_on_the_rung_that_serves() -> None:
    guard, asked = proved(), request("a")
    guard.observe(asked, ("a",), CHANGED)
    verdicts = [guard.verdict(asked) for _ in range(40)]
    assert all(one.orders.withheld == {"a"} and one.orders.rung == ANCHORS for one in verdicts)
    tried = [one for one in verdicts if one.tried]
    assert tried and all(one.tried == "a" for one in tried)
    assert guard.to_try(replace(asked, guard=tried[0].orders), "a") == [ANCHORS]


def test_with_the_anchors_what_was_proved_of_them_is_discarded() -> None:
    guard, asked = proved(), request("a")
    breach(guard, asked, "a")
    assert orders(guard, asked).epoch == 1 and orders(guard, asked).withholds(EVERYTHING)
    find(guard, asked, ANCHORS)  # late checks of calls that they served, also below, say nothing of those that follow
    for _ in range(20):
        guard.observe(asked, ("a",), CHANGED)
        assert guard.sentinels_read(asked, {"a": [0.9]}, {})
    assert orders(guard, asked).epoch == guard.breaches == 1 and guard.fidelity(asked).curve == ()  # type: ignore[union-attr]
    by_sentinels, other = proved(), proved(MOVED)
    for _ in range(3):
        by_sentinels.sentinels_read(asked, {"a": [0.9]}, {})
    assert by_sentinels.breaches == 1 and by_sentinels.fidelity(asked) == guard.fidelity(asked)
    breach(other, asked, "a")
    assert orders(other, asked).rung == MOVED and orders(other, asked).withheld == {"a"}


def test_an_agent_that_is_never_proved_is_told_of() -> None:
    guard = QualityGuard(SETTINGS)
    find(guard, request("a"), MOVED, 10 * BUDGET, times=20)
    (entry,) = json.loads(json.dumps(guard.stats(), allow_nan=False))
    assert (entry["agent"], entry["state"], entry["checks"]) == ("solver", "shadow", 0)
    assert entry["fidelity"]["rung"] == "" and entry["fidelity"]["curve"][0][:2] == ["moved", pytest.approx(0.02)]


@pytest.mark.parametrize("budget", [BUDGET, inf])
def test_figures_are_json_whatever_was_asked(budget: float) -> None:
    guard = QualityGuard(GuardSettings(fidelity=budget))
    for own in (None, 1e-9, inf):
        asked = request("a", guard=GuardOrders(fidelity=own))
        find(guard, asked, ANCHORS)
        guard.translated(asked, ("a",))
    json.dumps(guard.stats(), allow_nan=False)


def test_what_is_proved_is_saved_with_the_records(caplog: pytest.LogCaptureFixture) -> None:
    guard, other = proved(), QualityGuard(SETTINGS)
    find(guard, request("a", agent="critic"), MOVED, 10 * BUDGET)
    guard.observe(request("a", tenant="other"), ("a",), CHANGED)
    saved = json.loads(json.dumps([*guard.saved().items()]))
    groups = {group: SavedGroup.model_validate(data) for group, (_, data) in zip(guard.saved(), saved, strict=True)}
    other.restore(groups)
    assert other.saved() == guard.saved()
    assert other.verdict(request("a")).orders.rung == ANCHORS
    assert other.verdict(request("a", agent="critic")).orders.withholds(EVERYTHING)
    assert orders(other, request("a", tenant="other")).withholds("a")
    for proof in (proof for group in groups.values() for proof in group.proofs):
        proof.wording = ""  # as earlier versions saved it
    other.restore(groups)
    assert other.verdict(request("a")).orders.withholds("a") and "guard: a proof of critic says not" in caplog.text


@pytest.mark.parametrize("data", [
    {}, {"records": []}, {"proofs": []}, {"records": [], "proofs": [{}]}, {"records": 3, "proofs": []},
    {"records": [], "proofs": [{"agent": "a", "rungs": {"1": [{}, 3]}}]},
    {"records": [["a", "p", {"state": "perhaps"}]], "proofs": []},
])  # fmt: skip
def test_saved_nonsense_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        SavedGroup.model_validate(data)


def test_one_prompt_again_and_again_proves_nothing() -> None:
    guard, asked = QualityGuard(SETTINGS), request("a")
    for _ in range(4 * LEAST):
        guard.verdict(asked)
        guard.found(asked, ("a",), [RungFinding(ANCHORS, 0.0, 0.1)])
    assert guard.verdict(asked).orders.withholds("a")


def test_proofs_are_bounded_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "ENTRIES", 4)
    guard = QualityGuard(SETTINGS)
    for number in range(20):
        find(guard, request("a", agent=f"agent-{number}"), ANCHORS, times=1)
    asked = request("a", agent="agent-19")
    for word in range(100):  # those of others stay
        guard.verdict(replace(asked, segments=(Segment((word,), "p0"), *asked.segments)))
    held = Counter(one.agent for one in SavedGroup.model_validate(*guard.saved().values()).proofs)
    assert held == {"agent-16": 1, "agent-17": 1, "agent-18": 1, "agent-19": 16}
    guard.clear()
    guard.found(asked, ("a",), [RungFinding(ANCHORS, 0.0, 0.1)])
    assert guard.saved() == {}, "findings of an agent that is not known any more are dropped"


def test_threads_serve_prove_and_report_at_once() -> None:
    guard, each = QualityGuard(ALL.model_copy(update={"fidelity": BUDGET})), 60

    def work(number: int) -> None:
        asked = request("a", "b", agent=f"agent-{number % 4}")
        for turn in range(each):
            verdict = guard.verdict(asked)
            guard.to_try(replace(asked, guard=verdict.orders), verdict.tried)
            guard.found(unlike(asked), ("a",), [RungFinding(turn % len(RUNGS), 0.0, 0.1)])
            guard.translated(asked, ("a",))
            guard.observe(asked, ("a",), CLEAN)
            assert guard.notes(asked) and guard.fidelity(asked) and guard.stats() and guard.saved()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert [entry["checks"] for entry in guard.stats()] == [4 * each] * 4
