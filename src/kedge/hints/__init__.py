"""Hints that clients send with a call, in whichever dialects, read into one struct."""

from kedge.hints.actions import ActionOutcome
from kedge.hints.call_hints import Hints, IgnoredHints, IgnoredReason, read_hints
from kedge.hints.dialects import RULES

__all__ = ["RULES", "ActionOutcome", "Hints", "IgnoredHints", "IgnoredReason", "read_hints"]
