"""Guard records as data: what was learned of an agent goes on after a restart, and nonsense is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.guard import DecisionKind
from kedge.reuse.guard.comparison import DecisionComparison
from kedge.reuse.guard.record import GuardRecord, from_data, to_data
from kedge.settings import GuardSettings

SETTINGS = GuardSettings()
KEY = "solver", "question"
FAR, CALL = DecisionKind.FAR, DecisionKind.CALL
SEEN = st.builds(DecisionComparison, st.fixed_dictionaries({FAR: st.booleans(), CALL: st.booleans()}), st.floats(0, 1))
EVENTS = st.lists(st.one_of(st.none(), SEEN), max_size=60)
"""Comparisons, and None for a refutation by sentinel tokens"""


def go_on(record: GuardRecord, events: list[DecisionComparison | None]) -> None:
    for one in events:
        record.translated()
        if one is None:
            record.read_sentinels(SETTINGS, refuted=True)
        else:
            record.observe(one, SETTINGS)


def saved(record: GuardRecord) -> list[Any]:
    data: list[Any] = json.loads(json.dumps(to_data({KEY: record})))
    return data


@given(EVENTS, EVENTS)
def test_a_restored_record_goes_on_as_if_nothing_had_happened(before: Any, after: Any) -> None:
    record = GuardRecord()
    go_on(record, before)
    restored = from_data(saved(record))[KEY]
    go_on(record, after)
    go_on(restored, after)
    assert saved(restored) == saved(record)


def test_what_is_restored_is_new_to_the_sentinels() -> None:
    record = GuardRecord()
    go_on(record, [DecisionComparison({FAR: False}, 0.0)] * 20)
    assert not record.is_new and from_data(saved(record))[KEY].is_new


@pytest.mark.parametrize("change", [{"state": "perhaps"}, {"evidence": 3}, {"streak": "many"}])
def test_data_of_another_shape_is_refused(change: dict[str, Any]) -> None:
    [[*key, record]] = saved(GuardRecord())
    with pytest.raises(ValueError):
        from_data([[*key, {**record, **change}]])
