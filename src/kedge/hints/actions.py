"""Actions on KV that clients ask for in `kv_hints`, the envelope of vLLM, SGLang and Dynamo, and what becomes of them.

The envelope is `{"protocol_version", "message_id", "actions": [{"action_id", "action_type", "action_version",
"payload"}]}`. Actions are advisory, and the envelope has no way back: an answer's receipt is one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kedge.hints.values import read_text

MAX_ACTIONS = 64
"""Actions of a call that get an outcome"""
KNOWN_TYPES = {
    *("share", "prefetch", "demote", "pin", "retain", "set_priority"),
    *("kv.share", "kv.prefetch", "kv.demote", "kv.pin", "kv.retain", "kv.fetch", "vllm.set_priority"),
}
"""Types of actions that are proposed; a version may follow them behind an `@`"""


class ActionOutcome(NamedTuple):
    """An action by its id, and what became of it."""

    action_id: str
    reason: str
    outcome: str = "rejected"

    def to_dict(self) -> dict[str, str]:
        """Return the outcome for a receipt."""
        return {"action_id": self.action_id, "outcome": self.outcome, "reason": self.reason}


def read_actions(envelope: Any) -> tuple[ActionOutcome, ...]:
    """Return the outcomes of the first `MAX_ACTIONS` actions in `kv_hints`: Kedge carries out none so far."""
    actions = envelope.get("actions") if isinstance(envelope, dict) else None
    return tuple(_outcome(action) for action in actions[:MAX_ACTIONS]) if isinstance(actions, list) else ()


def _outcome(action: Any) -> ActionOutcome:
    try:
        name, kind = read_text(action["action_id"]), read_text(action["action_type"])
    except (KeyError, TypeError, ValueError):
        return ActionOutcome("", "an action needs an action_id and an action_type, both short texts")
    is_known = kind.partition("@")[0] in KNOWN_TYPES
    return ActionOutcome(name, "not supported" if is_known else "unknown action_type")
