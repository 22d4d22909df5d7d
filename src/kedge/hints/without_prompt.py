"""Hints that come without a prompt (`POST /v1/hints`), and the answer to them: what becomes of each."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kedge.hints.actions import SHARED, ActionOutcome, ActionResult
from kedge.hints.call_hints import KEDGE, STRICT, Hints, kedge_field
from kedge.hints.values import MAX_EXPECTED, MAX_HINT_AGENTS, MAX_KEPT_SECONDS, MAX_NAME_LENGTH

OF_A_CALL = STRICT | {"fixed_tokens", "fixed_messages", "pick", "parent"}
"""Fields of `kedge` that are said of one call, and mean nothing without it"""
UNREPORTED = "was sent, and the engine has not reported yet what became of it"
NUMBER = "must be a number of seconds from 0 on"
NAME = f"must be a printable text of at most {MAX_NAME_LENGTH} characters"
ACCEPTED = {
    "seq": "must be an integer",
    "steps": f"must be an object of at most {MAX_HINT_AGENTS} agents with numbers or null",
    "returns_in": NUMBER,
    "keep_for": NUMBER,
    "expects": f"must be an object of at most {MAX_EXPECTED} sessions with seconds from 0 on or null",
    "final": "must be true or false",
}
"""What is accepted of a field; of all others a name"""
RUN_ENDED = ActionOutcome("final", "the run is forgotten", ActionResult.APPLIED)


def took_forecast(is_newer: bool) -> ActionOutcome:
    """Return what became of a run's forecast; `is_newer` is whether it replaced the one before."""
    if not is_newer:
        return ActionOutcome("steps", "the run has ended, or has a forecast with this number or a higher one")
    return ActionOutcome("steps", "the run's agents are kept by it", ActionResult.APPLIED)


def ends_run(hints: Hints) -> bool:
    """Return whether a run ends that is more than its session."""
    return hints.final and bool(hints.run) and hints.run != hints.session


def outcomes(body: Mapping[str, Any], hints: Hints, engine: Sequence[ActionOutcome]) -> list[dict[str, str]]:
    """Return what becomes of all that a body asks for, `hints` as they were read.

    `engine` has the outcomes of hints that an engine has taken. Actions of `kv_hints` come first, by their own ids.
    """
    taken = {(one.action_id, one.session): one for one in engine}
    kedge = kedge_field(body, Counter())
    settled = [_settled(one, taken) for one in hints.actions]
    clipped = [_clipped(one, kedge) for one in engine]
    return [one.to_dict() for one in (*settled, *clipped, *_refused(kedge, hints))]


def _settled(action: ActionOutcome, taken: Mapping[tuple[str, str], ActionOutcome]) -> ActionOutcome:
    """Return the outcome of an action of `kv_hints`, with what the engine says of the session that it is about."""
    if action.outcome is ActionResult.REJECTED or action.reason == SHARED.reason:
        return action
    engine = taken.get(("expects", action.session) if action.session else ("keep_for", ""))
    is_same = engine and engine.outcome is ActionResult.APPLIED and action.outcome is ActionResult.CLIPPED
    if engine is None or is_same:
        return action
    return action._replace(outcome=engine.outcome, reason=engine.reason)


def _clipped(one: ActionOutcome, kedge: Mapping[str, Any]) -> ActionOutcome:
    """Return an outcome, in which it is said where a time is longer than the longest one."""
    wanted = kedge.get("keep_for")
    if one.action_id != "keep_for" or not isinstance(wanted, int | float) or wanted <= MAX_KEPT_SECONDS:
        return one
    is_applied = one.outcome is ActionResult.APPLIED
    reason = f"{one.reason}; {MAX_KEPT_SECONDS:g} s at most"
    return one._replace(reason=reason, outcome=ActionResult.CLIPPED if is_applied else one.outcome)


def _refused(kedge: Mapping[str, Any], hints: Hints) -> Iterator[ActionOutcome]:
    """Yield the outcomes of fields whose values are not accepted, that are unknown, or mean nothing without a call or
    a run.
    """
    rules = {rule.path[1]: rule for rule in KEDGE}
    for name, value in list(kedge.items())[: len(rules) + len(STRICT)]:
        if name in OF_A_CALL:
            yield ActionOutcome(name, "goes with a call, and means nothing without one")
        elif name not in rules:
            yield ActionOutcome(str(name)[:MAX_NAME_LENGTH], "unknown")
        elif value is not None:
            try:
                rules[name].read(value)
            except ValueError:
                yield ActionOutcome(name, ACCEPTED.get(name, NAME))
            else:
                if name == "steps" and not hints.run:
                    yield ActionOutcome(name, "needs a run")
