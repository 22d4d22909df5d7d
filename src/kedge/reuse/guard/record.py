"""The state of one placeholder in an agent's prompts, and how evidence moves it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kedge.guard import DecisionKind, GuardState
from kedge.reuse.guard.comparison import DecisionComparison
from kedge.reuse.guard.evidence import ChangeEvidence
from kedge.reuse.guard.sentinel_errors import SETTLED, UsualError
from kedge.settings import GuardSettings

AFTER_BREACH = 4
"""Times `trials` that are needed after the first breach"""
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
    by_kind: dict[DecisionKind, ChangeEvidence] = field(default_factory=dict)
    """The same for each kind of decision that was compared; the state follows what these mean together"""
    withheld: bool = False
    epoch: int = 0
    """Number of breaches: anchors of an earlier epoch are not used"""
    suspicions: int = 0
    kl: float = 0.0
    """Largest divergence of any check since the last change of state, in nats"""
    drawn_errors: UsualError = field(default_factory=UsualError)
    """Of sentinel tokens that were drawn from the translated ones"""
    weak_errors: UsualError = field(default_factory=UsualError)
    """Of those that are computed anyway"""
    _calls: int = 0
    """Translated calls since the last change of state, but for that from `canary` to `on`"""
    _restarts: int = 0
    _needed: int = 0
    _streak: int = 0
    """Trials in a row without a change"""
    refutations: ChangeEvidence = field(default_factory=ChangeEvidence)
    """Readings of sentinel tokens since the last breach, and those of them that refuted a translation"""

    @property
    def progress(self) -> tuple[int, int, int]:
        """How often evidence began anew, the trials without a change that are needed, and those seen in a row."""
        return self._restarts, self._needed, self._streak

    @progress.setter
    def progress(self, counts: tuple[int, int, int]) -> None:
        self._restarts, self._needed, self._streak = counts

    def copy(self) -> GuardRecord:
        """Return a record of its own with the same counts: O(1)."""
        return replace(
            self,
            evidence=replace(self.evidence),
            by_kind={kind: replace(evidence) for kind, evidence in self.by_kind.items()},
            drawn_errors=replace(self.drawn_errors),
            weak_errors=replace(self.weak_errors),
            refutations=replace(self.refutations),
        )

    def translated(self) -> None:
        """Note that a call was translated, so the anchors predict a small error."""
        self._calls += 1
        if self.state is GuardState.SHADOW and not self.withheld:
            self.state = GuardState.CANARY

    @property
    def is_new(self) -> bool:
        """Whether so few calls were translated that translated tokens are drawn as sentinels in each of them."""
        return self._calls < SETTLED

    @property
    def is_translated(self) -> bool:
        """Whether a call was translated since the last change of state, but for that from `canary` to `on`."""
        return self._calls > 0

    def observe(self, seen: DecisionComparison, settings: GuardSettings) -> None:
        """Take the comparison of a translated answer with that of dense prefill, whichever of them was served."""
        self.evidence.observe(seen.changed)
        for kind, changed in seen.changes.items():
            self.by_kind.setdefault(kind, ChangeEvidence()).observe(changed)
        self.kl = max(self.kl, seen.kl)
        if self.evidence.exceeds(settings.max_changed, self._alpha(settings)):
            self._breach(settings)
        elif self.withheld:
            self._tried(seen, settings)
        elif seen.changed or seen.kl > settings.max_kl:
            self._suspect(settings, seen.kl)
        elif self.evidence.is_below(settings.max_changed, settings.alpha):
            self.state = GuardState.ON

    def read_sentinels(self, settings: GuardSettings, *, refuted: bool) -> None:
        """Take a reading of sentinel tokens. One that refutes a translation makes the placeholder suspect. Its anchors
        are discarded once more readings do than answers may change: two by chance are far apart.
        """
        self.refutations.observe(refuted)
        if refuted and self.refutations.exceeds(settings.max_changed, _spent(settings.alpha, self.epoch)):
            self._breach(settings)
        elif refuted:
            self._suspect(settings)

    def _alpha(self, settings: GuardSettings) -> float:
        return _spent(settings.alpha, self._restarts)

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
        self.withheld, self.refutations = True, ChangeEvidence()
        self._needed = min(MAX_TRIALS, settings.trials * AFTER_BREACH * 2 ** min(self.epoch - 1, 16))

    def _restart(self, state: GuardState) -> None:
        self.state, self.evidence, self.by_kind, self.withheld = state, ChangeEvidence(), {}, False
        self.kl, self._streak, self._calls = 0.0, 0, 0
        self._restarts += 1


def _spent(alpha: float, restarts: int) -> float:
    """Return the part of `alpha` for the evidence after so many restarts; all parts add up to it."""
    return alpha / ((restarts + 1) * (restarts + 2))
