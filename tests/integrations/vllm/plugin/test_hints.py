"""Hints become a request with hints; none of them can be an error."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.guard import EVERYTHING, GuardOrders
from kedge.integrations.vllm.plugin.hints import AFRESH, HintedRequest, read_hints, without_hints
from kedge.reuse.guard.fidelity import RUNGS
from kedge.types import AgentId, AgentKey, Namespace, ReuseMode, RunId, SampleId, Segment, TenantId, TurnHints
from kedge.workflow.steps import NextRun

TOKENS = (5, 6, 7, 8, 9)
NAMES = [
    *("workflow", "run", "agent", "client", "seq", "steps", "fixed_tokens", "final", "reuse", "segments", "produces"),
    *("session", "parent", "returns_in", "unheard", "base_context", "name", "length", "withheld", "epoch"),
    *("pick", "rung", "held_out"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)


def read(kedge: Any, salt: str | None = None) -> HintedRequest:
    call = read_hints("r1", TOKENS, salt, {"kedge": kedge}, ReuseMode.TRANSLATE)
    assert call is not None
    return call


def test_all_hints_are_read() -> None:
    call = read(
        {
            "workflow": "w", "run": "r", "agent": "a", "client": "c", "seq": 3, "steps": {"a": 0, "b": None},
            "fixed_tokens": 2, "final": True, "reuse": "exact", "produces": "a@0", "session": "s",
            "parent": "p", "returns_in": 1.5,
        },
        salt="tenant",
    )  # fmt: skip
    request = call.request
    assert call.request.agent_key == AgentKey(Namespace(TenantId("tenant")), "c", RunId("r"), AgentId("a"))
    assert request.workflow == "w"
    assert call.steps == {"a": NextRun(0.0), "b": NextRun(math.inf)} and call.seq == 3
    assert (request.fixed, request.reuse, request.produces) == (2, ReuseMode.EXACT, SampleId.parse("a@0"))
    assert call.request.turn == TurnHints("s", "p", 1.5, is_last=True) and not call.ignored
    assert request.segments == (Segment(TOKENS, "p0"),)


BAD_ORDERS: dict[str, list[Any]] = {
    "withheld": ["q", [1], [[]], ["q"] * 4097, {"q": 1}],
    "epoch": [-1, 1.5, "2"],
    "pick": [3, ["a"], "x" * 2000],
    "rung": [-1, len(RUNGS), 0.0, True, "0", 2**70],
    "held_out": [1, "yes", 0, [], {}, ""],
}


def test_orders_of_a_guard_that_are_not_accepted_are_ignored() -> None:
    for name, values in BAD_ORDERS.items():
        for value in values:
            call = read({name: value})
            assert call.request.guard == GuardOrders() and call.ignored == 1, (name, value)
    for rung in range(len(RUNGS)):
        call = read({"rung": rung, "held_out": True, "withheld": [EVERYTHING]})
        expected = GuardOrders(rung=rung, held_out=True, withheld=frozenset((EVERYTHING,)))
        assert call.request.guard == expected and not call.ignored


@pytest.mark.parametrize("salt, tenant", [("acme", "acme"), (f"acme{AFRESH}r1", "acme"), (AFRESH, "default")])
def test_a_check_has_a_prefix_cache_of_its_own_and_its_calls_namespace(salt: str, tenant: str) -> None:
    assert read({"agent": "a"}, salt).request.namespace == Namespace(TenantId(tenant))


def test_no_hints_are_none_and_no_mapping_is_one_ignored_hint() -> None:
    for params in (None, {}, {"other": {}}, {"kedge": None}):
        assert read_hints("r1", TOKENS, None, params, ReuseMode.EXACT) is None
    for kedge in ("text", 7, [], True):
        assert read(kedge).ignored == 1 and read(kedge).request.reuse is ReuseMode.TRANSLATE


@pytest.mark.parametrize(
    "bad",
    [
        {"agent": 7}, {"run": "x" * 257}, {"agent": "a\n"}, {"seq": 1.5}, {"seq": True},
        {"steps": {"a": math.nan}}, {"steps": {"a": "1"}}, {"steps": []}, {"steps": {"a": 1}}, {"final": "yes"},
        {"fixed_tokens": 1.0},
        {"reuse": "sometimes"}, {"unheard": 1}, {"segments": 3}, {"segments": [{"name": "p0", "length": 4}]},
        {"segments": [{"name": "p0", "length": 6}]}, {"segments": [{"length": 5}]}, {"segments": [5]},
        *({"segments": [{"name": "q", "length": 5, "sample": "s", "base_context": [one]}]} for one in ("x", 1 << 63)),
        {"segments": [{"name": "q", "length": 5, "sample": "s", "in_context": 1}]},
    ],
)  # fmt: skip
def test_invalid_hints_are_counted_and_ignored(bad: dict[str, Any]) -> None:
    call, nothing = read(bad), read({})
    assert call.ignored == 1
    assert (call.request, call.steps, call.seq) == (nothing.request, None, None)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6))
def test_no_hint_is_an_error(kedge: dict[str, Any]) -> None:
    call = read(kedge)
    assert call.request.tokens == TOKENS
    assert 0 <= call.ignored <= len(kedge)


def test_workers_are_not_sent_the_hints() -> None:
    others = {"do_remote_decode": True}
    given = SimpleNamespace(max_tokens=3, extra_args={"a": 1, "kv_transfer_params": {"kedge": {"run": "r"}, **others}})
    sent = without_hints(given)
    assert sent.extra_args == {"a": 1, "kv_transfer_params": others} and sent.max_tokens == 3
    assert given.extra_args["kv_transfer_params"]["kedge"], "the caller's own is unchanged"
    for extra in (None, {}, {"kv_transfer_params": None}, {"kv_transfer_params": {"other": 1}}):
        given = SimpleNamespace(extra_args=extra)
        assert without_hints(given) is given and without_hints(None) is None
