"""Hints of a call in the dialects of several clients and servers, read into one struct.

Hints are advisory: unknown ones and out-of-range values are ignored and counted. Only `kedge.reuse` and
`kedge.bindings` change the answer and must be valid. If several dialects set a field, the first in `RULES` wins.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, NamedTuple

from kedge.errors import RequestError
from kedge.hint_values import MAX_HINT_AGENTS, read_text, read_whole
from kedge.types import AgentId, ReuseMode, RunId, WorkflowId


@dataclass(frozen=True, slots=True)
class Hints:
    """Normalised hints of a call. Empty, None and False stand for no hint."""

    workflow: WorkflowId = WorkflowId("")
    run: RunId = RunId("")
    agent: AgentId = AgentId("")
    client: str = ""
    seq: int | None = None
    """Sequence number, which grows with every forecast of a run."""
    steps: Mapping[AgentId, float] | None = None
    """Steps-to-execution by agent; infinite where the client sent null."""
    fixed_tokens: int | None = None
    fixed_messages: int | None = None
    """Length of the prefix that all calls of this agent share, in tokens or in messages."""
    reuse: ReuseMode | None = None
    bindings: Mapping[str, str] | None = None
    """Placeholder -> value; with bindings the server fills the agent's template."""
    session: str = ""
    parent: str = ""
    """Session that started this one."""
    final: bool = False
    """Whether this is the last call of the run."""
    priority: float | None = None
    """Higher goes first, also where the dialect counts the other way."""
    output_tokens: int | None = None
    """Expected length of the answer."""
    salt: str = ""
    """Exact and translated KV are shared only among requests with the same salt."""
    request_id: str = ""
    """The client's id of the request, not the engine's."""
    end_user: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the hints for the answer, without the bindings and without the salt, which may be a secret."""
        hidden = {"salt", "bindings"}
        data = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in hidden}
        data["steps"] = self.steps and {agent: _finite(steps) for agent, steps in self.steps.items()}
        return {name: value for name, value in data.items() if value not in ("", None) and value is not False}


class IgnoredReason(StrEnum):
    """Reason why a hint was ignored."""

    UNKNOWN = "unknown"
    BAD_VALUE = "bad value"
    UNSUPPORTED = "unsupported"


IgnoredHints = Counter[tuple[str, IgnoredReason]]
"""Number of ignored hints by dialect and reason."""


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


def _finite(steps: float) -> float | None:
    return steps if math.isfinite(steps) else None


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
    Rule("vllm", ("session_id",), "session", read_text),
    Rule("vllm", ("request_id",), "request_id", read_text),
    Rule("vllm", ("cache_salt",), "salt", read_text),
    Rule("sglang", ("rid",), "request_id", read_text),
    Rule("sglang", ("extra_key",), "salt", _joined),
    Rule("dynamo", ("nvext", "agent_hints", "priority"), "priority", _number),
    Rule("vllm", ("priority",), "priority", _negated),
    Rule("dynamo", ("nvext", "agent_hints", "osl"), "output_tokens", read_whole),
)
HEADERS = (
    Rule("dynamo", ("x-dynamo-session-id",), "session", read_text),
    Rule("dynamo", ("x-dynamo-parent-session-id",), "parent", read_text),
    Rule("dynamo", ("x-dynamo-session-final",), "final", _flag),
    Rule("coding-agents", ("x-claude-code-session-id",), "session", read_text),
    Rule("llm-d", ("session-id",), "session", read_text),
    Rule("llm-d", ("x-session-id",), "session", read_text),
    Rule("llm-d", ("x-session-affinity",), "session", read_text),
    Rule("llm-d", ("x-parent-session-id",), "parent", read_text),
)
RULES = (*KEDGE, *BODY, *HEADERS)

CARRIERS = (("kv_transfer_params", "vllm"), ("vllm_xargs", "vllm"), ("custom_params", "sglang"))
"""Pass-through fields of other servers, which may contain the `kedge` field, with their dialects."""
STRICT = {"reuse", "bindings"}
"""Fields of `kedge` that must be valid."""
NO_HINTS = {
    *("metadata", "store", "service_tier", "parallel_tool_calls", "reasoning_effort", "verbosity", "include"),
    *("prompt_cache_key", "prompt_cache_retention"),
}
"""Known fields without an effect here: one engine has one cache, and nothing is stored."""


def read_hints(body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[Hints, IgnoredHints]:
    """Return the hints in `body`, a body's fields besides OpenAI's own, and in `headers`, with the ignored ones.

    Names of headers are in lower case. Raises `RequestError` for an invalid `kedge.reuse` or `kedge.bindings`.
    """
    ignored: IgnoredHints = Counter()
    body = {**body, "kedge": _kedge_field(body, ignored)}
    given: dict[str, Any] = {}
    for rule, value in (*_found(KEDGE + BODY, body), *_found(HEADERS, headers)):
        try:
            parsed = rule.read(value)
        except ValueError:
            ignored[rule.dialect, IgnoredReason.BAD_VALUE] += 1
        else:
            given.setdefault(rule.field, parsed)
    given["run"] = given.get("run") or given.get("session", "")
    _count_unknown(body, ignored)
    return Hints(reuse=_reuse(body["kedge"]), bindings=_bindings(body["kedge"]), **given), ignored


def _kedge_field(body: Mapping[str, Any], ignored: IgnoredHints) -> Mapping[str, Any]:
    carried = (body[name].get("kedge") for name, _ in CARRIERS if isinstance(body.get(name), dict))
    given: object = next((one for one in (body.get("kedge"), *carried) if one is not None), {})
    if isinstance(given, dict):
        return given
    ignored["kedge", IgnoredReason.BAD_VALUE] += 1
    return {}


def _found(rules: tuple[Rule, ...], data: Mapping[str, Any]) -> Iterator[tuple[Rule, Any]]:
    for rule in rules:
        value: Any = data
        for key in rule.path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            yield rule, value


def _reuse(kedge: Mapping[str, Any]) -> ReuseMode | None:
    value = kedge.get("reuse")
    if value is not None and value not in list(ReuseMode):
        raise RequestError("kedge.reuse", value, f"must be one of {', '.join(ReuseMode)}")
    return None if value is None else ReuseMode(value)


def _bindings(kedge: Mapping[str, Any]) -> Mapping[str, str] | None:
    value = kedge.get("bindings")
    if value is not None and not (isinstance(value, dict) and all(isinstance(text, str) for text in value.values())):
        raise RequestError("kedge.bindings", value, "must be an object with a text for each placeholder")
    return value


def _count_unknown(body: Mapping[str, Any], ignored: IgnoredHints) -> None:
    known = {rule.path[0] for rule in (*KEDGE, *BODY)} | {name for name, _ in CARRIERS} | NO_HINTS
    ignored["body", IgnoredReason.UNKNOWN] += sum(name not in known | {"kv_hints"} for name in body)
    ignored["kedge", IgnoredReason.UNKNOWN] += len(body["kedge"].keys() - {rule.path[1] for rule in KEDGE} - STRICT)
    for name, dialect in CARRIERS:
        if name in body:
            ignored[dialect, IgnoredReason.UNSUPPORTED] += _count_others(body[name], {"kedge"})
    if "nvext" in body:
        hints = _get(body["nvext"], "agent_hints")
        ignored["dynamo", IgnoredReason.UNKNOWN] += _count_others(body["nvext"], {"agent_hints"})
        ignored["dynamo", IgnoredReason.UNKNOWN] += _count_others(hints, {"priority", "osl"})
    if "kv_hints" in body:
        actions = _get(body["kv_hints"], "actions")
        ignored["kv_hints", IgnoredReason.UNSUPPORTED] += len(actions) if isinstance(actions, list) else 1


def _get(data: Any, key: str) -> Any:
    return data.get(key) if isinstance(data, dict) else None


def _count_others(data: Any, known: set[str]) -> int:
    return len(data.keys() - known) if isinstance(data, dict) else int(data is not None)
