"""A placeholder's state: how evidence moves it, how often it is wrong, and errors of sentinel tokens."""

import math
from math import comb, exp
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from kedge.guard import DecisionKind, GuardState
from kedge.reuse.guard.comparison import DecisionComparison
from kedge.reuse.guard.record import (
    ALPHA,
    FORGET,
    SETTLED,
    TRIALS,
    ChangeEvidence,
    GuardRecord,
    UsualError,
    refuted_by_drawn,
    refuted_by_weak,
)
from kedge.settings import GuardSettings

SETTINGS = GuardSettings()
CLEAN = DecisionComparison({DecisionKind.FAR: False}, 0.0)
CHANGED = DecisionComparison({DecisionKind.FAR: True}, 2.0)
FAR_OFF = DecisionComparison({DecisionKind.FAR: False}, 20.0)
OTHER_CALL = DecisionComparison({DecisionKind.FAR: False, DecisionKind.CALL: True}, 0.0)


def canary() -> GuardRecord:
    record = GuardRecord()
    record.translated()
    return record


def observed(record: GuardRecord, *seen: DecisionComparison) -> GuardRecord:
    for one in seen:
        record.observe(one, SETTINGS)
    return record


def test_the_way_to_on() -> None:
    record = GuardRecord()
    assert record.state is GuardState.SHADOW and not record.withheld
    record.translated()
    assert record.state is GuardState.CANARY
    while record.state is GuardState.CANARY:
        observed(record, CLEAN)
    assert record.state is GuardState.ON and record.evidence.upper(ALPHA) <= SETTINGS.max_changed
    assert observed(canary(), *[*[CLEAN] * 99, CHANGED] * 50).state is GuardState.ON, "half of what may change"


@pytest.mark.parametrize("seen", [CHANGED, OTHER_CALL])
def test_one_change_of_any_kind_withholds_it(seen: DecisionComparison) -> None:
    record = observed(canary(), *[CLEAN] * 40, seen)
    assert (record.state, record.withheld, record.suspicions, record.epoch) == (GuardState.SHADOW, True, 1, 0)
    assert record.kl == seen.kl


def test_no_more_changes_than_may_be_withhold_nothing() -> None:
    record = observed(canary(), *[CLEAN] * 300, *[CHANGED] * 6)
    assert (record.state, record.withheld, record.evidence.changed) == (GuardState.ON, False, 6)
    observed(record, CHANGED)
    assert record.withheld and record.suspicions == 1


def test_where_any_share_may_change_nothing_is_withheld() -> None:
    record, settings = canary(), GuardSettings(max_changed=1)
    for _ in range(50):
        record.observe(CHANGED, settings)
    assert (record.state, record.withheld, record.evidence.changed) == (GuardState.ON, False, 50)


def test_clean_trials_bring_it_back() -> None:
    record = observed(canary(), CHANGED, *[CLEAN] * (TRIALS - 1))
    assert record.withheld
    observed(record, CHANGED, *[CLEAN] * (TRIALS - 1))
    assert record.withheld, "the streak begins anew"
    observed(record, CLEAN)
    assert (record.state, record.withheld) == (GuardState.CANARY, False)


def test_changed_trials_are_a_breach_and_the_way_back_is_longer() -> None:
    record, needed = observed(canary(), CHANGED), 4 * TRIALS
    checks = next(n for n in range(1, 10) if observed(record, CHANGED).epoch)
    assert checks <= 4 and record.withheld
    observed(record, *[CLEAN] * (needed - 1))
    assert record.withheld
    observed(record, CLEAN)
    assert not record.withheld
    assert next(n for n in range(1, 10) if observed(record, CHANGED).epoch == 2) <= 6
    observed(record, *[CLEAN] * (2 * needed - 1))
    assert record.withheld


def test_the_way_back_has_an_end_after_however_many_breaches() -> None:
    record = observed(canary(), CHANGED)
    record.epoch = 1_000_000
    assert next(n for n in range(1, 10) if observed(record, CHANGED).epoch > 1_000_000) <= 4
    assert record.needed == 1024


@given(st.lists(st.sampled_from([CLEAN, CLEAN, FAR_OFF, CHANGED, OTHER_CALL, None]), max_size=400))
def test_what_is_withheld_is_never_on(story: list[DecisionComparison | None]) -> None:
    """None: it is translated. Counts never fall, what is withheld is in the state for it, divergence does nothing."""
    record = GuardRecord()
    for one in story:
        before = record.epoch, record.suspicions
        record.translated() if one is None else record.observe(one, SETTINGS)
        assert not record.withheld or record.state is GuardState.SHADOW
        assert (record.epoch, record.suspicions) >= before
        assert record.evidence.changed <= record.evidence.checks
    assert record.suspicions + record.epoch <= story.count(CHANGED) + story.count(OTHER_CALL)


@pytest.mark.parametrize("share", [0.002, 0.019, 0.021])
def test_an_agent_below_the_limit_is_rarely_breached_and_one_above_it_rarely_on(share: float) -> None:
    """With all restarts of its evidence together, at most `alpha` of such agents, however long they are watched."""
    rng, agents, wrong = numpy.random.default_rng(1), 300, 0
    for _ in range(agents):
        record = canary()
        for changed in rng.random(1500) < share:
            record.observe(CHANGED if changed else CLEAN, SETTINGS)
            record.translated()
            if record.epoch if share < SETTINGS.max_changed else record.state is GuardState.ON:
                wrong += 1
                break
    assert wrong <= ALPHA * agents


@pytest.mark.parametrize("clean", [300, 20_000])
def test_a_fault_shows_as_soon_after_weeks(clean: int) -> None:
    """In compared answers, and in readings of sentinel tokens."""
    record = observed(canary(), *[CLEAN] * clean)
    assert next(n for n in range(1, 1000) if observed(record, CHANGED).withheld) <= 21
    record = canary()
    for refuted in (*[False] * clean, *[True] * 60):
        record.read_sentinels(SETTINGS, refuted=refuted)
    assert record.epoch >= 1


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_an_agent_far_above_the_limit_is_breached_soon(share: float) -> None:
    rng = numpy.random.default_rng(2)
    for _ in range(50):
        record, served = canary(), 0
        for changed in rng.random(200) < share:
            served += bool(changed) and not record.withheld
            record.observe(CHANGED if changed else CLEAN, SETTINGS)
            if record.epoch:
                break
        assert record.epoch == 1 and served <= 8


SHARE = 0.02
counts = st.integers(0, 400).flatmap(lambda checks: st.tuples(st.just(checks), st.integers(0, checks)))


@pytest.mark.parametrize("checks", [0, 1, 5, 30])
def test_an_e_value_is_expected_to_be_one(checks: int) -> None:
    """At every number of checks: it is a martingale under the share that it tests."""
    likelihood = [comb(checks, k) * SHARE**k * (1 - SHARE) ** (checks - k) for k in range(checks + 1)]
    values = [exp(ChangeEvidence(checks, k).log_e_value(SHARE)) for k in range(checks + 1)]
    assert sum(p * e for p, e in zip(likelihood, values, strict=True)) == pytest.approx(1.0)


@pytest.mark.parametrize("most", [50, 1024])
@pytest.mark.parametrize("share", [0.005, 0.02, 0.1, 0.4])
def test_the_bound_holds_the_true_share_at_all_times_at_once(share: float, most: int) -> None:
    """Ville: of many sequences that are looked at after every check, at most alpha ever leave it out."""
    rng, sequences, missed = numpy.random.default_rng(0), 300, 0
    for _ in range(sequences):
        seen = ChangeEvidence()
        draws = rng.random(300) < share
        missed += any(seen.observe(bool(one), most=most) or seen.is_below(share, 2 * seen.alpha) for one in draws)
    assert missed <= ALPHA * sequences * 1.6  # three standard deviations


@given(counts)
def test_the_bound_is_where_the_test_turns(seen: tuple[int, int]) -> None:
    evidence = ChangeEvidence(*seen)
    upper = evidence.upper(ALPHA)
    assert evidence.share <= upper <= 1
    if upper < 1:
        assert evidence.is_below(min(1 - 1e-12, upper * (1 + 1e-6)), ALPHA)
        assert not evidence.is_below(upper * (1 - 1e-6), ALPHA)


# sentinel tokens ------------------------------------------------------------------------------------------------------

NEW = UsualError()


def usual(error: float, calls: int = SETTLED) -> UsualError:
    made = UsualError()
    for _ in range(calls):
        made.observe(error)
    return made


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40))
def test_the_usual_error_is_the_mean_of_what_was_seen(errors: list[float]) -> None:
    made = UsualError()
    for error in errors:
        made.observe(error)
    assert made.mean == pytest.approx(sum(errors) / len(errors), abs=1e-9)


def test_the_usual_error_follows_what_changes() -> None:
    made = usual(0.1, 1000)
    for _ in range(round(1 / FORGET)):
        made.observe(0.5)
    assert 0.3 < made.mean < 0.5


def test_all_are_blamed_where_none_alone_is_off() -> None:
    assert refuted_by_drawn({"a": [0.49], "b": [0.5] * 9, "c": [0.51, 0.51]}, 0.5) == {"c"}
    settled = {"a": usual(0.5), "b": usual(0.1)}
    assert refuted_by_weak({"a": [0.9] * 4, "b": [0.4] * 4}, settled, 0.5) == {*"ab"}


def test_weak_tokens_are_judged_together_by_what_is_usual() -> None:
    settled = {"a": usual(0.2), "b": usual(0.4)}
    found = [refuted_by_weak({"a": [seen] * 4, "b": [seen] * 4}, settled, 0.5) for seen in (0.59, 0.61)]
    assert found == [set(), {"a"}], "above twice 0.3 in the mean, and the one is alone above its own bound"


def test_weak_tokens_below_the_limit_and_new_ones_never_refute() -> None:
    assert not refuted_by_weak({"a": [0.49] * 8}, {"a": usual(0.01)}, 0.5)
    assert not refuted_by_weak({"a": [5.0] * 3}, {"a": usual(0.2)}, 0.5), "too few"
    assert not refuted_by_weak({"a": [5.0] * 9}, {"a": usual(0.2, SETTLED - 1)}, 0.5)


@pytest.mark.parametrize("error", [math.nan, math.inf])
@pytest.mark.parametrize("known", [NEW, usual(0.2)])
def test_what_is_not_a_number_refutes(known: UsualError, error: float) -> None:
    errors = {"a": [error], "b": [0.1] * 20}
    assert refuted_by_drawn(errors, 0.5) == refuted_by_weak(errors, dict.fromkeys("ab", known), 0.5) == {"a"}


# records as data ------------------------------------------------------------------------------------------------------

FAR, CALL = DecisionKind.FAR, DecisionKind.CALL
SEEN = st.builds(DecisionComparison, st.fixed_dictionaries({FAR: st.booleans(), CALL: st.booleans()}), st.floats(0, 1))
EVENTS = st.lists(st.one_of(st.none(), SEEN), max_size=60)
"""Comparisons, and None for a refutation by sentinel tokens"""


RECORD: TypeAdapter[GuardRecord] = TypeAdapter(GuardRecord)


def again(record: GuardRecord) -> GuardRecord:
    """The record as it is read from a file."""
    return RECORD.validate_json(RECORD.dump_json(record))


def go_on(record: GuardRecord, events: list[DecisionComparison | None]) -> None:
    for one in events:
        record.translated()
        if one is None:
            record.read_sentinels(SETTINGS, refuted=True)
        else:
            record.observe(one, SETTINGS)


@given(EVENTS, EVENTS)
def test_a_restored_record_goes_on_as_if_nothing_had_happened(before: Any, after: Any) -> None:
    record = GuardRecord()
    go_on(record, before)
    restored = again(record)
    go_on(record, after)
    go_on(restored, after)
    assert again(restored) == again(record)


def test_what_is_restored_is_new_to_the_sentinels() -> None:
    record = GuardRecord()
    go_on(record, [DecisionComparison({FAR: False}, 0.0)] * 20)
    assert not record.is_new and again(record).is_new
