"""Hints of a call, in whichever dialects of clients and servers they come, in one struct.

Hints are advisory: unknown ones and out-of-range values are ignored and counted. Only `kedge.reuse`,
`kedge.guard`, `kedge.fidelity` and `kedge.bindings` change the answer and must be valid. If several dialects set a
field, the first rule wins.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from kedge.checks import brief
from kedge.errors import RequestError
from kedge.guard import GuardMode
from kedge.hints.actions import ActionOutcome, read_actions
from kedge.hints.values import (
    DEFAULT_TTL,
    MAX_HINT_AGENTS,
    MAX_NAME_LENGTH,
    cache_marks,
    kept_for,
    read_expected,
    read_kept,
    read_number,
    read_seconds,
    read_text,
    read_ttl,
    read_whole,
    without_infinity,
)
from kedge.settings.sections import read_fidelity, shown_fidelity
from kedge.types import AgentId, ReuseMode, RunId, TurnHints, WorkflowId


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


def _flag(value: Any) -> bool:
    if value in ("true", "True", "1", "false", "False", "0"):
        return value in ("true", "True", "1")
    if not isinstance(value, bool):
        raise ValueError
    return value


def _steps(value: Any) -> dict[AgentId, float]:
    if not isinstance(value, dict) or len(value) > MAX_HINT_AGENTS:
        raise ValueError
    return {
        AgentId(read_text(agent)): math.inf if steps is None else read_number(steps) for agent, steps in value.items()
    }


def _milliseconds(value: Any) -> float:
    """Return a time that is given in milliseconds."""
    return read_seconds(value) / 1000


def _retention(value: Any) -> float:
    """Return how long OpenAI's `prompt_cache_retention` asks to keep a prompt."""
    return read_ttl(DEFAULT_TTL if value in ("in_memory", "in-memory") else value)


def _salt(value: Any) -> str:
    """Return what separates caches; SGLang's `extra_key` may be a list. An empty one would separate nothing."""
    if not (parts := value if isinstance(value, list) else [value]) or not all(parts):
        raise ValueError
    return "\x1f".join(map(read_text, parts))


_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("workflow", "run", "agent", "client", "pick", "session", "parent"), read_text),
    **dict.fromkeys(("fixed_tokens", "fixed_messages"), read_whole),
    "seq": _seq,
    "steps": _steps,
    "returns_in": read_seconds,
    "keep_for": read_kept,
    "expects": read_expected,
    "final": _flag,
}
KEDGE = tuple(Rule("kedge", ("kedge", name), name, read) for name, read in _FIELDS.items())
BODY = (
    Rule("langgraph", ("metadata", "langgraph_node"), "agent", read_text),
    Rule("langgraph", ("metadata", "thread_id"), "run", read_text),
    Rule("agents-sdk", ("metadata", "workflow_name"), "workflow", read_text),
    Rule("agents-sdk", ("metadata", "group_id"), "run", read_text),
    Rule("openai", ("prompt_cache_retention",), "keep_for", _retention),
    Rule("vllm", ("session_id",), "session", read_text),
    Rule("vllm", ("cache_salt",), "salt", _salt),
    Rule("sglang", ("extra_key",), "salt", _salt),
    Rule("sglang", ("agent_hints", "workflow_id"), "workflow", read_text),
    Rule("sglang", ("agent_hints", "agent_id"), "agent", read_text),
    Rule("dynamo", ("nvext", "cache_control"), "keep_for", kept_for),
    Rule("sglang", ("agent_hints", "cache_ttl_ms"), "keep_for", lambda value: read_kept(_milliseconds(value))),
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
NAMING = {"salt", "session"}
"""What separates or names: a client that sends it as a field of its own relies on it, so it must be valid"""
ACCEPTED_NAME = f"must be a printable text of 1 to {MAX_NAME_LENGTH} characters"
STRICT = {"reuse", "guard", "fidelity", "bindings"}
"""Fields of `kedge` that must be valid."""
NO_HINTS = {
    *("metadata", "store", "service_tier", "parallel_tool_calls", "reasoning_effort", "verbosity", "include"),
    *("previous_response_id", "user", "safety_identifier", "prompt_cache_key", "request_id", "rid", "priority"),
}
"""Known fields without an effect here: one engine has one cache, nothing is stored, and requests have Kedge's ids."""
UNSUPPORTED: Mapping[tuple[str, ...], tuple[str, frozenset[str]]] = {
    ("nvext",): ("dynamo", frozenset()),
    ("nvext", "agent_hints"): ("dynamo", frozenset({"priority", "strict_priority", "osl", "speculative_prefill"})),
    ("agent_hints",): ("sglang", frozenset({"step_id", "parent_step_id", "reuse_hint"})),
}
"""Objects with hints -> their dialect, and hints in them that are known and have no effect here"""


M = TypeVar("M", bound=StrEnum)


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
    guard: GuardMode | None = None
    fidelity: float | None = None
    """Highest mean divergence from dense prefill, in nats a token"""
    pick: str = ""
    """The text before what the agent picks in its answers"""
    bindings: Mapping[str, str] | None = None
    """Placeholder -> value; with bindings the server fills the agent's template."""
    session: str = ""
    parent: str = ""
    """Session that started this one."""
    final: bool = False
    """Whether this is the last call of the run."""
    salt: str = ""
    """Exact and translated KV are shared only among requests with the same salt."""
    returns_in: float | None = None
    """Seconds until the session's next request"""
    keep_for: float | None = None
    """Seconds after the answer for which the session's KV is to be kept; 0: it may go first"""
    expects: Mapping[str, float] | None = None
    """Other sessions -> seconds until they are needed; infinite: not any more"""
    actions: tuple[ActionOutcome, ...] = ()
    """What became of the actions that the client asked for"""
    ignored: tuple[str, ...] = ()
    """Fields of the body that mean nothing here"""

    @property
    def turn(self) -> TurnHints:
        """What they say of the session whose turn the call is."""
        expects = self.expects or {}
        return TurnHints(self.session, self.parent, self.returns_in, self.final, self.keep_for, expects)

    def to_dict(self) -> dict[str, Any]:
        """Return the hints for the answer, without the bindings and without the salt, which may be a secret."""
        hidden = {"salt", "bindings", "actions", "ignored"}
        data = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in hidden}
        for name in ("steps", "expects"):
            data[name] = data[name] and without_infinity(data[name])
        data["fidelity"] = shown_fidelity(self.fidelity)
        return {name: value for name, value in data.items() if value not in ("", None) and value is not False}


class IgnoredReason(StrEnum):
    """Reason why a hint was ignored."""

    UNKNOWN = "unknown"
    BAD_VALUE = "bad value"
    UNSUPPORTED = "unsupported"


IgnoredHints = Counter[tuple[str, IgnoredReason]]
"""Number of ignored hints by dialect and reason."""


def read_hints(body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[Hints, IgnoredHints]:
    """Return the hints in `body`, a body's fields besides OpenAI's own, and in `headers`, with the ignored ones.

    Names of headers are in lower case. Raises `RequestError` for an invalid `kedge.reuse`, `kedge.guard`,
    `kedge.fidelity` or `kedge.bindings`.
    """
    ignored: IgnoredHints = Counter()
    body = {**body, "kedge": kedge_field(body, ignored)}
    given: dict[str, Any] = {}
    for rule, value in (*_found(KEDGE + BODY, body), *_found(HEADERS, headers)):
        try:
            parsed = rule.read(value)
        except ValueError:
            if rule in BODY and len(rule.path) == 1 and rule.field in NAMING:
                raise RequestError(rule.path[0], brief(value), ACCEPTED_NAME) from None
            ignored[rule.dialect, IgnoredReason.BAD_VALUE] += 1
        else:
            if rule.field == "salt" and "salt" in given:  # both dialects' count: less would be shared than asked for
                parsed = f"{given.pop('salt')}\x1e{parsed}"
            given.setdefault(rule.field, parsed)
    if "kv_hints" in body:  # what its actions ask for, except where other hints say it
        wishes = read_actions(body["kv_hints"])
        ignored["kv_hints", IgnoredReason.UNSUPPORTED] += wishes.rejected
        given["actions"] = tuple(wishes.outcomes)
        if wishes.keep_for is not None:
            given.setdefault("keep_for", wishes.keep_for)
        if wishes.expects:
            given.setdefault("expects", wishes.expects)
    if marks := cache_marks(body):
        try:
            given.setdefault("keep_for", max(map(kept_for, marks)))
        except ValueError:
            ignored["anthropic", IgnoredReason.BAD_VALUE] += 1
    _complete(given, headers, ends_run="final" in body["kedge"] and given.get("final", False))
    if "steps" in given and not given["run"]:  # those of several callers would count as one run's
        del given["steps"]
        ignored["kedge", IgnoredReason.UNSUPPORTED] += 1
    unknown = _count_unknown(body, ignored)
    kedge = body["kedge"]
    reuse, guard = _mode(kedge, "reuse", ReuseMode), _mode(kedge, "guard", GuardMode)
    fidelity = _budget(kedge.get("fidelity"))
    bindings = kedge.get("bindings")
    is_read = isinstance(bindings, dict) and all(isinstance(text, str) for text in bindings.values())
    if bindings is not None and not is_read:
        raise RequestError("kedge.bindings", brief(bindings), "must be an object with a text for each placeholder")
    return Hints(reuse=reuse, guard=guard, fidelity=fidelity, bindings=bindings, ignored=unknown, **given), ignored


def _complete(given: dict[str, Any], headers: Mapping[str, str], *, ends_run: bool) -> None:
    """Add what follows from other hints: a session without a run is one, a sub-agent's id is unique only in its run,
    and the end of a session that is a part of a run does not end the run.
    """
    session = given.get("session", "")
    run = given["run"] = given.get("run") or session
    if "x-claude-code-agent-id" in headers and session and run != session:
        given["session"] = f"{run}/{session}"
        given["parent"] = f"{run}/{given['parent']}" if "parent" in given else run
    if not ends_run and session and run != session:
        given.pop("final", None)


def kedge_field(body: Mapping[str, Any], ignored: IgnoredHints) -> Mapping[str, Any]:
    """Return the field `kedge` of a body, empty where it has none; one that is no object is counted in `ignored`."""
    carried = (body[name].get("kedge") for name, _ in CARRIERS if isinstance(body.get(name), dict))
    given: object = next((one for one in (body.get("kedge"), *carried) if one is not None), {})
    if isinstance(given, dict):
        return given
    ignored["kedge", IgnoredReason.BAD_VALUE] += 1
    return {}


def _found(rules: tuple[Rule, ...], data: Mapping[str, Any]) -> Iterator[tuple[Rule, Any]]:
    for rule in rules:
        if (value := _at(rule.path, data)) is not None:
            yield rule, value


def _mode(kedge: Mapping[str, Any], key: str, modes: type[M]) -> M | None:
    value = kedge.get(key)
    if value is not None and value not in list(modes):
        raise RequestError(f"kedge.{key}", brief(value), f"must be one of {', '.join(modes)}")
    return None if value is None else modes(value)


def _budget(value: object) -> float | None:
    try:
        return None if value is None else read_fidelity(value)
    except ValueError as error:
        raise RequestError("kedge.fidelity", brief(value), str(error)) from None


def _count_unknown(body: Mapping[str, Any], ignored: IgnoredHints) -> tuple[str, ...]:
    """Count what is unknown. Returns the names of the body's own fields among it."""
    known = {rule.path[0] for rule in (*KEDGE, *BODY)} | {name for name, _ in CARRIERS} | NO_HINTS
    unknown = tuple(name for name in body if name not in known | {"kv_hints", "cache_control"})
    ignored["body", IgnoredReason.UNKNOWN] += len(unknown)
    ignored["kedge", IgnoredReason.UNKNOWN] += len(body["kedge"].keys() - {rule.path[1] for rule in KEDGE} - STRICT)
    for name, dialect in CARRIERS:
        if name in body:
            ignored[dialect, IgnoredReason.UNSUPPORTED] += _count_others(body[name], {"kedge"})
    for path, (dialect, unsupported) in UNSUPPORTED.items():
        data = _at(path, body)
        places = (*(rule.path for rule in BODY), *UNSUPPORTED)
        effective = {one[len(path)] for one in places if len(one) > len(path) and one[: len(path)] == path}
        ignored[dialect, IgnoredReason.UNKNOWN] += _count_others(data, effective | unsupported)
        ignored[dialect, IgnoredReason.UNSUPPORTED] += len(data.keys() & unsupported) if isinstance(data, dict) else 0
    return unknown


def _at(path: tuple[str, ...], data: Any) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _count_others(data: Any, known: set[str] | frozenset[str]) -> int:
    return len(data.keys() - known) if isinstance(data, dict) else int(data is not None)
