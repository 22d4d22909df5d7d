"""Criteria: whether a value is shareable, from what its pool holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kedge.anchors.estimators import Match, anchor_weights
from kedge.anchors.keys import KeyBlock
from kedge.errors import PlanError, TranslationRefused

_BINS = 12
_FORGET = 0.9
"""What an observation's weight is multiplied by at every later one"""
_UNKNOWN = 1.0
"""Relative error assumed beyond everything that was observed: as bad as no offset at all"""


class Calibration:
    """How large the error of a slot's estimates is at which distance of the best match: what `error` predicts with.

    Relative errors are averaged in log-spaced bins of distance (exponentially forgetting), made monotone, and an empty
    bin takes the error of the next larger distance.
    """

    __slots__ = ("_curve", "_edges", "_sum", "_weight", "observations")

    def __init__(self) -> None:
        self._edges = torch.logspace(-2, 0, _BINS - 1)
        self._weight = torch.zeros(_BINS)
        self._sum = torch.zeros(_BINS)
        self._curve = torch.full((_BINS,), _UNKNOWN)
        self.observations = 0

    @classmethod
    def restored(cls, sums: Tensor, observations: int) -> Calibration:
        """The one that had these `sums`. Raises `PlanError` where they are none."""
        result = cls()
        if sums.shape != (2, _BINS) or not torch.isfinite(sums).all():
            raise PlanError("sums", tuple(sums.shape), f"are not those of {_BINS} bins")
        result._weight, result._sum = sums.clone()
        result._curve = _monotone(result._weight, result._sum)
        result.observations = observations
        return result

    @property
    def sums(self) -> Tensor:
        """float32 [2, bins], on the CPU: weights and errors by bin, from which everything else follows."""
        return torch.stack([self._weight, self._sum])

    def updated(self, distance: Tensor, error: Tensor) -> Calibration:
        """With one more observation: distance and relative error of its tokens, each [tokens].

        Raises `TranslationRefused` where an error is not finite.
        """
        if not torch.isfinite(error).all():
            raise TranslationRefused("error", float(error.max()), "an observed offset is not finite")
        bins = torch.bucketize(distance.cpu(), self._edges)
        result = Calibration()
        result._weight = (self._weight * _FORGET).index_add_(0, bins, torch.ones(len(bins)))
        result._sum = (self._sum * _FORGET).index_add_(0, bins, error.cpu())
        result._curve = _monotone(result._weight, result._sum)
        result.observations = self.observations + 1
        return result

    def predict(self, distance: Tensor) -> Tensor:
        """float32 [tokens], on the CPU: predicted relative error."""
        return self._curve[torch.bucketize(distance.cpu(), self._edges)]


def _monotone(weight: Tensor, total: Tensor) -> Tensor:
    """Isotonic regression over the bins that hold a token or more (pool adjacent violators); others look upwards."""
    pools: list[tuple[float, float, list[int]]] = []
    for i in (weight >= 1).nonzero().flatten().tolist():
        w, s, bins = float(weight[i]), float(total[i]), [i]
        while pools and pools[-1][1] / pools[-1][0] > s / w:
            before = pools.pop()
            w, s, bins = w + before[0], s + before[1], before[2] + bins
        pools.append((w, s, bins))
    known = {i: s / w for w, s, bins in pools for i in bins}
    curve = torch.empty(_BINS)
    above = max(_UNKNOWN, *known.values()) if known else _UNKNOWN
    for i in reversed(range(_BINS)):
        curve[i] = above = known.get(i, above)
    return curve


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason` says why a value is not shareable; tokens that are `weak` (bool [tokens], CPU) should be computed."""

    reason: str
    weak: Tensor

    @property
    def shareable(self) -> bool:
        return not self.reason


class Criterion(Protocol):
    """Judges a value by the anchors that have offsets for the slot in question."""

    @property
    def calibrates(self) -> bool:
        """Whether it needs the slot's calibration."""

    def lacks(self, tokens: int, block: KeyBlock, calibration: Calibration) -> str:
        """Why a value of `tokens` tokens cannot be judged shareable whatever it is, or the empty text."""

    def judge(self, match: Match, calibration: Calibration) -> Verdict:
        """The verdict, where nothing lacks."""


@dataclass(frozen=True, slots=True)
class Entropy:
    """KVCOMM, Eq. 5: not shareable if longer than every anchor, or if the entropy of its weights over the anchors at
    least as long exceeds gamma · log of their number. One such anchor alone is no ground to share."""

    gamma: float
    temperature: float
    calibrates: bool = False

    def lacks(self, tokens: int, block: KeyBlock, calibration: Calibration) -> str:  # noqa: ARG002
        return lacks_length(tokens, block)

    def judge(self, match: Match, calibration: Calibration) -> Verdict:  # noqa: ARG002
        anchors = match.block.long_enough(len(match.query.tokens))
        distances = match.block.aligned(match.query, anchors).sum(1).sqrt()
        chosen = None if match.same is None else int((anchors == match.same).nonzero())
        share = entropy(anchor_weights(distances, self.temperature, chosen)) / math.log(len(anchors))
        reason = f"entropy is {share:.2f} of its maximum, above {self.gamma:g}" if share > self.gamma else ""
        return Verdict(reason, torch.zeros(len(match.query.tokens), dtype=torch.bool))


def lacks_length(tokens: int, block: KeyBlock) -> str:
    """Why the anchors are not as long as Eq. 5 asks for, or the empty text."""
    match len(block.long_enough(tokens)):
        case 0:
            return "longer than every anchor"
        case 1:
            return "only one anchor is as long"
    return ""


def entropy(weights: Tensor) -> float:
    """-Σ w log w of weights that sum to 1."""
    return float(torch.special.entr(weights).sum())


@dataclass(frozen=True, slots=True)
class Error:
    """Shareable if the mean predicted relative error of its offsets is small, from enough anchors."""

    min_anchors: int
    max_error: float
    weak_error: float
    calibrates: bool = True

    def lacks(self, tokens: int, block: KeyBlock, calibration: Calibration) -> str:  # noqa: ARG002
        if len(block.ids) < self.min_anchors:
            return f"{len(block.ids)} anchors of {self.min_anchors}"
        return "" if calibration.observations else "not calibrated yet"

    def judge(self, match: Match, calibration: Calibration) -> Verdict:
        error = calibration.predict(match.proposal.distance)
        mean = float(error.mean())
        reason = f"predicted error is {mean:.2f}, above {self.max_error:g}" if not mean <= self.max_error else ""
        return Verdict(reason, error > self.weak_error)
