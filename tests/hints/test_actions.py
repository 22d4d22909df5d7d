"""Every action that a client asks for gets an outcome, and none is an error."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.hints import read_hints
from kedge.hints.actions import ActionOutcome, ActionResult, Wishes, read_actions
from kedge.hints.values import MAX_EXPECTED, MAX_KEPT_SECONDS

JSON: Any = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def act(kind: str, **payload: Any) -> tuple[Wishes, ActionOutcome]:
    """What one action asks for, and what becomes of it."""
    wishes = read_actions({"actions": [{"action_id": "a", "action_type": kind, "payload": payload}]})
    return wishes, wishes.outcomes[0]


@pytest.mark.parametrize(
    ("kind", "payload", "kept", "outcome"),
    [
        ("retain", {"duration": 60}, 60, ActionResult.APPLIED),
        ("kv.retain@1.0", {"directives": [{"end": 9, "priority": 70, "duration": 30}]}, 30, ActionResult.CLIPPED),
        ("kv.retain", {"directives": [{"duration": 5}, {"duration": 50}, 3]}, 50, ActionResult.CLIPPED),
        ("vllm.set_priority@1.0", {"value": 3, "ttl_seconds": 20, "claim_id": "c"}, 20, ActionResult.CLIPPED),
        ("set_priority", {"value": 0, "ttl_seconds": 20}, 0, ActionResult.DEFERRED),
        ("pin", {}, MAX_KEPT_SECONDS, ActionResult.CLIPPED),
        ("retain", {"duration": 1e9}, MAX_KEPT_SECONDS, ActionResult.CLIPPED),
        ("demote", {}, 0, ActionResult.DEFERRED),
        ("share", {"with": "x"}, None, ActionResult.APPLIED),
    ],
)
def test_what_is_asked_for_the_own_session_is_read_as_a_time(
    kind: str, payload: dict[str, Any], kept: float | None, outcome: ActionResult
) -> None:
    wishes, found = act(kind, **payload)
    assert (wishes.keep_for, found.outcome, wishes.rejected) == (kept, outcome, 0)


def test_other_sessions_are_prefetched_and_demoted_by_name() -> None:
    assert act("kv.fetch@1.0", session_id="s", eta_seconds=2)[0].expects == {"s": 2.0}
    assert act("prefetch", session_id="s")[0].expects == {"s": 0.0}
    assert act("demote", session_id="s")[0].expects == {"s": math.inf}


@pytest.mark.parametrize(
    ("kind", "payload", "why"),
    [
        ("launder", {}, "unknown action_type"),
        ("prefetch", {}, "session_id"),
        ("pin", {"session_id": "other"}, "other sessions"),
        ("retain", {"duration": -1}, "not accepted"),
        ("retain", {"duration": float("nan")}, "not accepted"),
        ("retain", {"priority": "high"}, "not accepted"),
        ("retain", {"priority": 10**400}, "not accepted"),
        ("demote", {"session_id": 7}, "not accepted"),
    ],
)
def test_what_cannot_be_done_is_rejected_with_the_reason(kind: str, payload: dict[str, Any], why: str) -> None:
    wishes, found = act(kind, **payload)
    assert found.outcome is ActionResult.REJECTED and why in found.reason
    assert (wishes.keep_for, wishes.expects, wishes.rejected) == (None, {}, 1)


def test_the_longest_time_counts_and_a_hint_of_kedge_counts_first() -> None:
    actions = [
        {"action_id": str(at), "action_type": kind, "payload": {"duration": seconds}}
        for at, (kind, seconds) in enumerate([("retain", 10), ("demote", 0), ("retain", 40)])
    ]
    assert read_hints({"kv_hints": {"actions": actions}}, {})[0].keep_for == 40
    assert read_hints({"kv_hints": {"actions": actions}, "kedge": {"keep_for": 7}}, {})[0].keep_for == 7


@pytest.mark.parametrize("action", [None, 3, {}, {"action_id": "a"}, {"action_id": 5, "action_type": "pin"}])
def test_an_action_without_a_name_is_rejected_with_the_reason(action: Any) -> None:
    (outcome,) = read_actions({"actions": [action]}).outcomes
    assert outcome.to_dict()["outcome"] == "rejected" and "action_id" in outcome.reason


def test_only_so_many_get_an_outcome() -> None:
    actions = [{"action_id": f"a{at}", "action_type": "pin", "payload": {}} for at in range(MAX_EXPECTED + 1)]
    wishes = read_actions({"protocol_version": 1, "message_id": "m", "actions": actions})
    assert (len(wishes.outcomes), wishes.rejected) == (MAX_EXPECTED, 1)


@given(JSON)
def test_no_envelope_is_an_error(kv_hints: Any) -> None:
    hints, _ = read_hints({"kv_hints": kv_hints}, {})
    assert all(one.reason and one.to_dict()["outcome"] for one in hints.actions)
    assert all(ActionOutcome.from_dict(one.to_dict()) == one for one in hints.actions)
