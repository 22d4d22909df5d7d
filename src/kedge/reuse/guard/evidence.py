"""A confidence bound for a share of changed decisions that may be looked at after every observation.

Under a true share p the likelihood ratio of a Beta mixture against p is a martingale that starts at 1 (an e-value), so
by Ville's inequality it ever reaches 1 / alpha with probability at most alpha. The shares that it has not refuted are a
confidence sequence: at any time, and at a time chosen by what was seen, it holds the true share with probability 1 -
alpha (Robbins, *Statistical methods related to the law of the iterated logarithm*, 1970; Howard et al.,
*Time-uniform, nonparametric, nonasymptotic confidence sequences*, 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lgamma, log

CHANGED, SAME = 0.5, 10.0
"""The mixture's prior, Beta(0.5, 10): changed decisions are expected to be rare. It moves the bounds, not their
validity."""
STEPS = 40
"""Halvings of an interval in the search for a bound: to 1e-12."""


@dataclass(slots=True)
class ChangeEvidence:
    """Counts of decisions that were compared, and of those that differed."""

    checks: int = 0
    changed: int = 0

    def observe(self, changed: bool) -> None:
        """Count one comparison."""
        self.checks += 1
        self.changed += changed

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
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if seen.is_below(middle, alpha) else (middle, high)
    return high


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)
