"""Sessions that grow, pause and come back: found, and ranked by when they return."""

from kedge.policies.sessions.guard import Guard
from kedge.policies.sessions.links import Chain
from kedge.policies.sessions.steps import NextRuns, SessionSteps
from kedge.policies.sessions.tracker import SessionHints, SessionKey, SessionTracker, StopReason

__all__ = ["Chain", "Guard", "NextRuns", "SessionHints", "SessionKey", "SessionSteps", "SessionTracker", "StopReason"]
