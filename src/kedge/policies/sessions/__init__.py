"""Sessions that grow, pause and come back: found, and ranked by when they return."""

from kedge.policies.sessions.guard import Guard
from kedge.policies.sessions.ledger import NO_SESSIONS, SessionLedger, Turn, refused
from kedge.policies.sessions.tracker import SessionTracker
from kedge.policies.sessions.turns import SessionHints, SessionKey, TurnEnd

__all__ = [
    "NO_SESSIONS",
    "Guard",
    "SessionHints",
    "SessionKey",
    "SessionLedger",
    "SessionTracker",
    "Turn",
    "TurnEnd",
    "refused",
]
