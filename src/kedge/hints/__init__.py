"""Hints that clients send with a call, in whichever dialects, read into one struct."""

from kedge.hints.actions import ActionOutcome
from kedge.hints.call_hints import RULES, Hints, IgnoredHints, IgnoredReason, read_hints

__all__ = ["RULES", "ActionOutcome", "Hints", "IgnoredHints", "IgnoredReason", "read_hints"]
