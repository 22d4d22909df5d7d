"""Every action that a client asks for gets an outcome, and none is an error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.hints import read_hints
from kedge.hints.actions import MAX_ACTIONS, read_actions

JSON: Any = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def envelope(*types: str) -> dict[str, Any]:
    actions = [{"action_id": f"a{at}", "action_type": kind, "payload": {}} for at, kind in enumerate(types)]
    return {"protocol_version": 1, "message_id": "m", "actions": actions}


def test_no_action_is_claimed_to_be_carried_out() -> None:
    outcomes = read_actions(envelope("pin", "kv.retain@1.0", "vllm.set_priority@1.0", "launder"))
    assert [(one.action_id, one.reason) for one in outcomes] == [
        ("a0", "not supported"), ("a1", "not supported"), ("a2", "not supported"), ("a3", "unknown action_type"),
    ]  # fmt: skip
    assert {one.outcome for one in outcomes} == {"rejected"}


@pytest.mark.parametrize("action", [None, 3, {}, {"action_id": "a"}, {"action_id": 5, "action_type": "pin"}])
def test_an_action_without_a_name_is_rejected_with_the_reason(action: Any) -> None:
    (outcome,) = read_actions({"actions": [action]})
    assert outcome.to_dict()["outcome"] == "rejected" and "action_id" in outcome.reason


def test_only_so_many_get_an_outcome() -> None:
    assert len(read_actions(envelope(*["pin"] * (MAX_ACTIONS + 1)))) == MAX_ACTIONS


@given(JSON)
def test_no_envelope_is_an_error(kv_hints: Any) -> None:
    hints, _ = read_hints({"kv_hints": kv_hints}, {})
    assert all(one.outcome == "rejected" for one in hints.actions)
