"""What clients say of sessions between two requests: what becomes of each hint, and what stands for later turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from kedge.hints.actions import ActionOutcome, ActionResult
from kedge.hints.values import MAX_KEPT_SECONDS
from kedge.policies.sessions.tracker import SessionState, SessionTracker
from kedge.policies.sessions.turns import UNKNOWN_END, SessionKey, TurnEnd
from kedge.structures.bounded import BoundedDict
from kedge.types import Namespace, TurnHints

UNKNOWN = "no such session is known"
NAMELESS = "needs the id of the session that it is said of"
GIVEN_UP = "the session ends"
NO_SESSIONS = "this engine's cache does not follow sessions"
LATER = "counts from the session's next answer on"


class SessionAdvice:
    """Takes what clients say of sessions between requests. One thread owns it, together with the sessions."""

    def __init__(self, tracker: SessionTracker, obstacle: Callable[[SessionKey], str]) -> None:
        """Begin without hints. `obstacle` says why one on when a session returns is not used yet; "" where it is."""
        self._tracker, self._obstacle = tracker, obstacle
        self._standing: BoundedDict[SessionKey, TurnEnd] = BoundedDict(owner=lambda key: key.namespace.tenant)
        """Hints for turns that bring none of their own; no tenant evicts those of another."""

    def __len__(self) -> int:
        """Return the number of sessions that a hint stands for."""
        return len(self._standing)

    def _update(self, key: SessionKey, **changes: Any) -> None:
        """Change what is remembered of a session's hints."""
        self._standing[key] = replace(self._standing.get(key, UNKNOWN_END), **changes)

    # between requests -----------------------------------------------------------------------------------------

    def take(self, namespace: Namespace, hints: TurnHints, now: float) -> Iterator[ActionOutcome]:
        """Take hints at `now`, and yield what becomes of each: of those on the session itself, then of `expects`."""
        key, said = SessionKey(namespace, hints.session), _said(hints)
        if said and not hints.session:
            yield from (ActionOutcome(name, NAMELESS) for name in said)
        elif hints.is_last:
            yield from self._end(key, said)
        else:
            if hints.keep_for is not None:
                yield self._keep(key, hints.keep_for, now)
            if hints.returns_in is not None:
                if self._tracker.state(key) is SessionState.IN_FLIGHT:
                    self._update(key, returns_in=hints.returns_in)
                    yield ActionOutcome("returns_in", "counts from the end of its request", ActionResult.DEFERRED)
                else:
                    outcome = self._expect(key, hints.returns_in, now)
                    yield outcome._replace(action_id="returns_in", session="")
        for other, seconds in hints.expects.items():
            yield self._expect(SessionKey(namespace, other), seconds, now)

    def _end(self, key: SessionKey, said: list[str]) -> Iterator[ActionOutcome]:
        yield from (ActionOutcome(name, GIVEN_UP) for name in said if name != "final")
        state = self._tracker.state(key)
        if state is SessionState.IN_FLIGHT:
            self._standing[key] = TurnEnd(is_last=True)
            yield ActionOutcome("final", "it is forgotten with the end of its request", ActionResult.DEFERRED)
            return
        self._standing.pop(key, None)
        self._tracker.end(key)
        is_known = state is SessionState.IDLE
        yield ActionOutcome("final", "it is forgotten", ActionResult.APPLIED) if is_known else _rejected("final")

    def _keep(self, key: SessionKey, wanted: float, now: float) -> ActionOutcome:
        """Keep a session from now on, and after each of its answers."""
        seconds = min(wanted, MAX_KEPT_SECONDS)
        self._update(key, keep_for=seconds)
        limit = f"; {MAX_KEPT_SECONDS:g} s at most" if wanted > seconds else ""
        if self._tracker.state(key) is not SessionState.IDLE:
            return ActionOutcome("keep_for", LATER + limit, ActionResult.DEFERRED)
        self._tracker.keep(key, now, seconds)
        if obstacle := self._obstacle(key):
            return ActionOutcome("keep_for", obstacle + limit, ActionResult.DEFERRED)
        what = "is kept" if seconds else "goes before other KV"
        result = ActionResult.CLIPPED if limit else ActionResult.APPLIED
        return ActionOutcome("keep_for", f"{what} from now on, and after each of its answers{limit}", result)

    def _expect(self, key: SessionKey, seconds: float, now: float) -> ActionOutcome:
        state, name = self._tracker.state(key), str(key.name)
        if state is SessionState.UNKNOWN:
            return _rejected("expects", name)
        if state is SessionState.IN_FLIGHT:
            return ActionOutcome("expects", "a request of it is in flight", session=name)
        self._tracker.expect(key, now, seconds)
        if obstacle := self._obstacle(key):
            return ActionOutcome("expects", obstacle, ActionResult.DEFERRED, name)
        how = "is kept and loaded by that time" if math.isfinite(seconds) else "goes before other KV"
        return ActionOutcome("expects", how, ActionResult.APPLIED, name)

    # with the end of a turn -----------------------------------------------------------------------------------

    def completed(self, key: SessionKey, end: TurnEnd) -> TurnEnd:
        """Return the end of a turn with what stands where its request has said nothing."""
        hint = self._standing.pop(key, None)
        if hint is None:
            return end
        end = end.or_else(hint)
        if hint.keep_for is not None and not end.is_last:
            self._standing[key] = TurnEnd(keep_for=hint.keep_for)
        return end

    def cancelled(self, key: SessionKey) -> None:
        """Take the end of a turn without an answer."""
        if (hint := self._standing.get(key)) and hint.is_last:
            del self._standing[key]
            self._tracker.end(key)


def refused(hints: TurnHints, reason: str, outcome: ActionResult = ActionResult.REJECTED) -> tuple[ActionOutcome, ...]:
    """Return the outcomes of hints none of which is taken, or known to be."""
    others = (ActionOutcome("expects", reason, outcome, name) for name in hints.expects)
    return (*(ActionOutcome(name, reason, outcome) for name in _said(hints)), *others)


def _said(hints: TurnHints) -> list[str]:
    """Return what is said of the session itself; the end of a call without a session is that of its run."""
    given = {
        "keep_for": hints.keep_for,
        "returns_in": hints.returns_in,
        "final": (hints.is_last and bool(hints.session)) or None,
    }
    return [name for name, value in given.items() if value is not None]


def _rejected(name: str, session: str = "") -> ActionOutcome:
    return ActionOutcome(name, UNKNOWN, session=session)
