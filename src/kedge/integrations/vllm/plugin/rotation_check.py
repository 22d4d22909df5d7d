"""Whether Kedge rotates keys back as the model rotates them: translation is off until that was seen."""

from __future__ import annotations

import logging

from kedge.integrations.vllm.plugin.pages import rotation_error
from kedge.kv.segment import KVSegment
from kedge.types import Tokens

logger = logging.getLogger(__name__)
MAX_ROTATION_ERROR = 0.05
"""Relative difference of keys that rounding of a 16-bit type explains, and another rotation does not. With 8 bits it is
the largest error of rounding, to which two keys' mean errors do not sum up.
"""
UNCHECKED = "its rotary embedding has not been checked yet"


class RotationCheck:
    """The check of one rank, by captured prompts."""

    def __init__(self, rounding: float) -> None:
        """`rounding` is the largest relative error with which the pages keep a key."""
        self._limit = max(MAX_ROTATION_ERROR, rounding)
        self.refusal: str | None = UNCHECKED
        """Why nothing is translated, None where keys are rotated as the model does it"""
        self.is_checked = False
        """Whether a prompt has shown that they are rotated so"""

    @property
    def has_passed(self) -> bool:
        """Whether nothing speaks against what was learned."""
        return self.refusal is None

    def trust(self) -> None:
        """Translate with what an engine has learned that had checked this model. The next prompt is checked again."""
        self.refusal = None

    def check(self, tokens: Tokens, kv: KVSegment) -> None:
        """Compare the keys of equal tokens in a captured prompt. Nothing changes where no token occurs twice."""
        error = rotation_error(tokens, kv.keys[0])
        if error is None:
            return
        self.is_checked = error < self._limit
        self.refusal = None if self.is_checked else "its rotary embedding differs from Kedge's"
        if not self.is_checked:
            logger.warning("translation is off: %s (keys of equal tokens differ by %.2f)", self.refusal, error)
