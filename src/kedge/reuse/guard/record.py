"""The state of one placeholder in an agent's prompts, and how evidence moves it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kedge.guard import GuardState
from kedge.reuse.guard.comparison import DecisionComparison
from kedge.reuse.guard.evidence import ChangeEvidence
from kedge.settings import GuardSettings

AFTER_BREACH = 4
"""Times `trials` that are needed after the first breach"""
SETTLED = 8
"""Calls with sentinel tokens before any error counts as unusual"""
UNUSUAL = 2.0
"""Times the usual error of sentinel tokens from which a call is checked"""
FORGET = 0.02
"""Weight of a new error in the usual one"""
MAX_TRIALS = 1024
"""Most checks without a change that are ever needed in a row"""


@dataclass(slots=True)
class GuardRecord:
    """What is known of the translation of one placeholder for one agent.

    It begins as `shadow` without being withheld: the planner translates nothing until the anchors predict a small
    error. The first translation makes it a `canary`, and enough evidence of a low share of changes turns it `on`. A
    single change, or one large divergence, makes it suspect: it is withheld, and every call is tried both ways until
    there is evidence for or against it. Evidence against it is a breach: its anchors are discarded as well.

    Evidence restarts with every change of state but the one to `on`. So that all restarts together call an agent below
    the limit a breach with probability `alpha` at most, the k-th of them (from 0) tests at `alpha` / ((k + 1) (k + 2)),
    and the change that made it suspect, which has chosen the moment, is not counted again.
    """

    state: GuardState = GuardState.SHADOW
    evidence: ChangeEvidence = field(default_factory=ChangeEvidence)
    """Since the last change of state, but for that from `canary` to `on`"""
    withheld: bool = False
    epoch: int = 0
    """Number of breaches: anchors of an earlier epoch are not used"""
    suspicions: int = 0
    kl: float = 0.0
    """Largest divergence of any check since the last change of state, in nats"""
    sentinel_error: float = 0.0
    """Usual relative error of sentinel tokens, a moving average"""
    _restarts: int = 0
    _needed: int = 0
    _streak: int = 0
    """Trials in a row without a change"""
    _errors: int = 0
    _refuted: bool = False
    """Whether sentinel tokens have refuted a translation since it was trusted"""

    def translated(self) -> None:
        """Note that a call was translated, so the anchors predict a small error."""
        if self.state is GuardState.SHADOW and not self.withheld:
            self.state = GuardState.CANARY

    def observe(self, seen: DecisionComparison, settings: GuardSettings) -> None:
        """Take the comparison of a translated answer with that of dense prefill, whichever of them was served."""
        self.evidence.observe(seen.changed)
        self.kl = max(self.kl, seen.kl)
        if self.evidence.exceeds(settings.max_changed, self._alpha(settings)):
            self._breach(settings)
        elif self.withheld:
            self._tried(seen, settings)
        elif seen.changed or seen.kl > settings.max_kl:
            self._suspect(settings, seen.kl)
        elif self.evidence.is_below(settings.max_changed, settings.alpha):
            self.state, self._refuted = GuardState.ON, False

    def refute(self, settings: GuardSettings) -> None:
        """Note that sentinel tokens have refuted a translation: the placeholder is suspect, and after another time
        before it is trusted its anchors are discarded.
        """
        if self._refuted:
            self._breach(settings)
        else:
            self._suspect(settings)
        self._refuted = True

    def is_unusual(self, error: float) -> bool:
        """Take the mean error of a call's sentinel tokens. Returns whether it is far above those of earlier calls."""
        self._errors += 1
        usual, self.sentinel_error = self.sentinel_error, self._averaged(error)
        return self._errors > SETTLED and error > UNUSUAL * usual

    def _averaged(self, error: float) -> float:
        weight = max(1 / self._errors, FORGET)
        return self.sentinel_error + weight * (error - self.sentinel_error)

    def _alpha(self, settings: GuardSettings) -> float:
        return settings.alpha / ((self._restarts + 1) * (self._restarts + 2))

    def _tried(self, seen: DecisionComparison, settings: GuardSettings) -> None:
        clean = not seen.changed and seen.kl <= settings.max_kl
        self._streak = self._streak + 1 if clean else 0
        if self._streak >= self._needed:
            self._restart(GuardState.CANARY)

    def _suspect(self, settings: GuardSettings, kl: float = 0.0) -> None:
        self.suspicions += 1
        self._restart(GuardState.SHADOW)
        self.kl, self.withheld, self._needed = kl, True, settings.trials

    def _breach(self, settings: GuardSettings) -> None:
        self.epoch += 1
        self._restart(GuardState.SHADOW)
        self.withheld = True
        self._needed = min(MAX_TRIALS, settings.trials * AFTER_BREACH * 2 ** min(self.epoch - 1, 16))

    def _restart(self, state: GuardState) -> None:
        self.state, self.evidence, self.withheld = state, ChangeEvidence(), False
        self.kl, self._streak = 0.0, 0
        self._restarts += 1
