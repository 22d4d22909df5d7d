"""Calls and runs that ended in an error, as they are reported."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_REASON = 300
"""Characters of a reason: what was wrong may be as long as a body."""
OVERLOADED = "overloaded"


class FailureKind(StrEnum):
    """What a call failed of: the client or a limit (refused), or the server (failed)."""

    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CallFailure:
    """A call or a run that ended in an error."""

    status: int
    code: str
    reason: str
    route: str = ""
    """Method and path, for a call."""
    workflow: str = ""
    agent: str = ""
    run: str = ""

    @property
    def kind(self) -> FailureKind:
        """Refused before it cost anything, or failed."""
        refused = self.status < 500 or self.code == OVERLOADED
        return FailureKind.REFUSED if refused else FailureKind.FAILED

    def is_like(self, other: CallFailure) -> bool:
        """Whether both are listed in one line: they differ in their reasons' figures at most."""
        return (self.status, self.code, *self._place()) == (other.status, other.code, *other._place())

    def _place(self) -> tuple[str, ...]:
        return self.route, self.workflow, self.agent, self.run

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the page."""
        reason = self.reason if len(self.reason) <= MAX_REASON else f"{self.reason[:MAX_REASON]}…"
        place = {"route": self.route, "workflow": self.workflow, "agent": self.agent, "run": self.run}
        return {"kind": self.kind, "status": self.status, "code": self.code, "reason": reason, **place}
