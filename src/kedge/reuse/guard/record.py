"""The state of one placeholder in an agent's prompts, and how evidence moves it.

Sentinel tokens that were drawn from the translated ones say directly how far off these are, by one limit. Weak tokens,
which are computed anyway as no offset predicts them, are further off without harm: how far is usual is learned, and
only a multiple of it, in the mean of many, says that something is wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, isfinite, lgamma, log
from statistics import fmean
from typing import Annotated

from pydantic import Field

from kedge.guard import GuardState
from kedge.reuse.guard.comparison import DecisionComparison
from kedge.settings import GuardSettings

ALPHA = 0.05
"""Probability with which an agent within its limit is switched off all the same, over any number of looks: the usual
level of a test"""
TRIALS = 8
"""Checks in a row without a change by which a suspect agent is translated again; four times as many after it was
switched off, and twice as many every further time, up to 1,024"""
SETTLED = 8
"""Calls after which a placeholder, or an agent's rung, is no longer new: what is usual of its weak tokens is known,
and not every answer is compared any more"""
FORGET = 0.02
"""Weight of a new error in the usual one"""
WEAK_REFUTES = 2.0
"""Times the usual error of a call's weak tokens from which it is refuted"""
LEAST_WEAK = 4
"""Weak tokens that say something together"""

Errors = Mapping[str, Sequence[float]]
"""Placeholder -> the relative errors of its sentinel tokens"""


@dataclass(slots=True)
class UsualError:
    """The usual mean error of a placeholder's weak tokens: a moving average over calls."""

    mean: float = 0.0
    calls: int = 0

    def observe(self, error: float) -> None:
        """Take the mean error of a call."""
        self.calls += 1
        self.mean += max(1 / self.calls, FORGET) * (error - self.mean)


def refuted_by_drawn(errors: Errors, limit: float) -> frozenset[str]:
    """Return the placeholders that tokens drawn from the translated ones refute. A single one may be far off by chance,
    but not the mean of a call: above `limit` it refutes.
    """
    means = {name: fmean(found) for name, found in errors.items()}
    is_far = bool(means) and _is_above(_overall(errors), limit)
    return _blamed(means, dict.fromkeys(means, limit)) if is_far else frozenset()


def refuted_by_weak(errors: Errors, usual: Mapping[str, UsualError], limit: float) -> frozenset[str]:
    """Return the placeholders that weak tokens refute: where their usual error is known and their mean error, over all
    of them, is above a multiple of it and above `limit`. What is not a number always refutes.
    """
    means = {name: fmean(found) for name, found in errors.items()}
    bounds = {name: max(limit, WEAK_REFUTES * usual[name].mean) for name in means}
    if not all(map(isfinite, means.values())):
        return _blamed(means, dict.fromkeys(means, inf))
    settled = {name: found for name, found in errors.items() if usual[name].calls >= SETTLED}
    tokens = sum(map(len, settled.values()))
    if tokens < LEAST_WEAK:
        return frozenset()
    expected = sum(usual[name].mean * len(found) for name, found in settled.items()) / tokens
    is_far = _overall(settled) > max(limit, WEAK_REFUTES * expected)
    return _blamed({name: means[name] for name in settled}, bounds) if is_far else frozenset()


def _overall(errors: Errors) -> float:
    return fmean(error for found in errors.values() for error in found)


def _is_above(error: float, bound: float) -> bool:
    """Return whether an error is above a bound, or no number."""
    return not (isfinite(error) and error <= bound)


def _blamed(means: Mapping[str, float], bounds: Mapping[str, float]) -> frozenset[str]:
    """Return the placeholders above their bounds, or all if none is alone."""
    return frozenset(name for name, mean in means.items() if _is_above(mean, bounds[name])) or frozenset(means)


CHANGED, SAME = 0.5, 10.0
"""The mixture's prior, Beta(0.5, 10): changed decisions are expected to be rare. It moves the bounds, not their
validity."""


@dataclass(slots=True)
class ChangeEvidence:
    """Counts of decisions that were compared, and that differed; bounds hold after every observation.

    Under a true share p the likelihood ratio of a Beta mixture against p is a martingale that starts at 1 (an e-value),
    so by Ville's inequality it ever reaches 1 / alpha with probability at most alpha. The shares that it has not
    refuted are a confidence sequence: at any time, and at a time chosen by what was seen, it holds the true share with
    probability 1 - alpha (Robbins, *Statistical methods related to the law of the iterated logarithm*, 1970; Howard et
    al., *Time-uniform, nonparametric, nonasymptotic confidence sequences*, 2021).
    """

    checks: int = 0
    changed: int = 0
    restarts: int = 0
    """Times that it began anew, or older comparisons were halved"""

    def observe(self, changed: bool, is_proved: bool = True, most: int = 1024) -> None:
        """Count one comparison. Once `is_proved`, of more than `most` each counts half: else a fault shows the later,
        the longer all went well. Powers below 1 of likelihood ratios have expectations of at most 1: a valid test too.
        """
        self.checks, self.changed = self.checks + 1, self.changed + changed
        if is_proved and self.checks > most:
            self.checks, self.changed, self.restarts = self.checks // 2, self.changed // 2, self.restarts + 1

    @property
    def alpha(self) -> float:
        """Probability with which it may be wrong since the last restart; over all restarts it adds up to `ALPHA`."""
        return ALPHA / ((self.restarts + 1) * (self.restarts + 2))

    @property
    def share(self) -> float:
        """The observed share of changed decisions; 0 without any."""
        return self.changed / self.checks if self.checks else 0.0

    def log_e_value(self, share: float) -> float:
        """Return the logarithm of the e-value against this true share, in (0, 1)."""
        same = self.checks - self.changed
        mixture = _log_beta(CHANGED + self.changed, SAME + same) - _log_beta(CHANGED, SAME)
        return mixture - self.changed * log(share) - same * log(1 - share)

    def exceeds(self, share: float, alpha: float) -> bool:
        """Return whether the true share is above `share` with confidence 1 - `alpha`: O(1)."""
        return self.share > share and self.log_e_value(share) >= -log(alpha)

    def is_below(self, share: float, alpha: float) -> bool:
        """Return whether the true share is below `share` with confidence 1 - `alpha`: O(1)."""
        return self.share < share and self.log_e_value(share) >= -log(alpha)

    def upper(self, alpha: float) -> float:
        """Return the upper confidence bound of the share; 1 without observations."""
        return _upper(self.checks, self.changed, alpha)


@lru_cache(maxsize=4096)
def _upper(checks: int, changed: int, alpha: float) -> float:
    seen = ChangeEvidence(checks, changed)
    low, high = max(seen.share, 1e-9), 1 - 1e-9
    if checks == changed or not seen.is_below(high, alpha):
        return 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (low, middle) if seen.is_below(middle, alpha) else (middle, high)
    return high


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)


@dataclass(slots=True)
class GuardRecord:
    """What is known of the translation of one placeholder for one agent.

    It begins as `shadow` without being withheld: the planner translates nothing until the anchors predict a small
    error. The first translation makes it a `canary`, and enough evidence of a low share of changes turns it `on`. A
    change makes it suspect while more have changed than may: it is withheld, and every call is tried both ways until
    there is evidence for or against it. Evidence against it is a breach: its anchors are discarded as well.

    Evidence restarts with every change of state but the one to `on`. All restarts together call an agent below the
    limit a breach with probability `ALPHA` at most, and one above it `on`. The change that made it suspect, which has
    chosen the moment, is not counted again.

    It is saved but for what is usual of sentinel tokens, which is learned anew.
    """

    state: GuardState = GuardState.SHADOW
    evidence: ChangeEvidence = field(default_factory=ChangeEvidence)
    """Since the last change of state, but for that from `canary` to `on`"""
    withheld: bool = False
    epoch: int = 0
    """Number of breaches: anchors of an earlier epoch are not used"""
    suspicions: int = 0
    kl: float = 0.0
    """Largest mean divergence of any check since the last change of state, in nats"""
    needed: int = 0
    """Trials in a row without a change by which it is translated again"""
    streak: int = 0
    """Those seen"""
    refutations: ChangeEvidence = field(default_factory=ChangeEvidence)
    """Readings of sentinel tokens since the last breach, and how many of them refuted a translation"""
    weak_errors: Annotated[UsualError, Field(exclude=True)] = field(default_factory=UsualError, init=False)
    """Of sentinel tokens that are computed anyway"""
    calls: Annotated[int, Field(exclude=True)] = field(default=0, init=False)
    """Translated calls since the last change of state, but for that from `canary` to `on`"""

    def translated(self) -> None:
        """Note that a call was translated, so the anchors predict a small error."""
        self.calls += 1
        if self.state is GuardState.SHADOW and not self.withheld:
            self.state = GuardState.CANARY

    @property
    def is_new(self) -> bool:
        """Whether so few calls were translated that translated tokens are drawn as sentinels in each of them."""
        return self.calls < SETTLED

    def observe(self, seen: DecisionComparison, settings: GuardSettings) -> None:
        """Take the comparison of a translated answer with dense prefill's, whichever was served."""
        self.evidence.observe(seen.changed, self.state is GuardState.ON)
        self.kl = max(self.kl, seen.kl)
        if settings.max_changed == 1:
            self.state = GuardState.ON
        elif self.evidence.exceeds(settings.max_changed, self.evidence.alpha):
            self._breach()
        elif self.withheld:
            self.streak = 0 if seen.changed else self.streak + 1
            if self.streak >= self.needed:
                self._restart(GuardState.CANARY)
        elif seen.changed and self.evidence.share > settings.max_changed:
            self._suspect(seen.kl)
        elif self.evidence.is_below(settings.max_changed, self.evidence.alpha):
            self.state = GuardState.ON

    def read_sentinels(self, settings: GuardSettings, *, refuted: bool) -> None:
        """Take a reading of sentinel tokens. A reading that refutes a translation makes the placeholder suspect. Once
        more readings do than answers may change, its anchors are discarded: by chance two are far apart.
        """
        self.refutations.observe(refuted)
        if refuted and self.refutations.exceeds(settings.max_changed, self.refutations.alpha):
            self._breach()
        elif refuted:
            self._suspect()

    def _suspect(self, kl: float = 0.0) -> None:
        self.suspicions += 1
        self._restart(GuardState.SHADOW)
        self.kl, self.withheld, self.needed = kl, True, TRIALS

    def _breach(self) -> None:
        self.epoch += 1
        self._restart(GuardState.SHADOW)
        self.withheld, self.refutations = True, ChangeEvidence(restarts=self.refutations.restarts + 1)
        self.needed = TRIALS * 2 ** min(1 + self.epoch, 7)

    def _restart(self, state: GuardState) -> None:
        self.evidence = ChangeEvidence(restarts=self.evidence.restarts + 1)
        self.state, self.withheld = state, False
        self.kl, self.streak, self.calls = 0.0, 0, 0
