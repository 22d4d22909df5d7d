"""The places at which the hints of a call stand, in the dialects of clients and servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kedge.hints.cache_marks import kept_for, read_ttl
from kedge.hints.values import MAX_HINT_AGENTS, read_expected, read_kept, read_seconds, read_text, read_whole
from kedge.types import AgentId

IN_MEMORY = "5m"
"""How long OpenAI keeps an idle prompt in memory, at least"""


class Rule(NamedTuple):
    """Place of a hint in a dialect, the field of `Hints` that it sets, and the parser of its value."""

    dialect: str
    path: tuple[str, ...]
    field: str
    read: Callable[[Any], Any]


def _seq(value: Any) -> int:
    """Return a sequence number; a negative one too, which the forecast ignores and counts as such."""
    if type(value) is not int or abs(value) >= 2**63:
        raise ValueError
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < 2**63:
        raise ValueError
    return float(value)


def _negated(value: Any) -> float:
    return -_number(value)


def _flag(value: Any) -> bool:
    if value in ("true", "True", "1", "false", "False", "0"):
        return value in ("true", "True", "1")
    if not isinstance(value, bool):
        raise ValueError
    return value


def _steps(value: Any) -> dict[AgentId, float]:
    if not isinstance(value, dict) or len(value) > MAX_HINT_AGENTS:
        raise ValueError
    return {AgentId(read_text(agent)): math.inf if steps is None else _number(steps) for agent, steps in value.items()}


def _milliseconds(value: Any) -> float:
    """Return a time that is given in milliseconds."""
    return read_seconds(value) / 1000


def _kept_milliseconds(value: Any) -> float:
    return read_kept(_milliseconds(value))


def _retention(value: Any) -> float:
    """Return how long OpenAI's `prompt_cache_retention` asks to keep a prompt."""
    return read_ttl(IN_MEMORY if value in ("in_memory", "in-memory") else value)


def _id(value: Any) -> str:
    """Return the id of a conversation, which stands alone or in an object."""
    return read_text(value.get("id") if isinstance(value, Mapping) else value)


def _joined(value: Any) -> str:
    """Return SGLang's `extra_key`, which may be a list, as one text."""
    return "\x1f".join(read_text(one) for one in value) if isinstance(value, list) else read_text(value)


KEDGE = tuple(
    Rule("kedge", ("kedge", name), to, read)
    for name, to, read in (
        ("workflow", "workflow", read_text),
        ("run", "run", read_text),
        ("agent", "agent", read_text),
        ("client", "client", read_text),
        ("seq", "seq", _seq),
        ("steps", "steps", _steps),
        ("fixed_tokens", "fixed_tokens", read_whole),
        ("fixed_messages", "fixed_messages", read_whole),
        ("pick", "pick", read_text),
        ("session", "session", read_text),
        ("parent", "parent", read_text),
        ("returns_in", "returns_in", read_seconds),
        ("keep_for", "keep_for", read_kept),
        ("expects", "expects", read_expected),
        ("final", "final", _flag),
    )
)
BODY = (
    Rule("openai", ("safety_identifier",), "end_user", read_text),
    Rule("openai", ("user",), "end_user", read_text),
    Rule("langgraph", ("metadata", "langgraph_node"), "agent", read_text),
    Rule("langgraph", ("metadata", "thread_id"), "run", read_text),
    Rule("agents-sdk", ("metadata", "workflow_name"), "workflow", read_text),
    Rule("agents-sdk", ("metadata", "group_id"), "run", read_text),
    Rule("openai", ("prompt_cache_retention",), "keep_for", _retention),
    Rule("vllm", ("session_id",), "session", read_text),
    Rule("openai", ("conversation",), "session", _id),
    Rule("vllm", ("request_id",), "request_id", read_text),
    Rule("vllm", ("cache_salt",), "salt", read_text),
    Rule("sglang", ("rid",), "request_id", read_text),
    Rule("sglang", ("extra_key",), "salt", _joined),
    Rule("dynamo", ("nvext", "agent_hints", "priority"), "priority", _number),
    Rule("vllm", ("priority",), "priority", _negated),
    Rule("dynamo", ("nvext", "agent_hints", "osl"), "output_tokens", read_whole),
    Rule("sglang", ("agent_hints", "workflow_id"), "workflow", read_text),
    Rule("sglang", ("agent_hints", "agent_id"), "agent", read_text),
    Rule("dynamo", ("nvext", "cache_control"), "keep_for", kept_for),
    Rule("sglang", ("agent_hints", "cache_ttl_ms"), "keep_for", _kept_milliseconds),
    Rule("sglang", ("agent_hints", "expected_tool_duration_ms"), "returns_in", _milliseconds),
)
HEADERS = (
    Rule("dynamo", ("x-dynamo-session-id",), "session", read_text),
    Rule("dynamo", ("x-dynamo-parent-session-id",), "parent", read_text),
    Rule("dynamo", ("x-dynamo-session-final",), "final", _flag),
    Rule("coding-agents", ("x-claude-code-agent-id",), "session", read_text),
    Rule("coding-agents", ("x-claude-code-parent-agent-id",), "parent", read_text),
    Rule("coding-agents", ("x-claude-code-session-id",), "session", read_text),
    Rule("coding-agents", ("x-claude-code-session-id",), "run", read_text),
    Rule("coding-agents", ("thread-id",), "session", read_text),
    Rule("coding-agents", ("x-codex-parent-thread-id",), "parent", read_text),
    Rule("coding-agents", ("session-id",), "run", read_text),
    Rule("coding-agents", ("conversation_id",), "session", read_text),
    Rule("coding-agents", ("session_id",), "session", read_text),
    Rule("llm-d", ("session-id",), "session", read_text),
    Rule("llm-d", ("x-session-id",), "session", read_text),
    Rule("llm-d", ("x-session-affinity",), "session", read_text),
    Rule("llm-d", ("x-parent-session-id",), "parent", read_text),
)
RULES = (*KEDGE, *BODY, *HEADERS)

CARRIERS = (("kv_transfer_params", "vllm"), ("vllm_xargs", "vllm"), ("custom_params", "sglang"))
"""Pass-through fields of other servers, which may contain the `kedge` field, with their dialects."""
STRICT = {"reuse", "guard", "bindings"}
"""Fields of `kedge` that must be valid."""
NO_HINTS = {
    *("metadata", "store", "service_tier", "parallel_tool_calls", "reasoning_effort", "verbosity", "include"),
    *("prompt_cache_key", "previous_response_id"),
}
"""Known fields without an effect here: one engine has one cache, and nothing is stored."""
UNSUPPORTED: Mapping[tuple[str, ...], tuple[str, frozenset[str]]] = {
    ("nvext",): ("dynamo", frozenset()),
    ("nvext", "agent_hints"): ("dynamo", frozenset({"strict_priority", "speculative_prefill"})),
    ("agent_hints",): ("sglang", frozenset({"step_id", "parent_step_id", "reuse_hint"})),
}
"""Objects with hints -> their dialect, and hints in them that are known and have no effect here"""
