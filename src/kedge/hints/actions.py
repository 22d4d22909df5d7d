"""Actions on KV that clients ask for in `kv_hints`, the envelope of vLLM, SGLang and Dynamo, and what becomes of them.

The envelope is `{"protocol_version", "message_id", "actions": [{"action_id", "action_type", "action_version",
"payload"}]}`. Actions are advisory, and the envelope has no way back: an answer's receipt is one. Kedge ranks whole
sessions by when they return, so actions are read as statements about that.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Self

from kedge.hints.values import MAX_EXPECTED, MAX_KEPT_SECONDS, read_number, read_seconds, read_text

Payload = Mapping[str, Any]


class ActionResult(StrEnum):
    """What becomes of an action."""

    APPLIED = "applied"
    CLIPPED = "clipped"
    DEFERRED = "deferred"
    REJECTED = "rejected"


class ActionOutcome(NamedTuple):
    """An action by its id, and what becomes of it."""

    action_id: str
    reason: str
    outcome: ActionResult = ActionResult.REJECTED
    session: str = ""
    """The other session that it is about"""

    def to_dict(self) -> dict[str, str]:
        """Return the outcome for a receipt."""
        data = {"action_id": self.action_id, "outcome": self.outcome.value, "reason": self.reason}
        return {**data, "session": self.session} if self.session else data

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Return the outcome that `to_dict` gave. Raises `ValueError` for anything else."""
        if not isinstance(data, Mapping):
            raise ValueError
        action_id, reason = (read_text(data.get(name)) for name in ("action_id", "reason"))
        return cls(action_id, reason, ActionResult(str(data.get("outcome"))), read_text(data.get("session", "")))


@dataclass
class Wishes:
    """What the actions of a call ask for."""

    keep_for: float | None = None
    """Seconds after the answer for which the session's KV is to be kept; 0: it may go first"""
    expects: dict[str, float] = field(default_factory=dict)
    """Other sessions -> seconds until they are needed; infinite: not any more"""
    outcomes: list[ActionOutcome] = field(default_factory=list)
    rejected: int = 0


SHARED = ActionOutcome("", "equal beginnings of prompts share their KV within a tenant", ActionResult.APPLIED)
AWAITED = ActionOutcome("", "loads what the host has of the session, if it is known and idle", ActionResult.DEFERRED)
GOES_FIRST = ActionOutcome("", "goes before other KV while the session is idle, if it is known", ActionResult.DEFERRED)
KEPT = ActionOutcome("", "is kept before KV that is expected to be needed later", ActionResult.APPLIED)
SHORTENED = ActionOutcome("", f"is kept for {MAX_KEPT_SECONDS:g} s at most", ActionResult.CLIPPED)
AS_A_WHOLE = ActionOutcome("", "a session's KV is kept whole, and all priorities above 0 alike", ActionResult.CLIPPED)
OWN_ONLY = ActionOutcome("", "of other sessions than the own one, only prefetch and demote are supported")
NAMELESS = ActionOutcome("", "needs a session_id: what the request itself reads is loaded anyway")


def read_actions(envelope: Any) -> Wishes:
    """Return what the first `MAX_EXPECTED` actions in `kv_hints` ask for, with the outcome of each."""
    actions = envelope.get("actions") if isinstance(envelope, dict) else None
    if not isinstance(actions, list):
        return Wishes(rejected=1)
    wishes = Wishes(rejected=max(0, len(actions) - MAX_EXPECTED))
    for action in actions[:MAX_EXPECTED]:
        outcome = _outcome(action, wishes)
        wishes.outcomes.append(outcome)
        wishes.rejected += outcome.outcome is ActionResult.REJECTED
    return wishes


def _outcome(action: Any, wishes: Wishes) -> ActionOutcome:
    """Take one action into `wishes`, and return what becomes of it."""
    try:
        name, kind = read_text(action["action_id"]), read_text(action["action_type"])
    except (KeyError, TypeError, ValueError):
        return ActionOutcome("", "an action needs an action_id and an action_type, both short texts")
    apply = APPLIES.get(kind.partition("@")[0])
    if apply is None:
        return ActionOutcome(name, "unknown action_type")
    payload = action.get("payload")
    try:
        return apply(payload if isinstance(payload, dict) else {}, wishes)._replace(action_id=name)
    except ValueError:
        return ActionOutcome(name, "its payload has a value that is not accepted")


def _share(payload: Payload, wishes: Wishes) -> ActionOutcome:  # noqa: ARG001 (nothing is left to do)
    return SHARED


def _prefetch(payload: Payload, wishes: Wishes) -> ActionOutcome:
    session = _session(payload)
    if not session:
        return NAMELESS
    wishes.expects[session] = _seconds(payload, "eta_seconds", "in_seconds") or 0.0
    return AWAITED._replace(session=session)


def _demote(payload: Payload, wishes: Wishes) -> ActionOutcome:
    if session := _session(payload):
        wishes.expects[session] = math.inf
    else:
        wishes.keep_for = wishes.keep_for or 0.0
    return GOES_FIRST._replace(session=session)


def _retain(payload: Payload, wishes: Wishes) -> ActionOutcome:
    """Keep the session for as long as the longest of the `directives`, or the payload itself, says."""
    if _session(payload):
        return OWN_ONLY
    directives = payload.get("directives")
    parts = [one for one in directives if isinstance(one, dict)] if isinstance(directives, list) else [payload]
    wanted = [one for one in parts if read_number(one.get("priority", one.get("value", 1))) > 0]
    if not wanted:
        return _demote({}, wishes)
    lasting = [_seconds(one, "duration", "duration_seconds", "ttl_seconds") for one in wanted]
    times = [MAX_KEPT_SECONDS if seconds is None else seconds for seconds in lasting]
    wishes.keep_for = max(wishes.keep_for or 0.0, min(max(times), MAX_KEPT_SECONDS))  # the longest time counts
    if None in lasting or max(times) > MAX_KEPT_SECONDS:
        return SHORTENED
    is_ranked = parts != [payload] or not payload.keys().isdisjoint(("priority", "value"))
    return AS_A_WHOLE if is_ranked else KEPT


def _session(payload: Payload) -> str:
    return read_text(payload.get("session_id") or "")


def _seconds(payload: Payload, *names: str) -> float | None:
    """Return the time under the first of `names` that the payload has, None where it has none."""
    value = next((payload[name] for name in names if payload.get(name) is not None), None)
    return None if value is None else read_seconds(value)


APPLIES: Mapping[str, Callable[[Payload, Wishes], ActionOutcome]] = {
    **dict.fromkeys(("share", "kv.share"), _share),
    **dict.fromkeys(("prefetch", "kv.prefetch", "kv.fetch"), _prefetch),
    **dict.fromkeys(("demote", "kv.demote"), _demote),
    **dict.fromkeys(("pin", "kv.pin", "retain", "kv.retain", "set_priority", "vllm.set_priority"), _retain),
}
"""What each type of action does; a version may follow the type behind an `@`"""
