"""The guard with a budget of fidelity: what it orders until a rung is proved, what is compared, and what is kept."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf

import pytest

from kedge.guard import EVERYTHING, GuardMode, GuardOrders, GuardState
from kedge.reuse.guard import guard as guard_module
from kedge.reuse.guard.fidelity import LEARNING, LEAST, RUNGS, RungFinding
from kedge.reuse.guard.guard import MORE, QualityGuard, SavedGroup
from kedge.reuse.guard.record import SETTLED
from kedge.settings import GuardSettings
from kedge.types import GenerateRequest
from tests.reuse.guard.test_guard import CHANGED, CLEAN, breach, request

BUDGET = 0.002
SETTINGS = GuardSettings(fidelity=BUDGET, share=0.1)
MOVED, ANCHORS = 0, 1
assert not RUNGS[MOVED].by_anchors and RUNGS[ANCHORS].by_anchors
SHADOW, OFF = (GuardOrders(mode) for mode in (GuardMode.SHADOW, GuardMode.OFF))


NUMBERS = itertools.count()


def unlike(of: GenerateRequest) -> GenerateRequest:
    """A request like this with a value of its own."""
    return replace(of, segments=(*of.segments, replace(of.segments[1], tokens=(next(NUMBERS),))))


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
        tried = guard.to_try(verdict_request(asked, verdict.orders), EVERYTHING)
        assert set(tried) == {*range(len(RUNGS))}
    assert RUNGS[LEARNING].by_anchors


def verdict_request(asked: GenerateRequest, orders: GuardOrders) -> GenerateRequest:
    return replace(asked, guard=orders)


def test_a_proved_rung_serves_its_agent_alone() -> None:
    guard = proved()
    orders = guard.verdict(request("a")).orders
    assert orders.rung == ANCHORS and not orders.withheld
    for other in (request("a", agent="critic"), request("a", tenant="other")):
        assert guard.verdict(other).orders.withholds("a")
        assert guard.fidelity(other) is not None and guard.fidelity(other).rung == ""  # type: ignore[union-attr]


def test_what_is_expected_of_an_agent_is_ordered_as_it_will_be_served() -> None:
    guard = proved()
    assert guard.orders(request("a")).rung == ANCHORS
    assert guard.orders(request("a", agent="critic")).withholds("a")


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


def test_without_a_budget_a_request_may_bring_one() -> None:
    guard, strict = QualityGuard(GuardSettings(fidelity=inf)), request("a", guard=GuardOrders(fidelity=BUDGET))
    assert not guard.verdict(request("a")).orders.withheld
    assert guard.verdict(strict).orders.withholds("a")
    find(guard, strict, ANCHORS)
    assert guard.verdict(strict).orders.rung == ANCHORS and guard.verdict(request("a")).orders.rung is None


def test_modes_hold_whatever_is_proved() -> None:
    guard = proved()
    shadow = guard.verdict(request("a", guard=SHADOW))
    assert shadow.orders.withholds("a") and shadow.is_checked and shadow.tried == EVERYTHING
    off = request("a", guard=OFF)
    assert guard.verdict(off).orders == OFF and guard.fidelity(off) is None


def test_the_first_calls_on_a_rung_are_all_compared() -> None:
    guard, asked = proved(), request("a")
    assert checked(guard, asked, SETTLED) == 1.0
    assert checked(guard, asked) < 0.6


def test_more_is_compared_near_the_budget_and_while_decisions_are_not_known_well() -> None:
    guard, asked = proved(), request("a")
    checked(guard, asked, SETTLED)
    assert 0.3 < checked(guard, asked) < 0.5, f"{MORE} times as many"
    for _ in range(400):
        guard.observe(asked, ("a",), CLEAN)
    assert guard.notes(asked)[0].state is GuardState.ON
    assert 0.06 < checked(guard, asked) < 0.14
    find(guard, asked, ANCHORS, 0.9 * BUDGET, times=60)
    assert guard.verdict(asked).orders.rung == ANCHORS
    assert 0.3 < checked(guard, asked) < 0.5


@pytest.mark.parametrize(("noise", "counts"), [(0.0, False), (1e-6, False), (3e-4, True)])
def test_a_control_is_needed_until_rounding_is_known_not_to_count(noise: float, counts: bool) -> None:
    guard, asked = QualityGuard(SETTINGS), request("a")
    for _ in range(LEAST):
        guard.verdict(asked)
        assert guard.needs_control(asked)
        guard.found(unlike(asked), ("a",), [], noise=noise)
    assert guard.needs_control(asked) is counts and guard.needs_control(request("a", agent="critic"))


def test_beside_a_check_of_what_is_served_one_that_may_be_cheaper_is_tried() -> None:
    guard, asked = proved(), request("a")
    assert set(guard.to_try(asked, "")) == {MOVED}
    find(guard, asked, MOVED, 30 * BUDGET, times=40)
    assert MOVED not in {rung for _ in range(60) for rung in guard.to_try(asked, "")}


def test_a_withheld_placeholder_is_tried_on_the_rung_that_serves() -> None:
    guard, asked = proved(), request("a")
    guard.observe(asked, ("a",), CHANGED)
    verdicts = [guard.verdict(asked) for _ in range(40)]
    assert all(one.orders.withheld == {"a"} and one.orders.rung == ANCHORS for one in verdicts)
    tried = [one for one in verdicts if one.tried]
    assert tried and all(one.tried == "a" for one in tried)
    assert guard.to_try(verdict_request(asked, tried[0].orders), "a") == [ANCHORS]


def test_with_the_anchors_what_was_proved_of_them_is_discarded() -> None:
    guard, asked = proved(), request("a")
    breach(guard, asked, "a")
    assert guard.orders(asked).epoch == 1 and guard.orders(asked).withholds(EVERYTHING)
    other = proved(MOVED)
    breach(other, asked, "a")
    assert other.orders(asked).rung == MOVED and other.orders(asked).withheld == {"a"}


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


def as_saved(guard: QualityGuard) -> dict[object, SavedGroup]:
    """What another engine would read."""
    return {group: SavedGroup.read(json.loads(json.dumps(data))) for group, data in guard.saved().items()}


def test_what_is_proved_is_saved_with_the_records() -> None:
    guard, other = proved(), QualityGuard(SETTINGS)
    find(guard, request("a", agent="critic"), MOVED, 10 * BUDGET)
    guard.observe(request("a", tenant="other"), ("a",), CHANGED)
    other.restore(as_saved(guard))  # type: ignore[arg-type]
    assert other.saved() == guard.saved()
    assert other.verdict(request("a")).orders.rung == ANCHORS
    assert other.verdict(request("a", agent="critic")).orders.withholds(EVERYTHING)
    assert other.orders(request("a", tenant="other")).withholds("a")
    other.restore({})
    assert other.verdict(request("a")).orders.withholds("a")


@pytest.mark.parametrize("data", [
    {}, {"records": []}, {"proofs": []}, {"records": [], "proofs": [{}]}, {"records": 3, "proofs": []},
    {"records": [], "proofs": [{"agent": "a", "rungs": {"1": [{}, 3]}}]},
])  # fmt: skip
def test_saved_nonsense_is_refused(data: dict[str, object]) -> None:
    with pytest.raises((ValueError, LookupError, TypeError)):
        SavedGroup.read(data)


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
    assert sum(len(group["proofs"]) for group in guard.saved().values()) == 4  # type: ignore[arg-type,misc]
    guard.clear()
    assert guard.saved() == {}


def test_findings_of_an_agent_that_is_not_known_any_more_are_dropped() -> None:
    guard = QualityGuard(SETTINGS)
    guard.found(request("a"), ("a",), [RungFinding(ANCHORS, 0.0, 0.1)])
    assert guard.saved() == {}


def test_threads_prove_ask_and_report_at_once() -> None:
    guard = QualityGuard(SETTINGS)

    def work(number: int) -> Iterable[object]:
        asked = request("a", agent=f"agent-{number % 3}")
        for turn in range(60):
            verdict = guard.verdict(asked)
            guard.to_try(verdict_request(asked, verdict.orders), verdict.tried)
            guard.found(unlike(asked), ("a",), [RungFinding(turn % len(RUNGS), 0.0, 0.1)])
            guard.translated(asked, ("a",))
            yield guard.fidelity(asked), guard.stats(), guard.saved()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: list(work(number)), range(8)))
    assert {entry["fidelity"]["rung"] for entry in guard.stats()} <= {one.name for one in RUNGS}  # type: ignore[index]
