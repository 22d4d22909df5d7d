"""A placeholder's state: how evidence moves it, and how often it is wrong."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.guard import DecisionKind, GuardState
from kedge.reuse.guard.comparison import DecisionComparison
from kedge.reuse.guard.record import ALPHA, TRIALS, GuardRecord
from kedge.settings import GuardSettings

SETTINGS = GuardSettings()
CLEAN = DecisionComparison({DecisionKind.FAR: False}, 0.0)
CHANGED = DecisionComparison({DecisionKind.FAR: True}, 2.0)
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


def test_a_withheld_one_does_not_come_back_by_being_translated_elsewhere() -> None:
    record = observed(canary(), CHANGED)
    record.translated()
    assert record.withheld and record.state is GuardState.SHADOW


@given(st.lists(st.sampled_from([CLEAN, CLEAN, CLEAN, CHANGED, OTHER_CALL, None]), max_size=400))
def test_what_is_withheld_is_never_on(story: list[DecisionComparison | None]) -> None:
    """None: it is translated. Counts never fall, and what is withheld is in the state that says so."""
    record = GuardRecord()
    for one in story:
        before = record.epoch, record.suspicions
        record.translated() if one is None else record.observe(one, SETTINGS)
        assert not record.withheld or record.state is GuardState.SHADOW
        assert (record.epoch, record.suspicions) >= before
        assert record.evidence.changed <= record.evidence.checks


@given(st.lists(st.floats(0, 20), max_size=300))
def test_without_a_change_there_is_no_breach_whatever_the_divergence(story: list[float]) -> None:
    """Divergences are bounded by their mean; here they are only reported."""
    record = observed(canary(), *[DecisionComparison({DecisionKind.FAR: False}, kl) for kl in story])
    assert (record.epoch, record.suspicions, record.kl) == (0, 0, max(story, default=0.0))


@pytest.mark.parametrize("share", [0.002, 0.019])
def test_an_agent_below_the_limit_is_rarely_breached(share: float) -> None:
    """With all restarts of its evidence together, at most `alpha` of such agents, however long they are watched."""
    rng, agents, breached = numpy.random.default_rng(1), 300, 0
    for _ in range(agents):
        record = canary()
        for changed in rng.random(1500) < share:
            record.observe(CHANGED if changed else CLEAN, SETTINGS)
            record.translated()
            if record.epoch:
                breached += 1
                break
    assert breached <= ALPHA * agents


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
