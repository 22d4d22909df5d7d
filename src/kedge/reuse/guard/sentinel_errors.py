"""Errors of sentinel tokens: what is usual of a placeholder, and what refutes a call's translation.

Tokens that were drawn from the translated ones say directly how far off these are, by one limit. Weak tokens, which are
computed anyway as no offset predicts them, are further off without harm: how far is usual is learned, and only a
multiple of it, in the mean of many, says that something is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite
from statistics import fmean

SETTLED = 8
"""Calls with sentinel tokens before any error counts as unusual"""
FORGET = 0.02
"""Weight of a new error in the usual one"""
UNUSUAL = 2.0
"""Times the usual error of a placeholder's drawn tokens from which a call is checked"""
GLANCE_REFUTES = 2.0
"""Times the limit above which a glance at drawn tokens of a few values refutes a call, in their mean. One token
is that far off by chance now and then, so each value has to be above the limit as well"""
WEAK_UNUSUAL, WEAK_REFUTES = 1.5, 2.0
"""Times the usual error of a call's weak tokens from which it is checked, and from which it is refuted"""
LEAST_WEAK = 4
"""Weak tokens that say something together"""

Errors = Mapping[str, Sequence[float]]
"""Placeholder -> the relative errors of its sentinel tokens"""


class SentinelFinding(StrEnum):
    """What the sentinel tokens of a request say of its translation."""

    USUAL = "usual"
    UNUSUAL = "unusual"
    """The errors are larger than before: its answer is worth a check."""
    REFUTED = "refuted"
    """What was translated is wrong."""


@dataclass(slots=True)
class UsualError:
    """The usual mean error of one kind of sentinel tokens of a placeholder: a moving average over calls."""

    mean: float = 0.0
    calls: int = 0

    def observe(self, error: float) -> None:
        """Take the mean error of a call."""
        self.calls += 1
        self.mean += max(1 / self.calls, FORGET) * (error - self.mean)

    @property
    def is_settled(self) -> bool:
        """Whether there were enough calls to say what is usual."""
        return self.calls >= SETTLED


@dataclass(frozen=True, slots=True)
class SentinelVerdict:
    """What follows from one kind of sentinel tokens of a call."""

    finding: SentinelFinding
    blamed: frozenset[str] = frozenset()
    """Where refuted: the placeholders to withhold"""


def judge_drawn(errors: Errors, usual: Mapping[str, UsualError], limit: float) -> SentinelVerdict:
    """Judge tokens that were drawn from the translated ones. A single one may be far off by chance, but not the mean
    of a call: above `limit` it is refuted.
    """
    means = {name: fmean(found) for name, found in errors.items()}
    if _is_above(_overall(errors), limit):
        return _refuted(means, dict.fromkeys(means, limit))
    settled = (name for name in means if usual[name].is_settled)
    is_unusual = any(means[name] > UNUSUAL * usual[name].mean for name in settled)
    return SentinelVerdict(SentinelFinding.UNUSUAL if is_unusual else SentinelFinding.USUAL)


def judge_glance(errors: Errors, usual: Mapping[str, UsualError], limit: float) -> SentinelVerdict:  # noqa: ARG001
    """Judge drawn tokens of a few values. What is not a number always refutes the call."""
    means = {name: fmean(found) for name, found in errors.items()}
    if not all(map(isfinite, means.values())):
        return _refuted(means, dict.fromkeys(means, inf))
    above = sum(mean > limit for mean in means.values())
    if above == len(means) > 1 and _overall(errors) > GLANCE_REFUTES * limit:
        return _refuted(means, dict.fromkeys(means, limit))
    return SentinelVerdict(SentinelFinding.UNUSUAL if above else SentinelFinding.USUAL)


def judge_weak(errors: Errors, usual: Mapping[str, UsualError], limit: float) -> SentinelVerdict:
    """Judge weak tokens: those of placeholders of which it is known what is usual, together. Above a multiple of that,
    and above `limit`, the call is refuted. What is not a number always refutes it.
    """
    means = {name: fmean(found) for name, found in errors.items()}
    bounds = {name: max(limit, WEAK_REFUTES * usual[name].mean) for name in means}
    if not all(map(isfinite, means.values())):
        return _refuted(means, dict.fromkeys(means, inf))
    settled = {name: found for name, found in errors.items() if usual[name].is_settled}
    tokens = sum(map(len, settled.values()))
    if tokens < LEAST_WEAK:
        return SentinelVerdict(SentinelFinding.USUAL)
    expected, seen = sum(usual[name].mean * len(found) for name, found in settled.items()) / tokens, _overall(settled)
    if seen > max(limit, WEAK_REFUTES * expected):
        return _refuted({name: means[name] for name in settled}, bounds)
    is_unusual = seen > WEAK_UNUSUAL * expected
    return SentinelVerdict(SentinelFinding.UNUSUAL if is_unusual else SentinelFinding.USUAL)


def _overall(errors: Errors) -> float:
    return fmean(error for found in errors.values() for error in found)


def _is_above(error: float, bound: float) -> bool:
    """Return whether an error is above a bound, or no number."""
    return not (isfinite(error) and error <= bound)


def _refuted(means: Mapping[str, float], bounds: Mapping[str, float]) -> SentinelVerdict:
    """Return a refutation of the placeholders above their bounds, or of all if none is alone."""
    above = frozenset(name for name, mean in means.items() if _is_above(mean, bounds[name]))
    return SentinelVerdict(SentinelFinding.REFUTED, above or frozenset(means))
