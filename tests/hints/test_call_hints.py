"""Every dialect says the same thing, and nothing that a client says is an error or goes uncounted."""

import math
from dataclasses import replace
from typing import Any

import pytest

from kedge.errors import RequestError
from kedge.guard import GuardMode
from kedge.hints import RULES, Hints, IgnoredReason, read_hints
from kedge.hints.call_hints import BODY, NAMING
from kedge.types import ReuseMode


def hints(body: dict[str, Any] | None = None, **headers: str) -> Hints:
    return read_hints(body or {}, {name.replace("_", "-"): value for name, value in headers.items()})[0]


def ignored(body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[tuple[str, IgnoredReason], int]:
    return {key: count for key, count in read_hints(body, headers or {})[1].items() if count}


def test_the_kedge_field() -> None:
    said = {
        "workflow": "team", "run": "r", "agent": "a", "client": "c", "seq": 3, "steps": {"a": 0, "b": 1.5, "z": None},
        "fixed_tokens": 10, "fixed_messages": 1, "reuse": "off", "guard": "shadow", "bindings": {"q": "x"},
        "final": True,
    }  # fmt: skip
    assert hints({"kedge": said}) == Hints(
        workflow="team", run="r", agent="a", client="c", seq=3, steps={"a": 0, "b": 1.5, "z": math.inf},
        fixed_tokens=10, fixed_messages=1, reuse=ReuseMode.OFF, guard=GuardMode.SHADOW, bindings={"q": "x"}, final=True,
    )  # fmt: skip
    assert not ignored({"kedge": said})


@pytest.mark.parametrize("carrier", ["kv_transfer_params", "vllm_xargs", "custom_params"])
def test_the_kedge_field_rides_in_what_other_servers_pass_through(carrier: str) -> None:
    assert hints({carrier: {"kedge": {"agent": "a"}}}).agent == "a"
    assert hints({carrier: {"kedge": {"agent": "a"}}, "kedge": {"agent": "b"}}).agent == "b"
    assert sum(ignored({carrier: {"kedge": {}, "other": 1}}).values()) == 1


BAD: dict[str, Any] = {"reuse": ("fast", 1), "guard": ("maybe", False), "bindings": ([], {"a": 1})}
BAD_MARKS: list[Any] = ["5m", {}, {"type": "forever"}, {"type": "ephemeral", "ttl": "1 day"}, [3]]
SUB_AGENT = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({"session_id": "s", "request_id": "x", "user": "u"}, {}, Hints(session="s", run="s")),
        ({"cache_salt": "s"}, {}, Hints(salt="s")),
        ({"rid": "x", "extra_key": "k"}, {}, Hints(salt="k")),
        ({"extra_key": ["k", "l"]}, {}, Hints(salt="k\x1fl")),
        ({"metadata": {"langgraph_node": "n", "thread_id": "t"}}, {}, Hints(agent="n", run="t")),
        ({"metadata": {"workflow_name": "w", "group_id": "g"}}, {}, Hints(workflow="w", run="g")),
        ({}, {"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p"}, Hints(session="s", run="s", parent="p")),
        ({}, {"x-dynamo-session-final": "true"}, Hints(final=True)),
        (
            {"kedge": {"run": "r"}},
            {"x-dynamo-session-id": "part", "x-dynamo-session-final": "true"},
            Hints(run="r", session="part"),
        ),
        ({"kedge": {"run": "r", "session": "s", "final": "1"}}, {}, Hints(run="r", session="s", final=True)),
        ({}, {"x-claude-code-session-id": "s"}, Hints(session="s", run="s")),
        ({}, SUB_AGENT, Hints(session="s/a", run="s", parent="s")),
        ({}, {**SUB_AGENT, "x-claude-code-parent-agent-id": "p"}, Hints(session="s/a", run="s", parent="s/p")),
        ({}, {"thread-id": "t", "x-codex-parent-thread-id": "p"}, Hints(session="t", run="t", parent="p")),
        ({}, {"thread-id": "t", "session-id": "s"}, Hints(session="t", run="s")),
        ({}, {"conversation_id": "c", "session_id": "c"}, Hints(session="c", run="c")),
        (
            {"agent_hints": {"workflow_id": "w", "agent_id": "a", "expected_tool_duration_ms": 1500}},
            {},
            Hints(workflow="w", agent="a", returns_in=1.5),
        ),
        ({}, {"session-id": "s", "x-parent-session-id": "p"}, Hints(session="s", run="s", parent="p")),
        ({}, {"x-session-id": "s"}, Hints(session="s", run="s")),
        ({}, {"x-session-affinity": "s"}, Hints(session="s", run="s")),
        ({"kedge": {"run": "r"}, "session_id": "s"}, {"x-session-id": "t"}, Hints(run="r", session="s")),
    ],
)
def test_dialects(body: dict[str, Any], headers: dict[str, str], expected: Hints) -> None:
    assert read_hints(body, headers)[0] == expected
    assert not ignored(body, headers)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: ".".join(rule.path))
def test_a_value_that_cannot_be_meant_is_ignored_and_counted(rule: Any) -> None:
    value: Any = {"no": ["thing"]}
    for key in reversed(rule.path):
        value = {key: value}
    if any(one.path == rule.path[:1] and one.field in NAMING for one in BODY):
        with pytest.raises(RequestError, match="printable text"):
            read_hints(value, {})
        return
    said, counted = read_hints(value, value)
    assert replace(said, ignored=()) == Hints()
    assert counted[rule.dialect, IgnoredReason.BAD_VALUE] >= 1


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"kedge": 5}, {("kedge", IgnoredReason.BAD_VALUE): 1}),
        ({"kedge": {"mood": 1, "tone": 2}}, {("kedge", IgnoredReason.UNKNOWN): 2}),
        ({"shape": 1}, {("body", IgnoredReason.UNKNOWN): 1}),
        ({"nvext": {"x": 1, "agent_hints": {"y": 1}}}, {("dynamo", IgnoredReason.UNKNOWN): 2}),
        ({"nvext": 7}, {("dynamo", IgnoredReason.UNKNOWN): 1}),
        ({"nvext": {"agent_hints": {"priority": 3, "osl": 9}}}, {("dynamo", IgnoredReason.UNSUPPORTED): 2}),
        ({"kv_hints": {"actions": [{}, {}]}}, {("kv_hints", IgnoredReason.UNSUPPORTED): 2}),
        ({"nvext": {"cache_control": {"ttl": "1h"}}}, {("dynamo", IgnoredReason.BAD_VALUE): 1}),
        ({"kedge": {"keep_for": -1, "expects": {"s": "soon"}}}, {("kedge", IgnoredReason.BAD_VALUE): 2}),
        ({"agent_hints": {"reuse_hint": 5, "mood": 1}}, {("sglang", r): 1 for r in ("unsupported", "unknown")}),
        ({"agent_hints": {"expected_tool_duration_ms": -1}}, {("sglang", IgnoredReason.BAD_VALUE): 1}),
        ({"kv_hints": "x"}, {("kv_hints", IgnoredReason.UNSUPPORTED): 1}),
        ({"kedge": {"run": "x" * 257}}, {("kedge", IgnoredReason.BAD_VALUE): 1}),
        ({"kedge": {"run": "\ud800"}}, {("kedge", IgnoredReason.BAD_VALUE): 1}),
        ({"kedge": {"steps": {"a": float("nan")}}}, {("kedge", IgnoredReason.BAD_VALUE): 1}),
        ({"kedge": {"steps": {"a": 1}}}, {("kedge", IgnoredReason.UNSUPPORTED): 1}),  # of no run
        ({"kedge": {"fixed_tokens": True}}, {("kedge", IgnoredReason.BAD_VALUE): 1}),
        *(({"cache_control": mark}, {("anthropic", IgnoredReason.BAD_VALUE): 1}) for mark in BAD_MARKS),
    ],
)
def test_what_is_ignored_is_counted(body: dict[str, Any], expected: dict[tuple[str, IgnoredReason], int]) -> None:
    assert ignored(body) == expected
    assert replace(hints(body), actions=(), ignored=()) == Hints()


@pytest.mark.parametrize("said", [{name: bad} for name, some in BAD.items() for bad in some])
def test_what_changes_the_answer_must_be_right(said: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="kedge."):
        hints({"kedge": said})


@pytest.mark.parametrize(
    ("said", "nats", "told"),
    [("fast", 0.01, 0.01), ("fp8", 0.002, 0.002), (1, 1.0, 1.0), ("any", math.inf, "any"), (None, None, None)],
)
def test_a_budget_of_fidelity_has_a_name_or_is_a_number(said: object, nats: float | None, told: object) -> None:
    found = hints({"kedge": {"fidelity": said}})
    assert found.fidelity == nats and found.to_dict().get("fidelity") == told
    assert not ignored({"kedge": {"fidelity": said}})


@pytest.mark.parametrize("said", ["exactly", 0, -1, True, math.nan, [], 10**400])
def test_no_other_budget_is_accepted(said: Any) -> None:
    accepted = "must be one of strict, fp8, fast, any, or nats a token above 0"
    with pytest.raises(RequestError, match=rf"kedge\.fidelity=.*: {accepted}"):
        hints({"kedge": {"fidelity": said}})


def test_what_was_understood_is_told_but_no_secret() -> None:
    said = {"run": "r", "steps": {"a": None}, "bindings": {"q": "x"}}
    told = hints({"cache_salt": "secret", "kedge": said}).to_dict()
    assert told == {"run": "r", "steps": {"a": None}}


FIVE, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


@pytest.mark.parametrize(
    "body",
    [
        {"cache_control": FIVE},
        {"system": [{"type": "text", "text": "x", "cache_control": FIVE}]},
        {"tools": [{"name": "x"}, {"name": "y", "cache_control": FIVE}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": FIVE}]}]},
        {"nvext": {"cache_control": {"type": "ephemeral", "ttl": "5m"}}},
        {"agent_hints": {"cache_ttl_ms": 300_000}},
        {"prompt_cache_retention": "in_memory"},
    ],
)
def test_a_mark_is_found_wherever_it_stands(body: dict[str, Any]) -> None:
    assert hints(body).keep_for == 300


def test_the_longest_counts_and_no_mark_is_no_hint() -> None:
    content = [{"type": "text", "text": "x", "cache_control": one} for one in (FIVE, HOUR, FIVE)]
    assert hints({"messages": [{"content": content}, {"content": "text"}, 3], "cache_control": FIVE}).keep_for == 3600
    assert hints({"prompt_cache_retention": "24h"}).keep_for == 3600, "no longer than is promised to anybody"
    assert hints({"messages": [{"content": "x"}], "system": "y", "tools": None, "cache_control": None}).keep_for is None
