"""How wrong a site's estimates turn out to be: what the criterion `error` predicts with.

A model sums up what it has read in a few tokens: line breaks, colons, the last word of a step. Their KV depends on more
of the text than their base KV shows, so their offsets are estimated badly. Learned are the error by the distance of the
best match, and that of every token of the prefix segment after the value, which is the same each time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kedge.errors import TranslationRefused

PARTS = ("bins", "prefix")
"""The tensors of a calibration"""
_BINS = 12
_FORGET = 0.9
"""Factor on an observation's weight at every later one."""
_UNKNOWN = 1.0
"""Relative error assumed at distances beyond all observed ones: as bad as no offset at all."""


class Calibration:
    """The expected errors of a site's estimates.

    Relative errors are averaged in log-spaced bins of distance (with exponential forgetting) and made monotone; an
    empty bin takes the error of the next larger distance. Immutable: `updated` returns a new one.
    """

    __slots__ = ("_curve", "_edges", "_sum", "_weight", "observations", "prefix_sums")

    def __init__(self) -> None:
        self._edges = torch.logspace(-2, 0, _BINS - 1)
        self._weight = torch.zeros(_BINS)
        self._sum = torch.zeros(_BINS)
        self._curve = torch.full((_BINS,), _UNKNOWN)
        self.prefix_sums = torch.zeros(())
        """float32 [tokens of the prefix segment], or [] before the first observation, on the CPU: sums of errors"""
        self.observations = 0

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], observations: int) -> Calibration:
        """Rebuild a calibration from its `tensors`. Raises `KeyError` if one is missing."""
        sums, prefix_sums = (tensors[part] for part in PARTS)
        result = cls()
        result._weight, result._sum = sums.clone()
        result._curve = _monotone(result._weight, result._sum)
        result.prefix_sums, result.observations = prefix_sums, observations
        return result

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is known but the number of observations, by the names in `PARTS`, on the CPU."""
        return dict(zip(PARTS, (torch.stack([self._weight, self._sum]), self.prefix_sums), strict=True))

    def updated(self, distance: Tensor, error: Tensor, prefix_error: Tensor) -> Calibration:
        """Return a copy with one more observation: distance and relative error of the value's tokens, and the relative
        errors of the prefix segment after it. All float32 [tokens].

        Raises `TranslationRefused` if an error is not finite.
        """
        if not (torch.isfinite(error).all() and torch.isfinite(prefix_error).all()):
            raise TranslationRefused("error", float(error.max()), "an observed offset is not finite")
        bins, seen = torch.bucketize(distance.cpu(), self._edges), error.cpu()
        result = Calibration()
        result._weight = (self._weight * _FORGET).index_add_(0, bins, torch.ones(len(bins)))
        result._sum = (self._sum * _FORGET).index_add_(0, bins, seen)
        result._curve = _monotone(result._weight, result._sum)
        result.prefix_sums = self.prefix_sums * _FORGET + prefix_error.cpu()
        result.observations = self.observations + 1
        return result

    def predict(self, distance: Tensor) -> Tensor:
        """Return float32 [tokens], on the CPU: predicted relative error of a value's tokens."""
        return self._curve[torch.bucketize(distance.cpu(), self._edges)]

    @property
    def prefix_error(self) -> Tensor:
        """float32 [tokens of the prefix segment], on the CPU: predicted relative error, from one observation on."""
        return self.prefix_sums * (1 - _FORGET) / (1 - _FORGET**self.observations)


def _monotone(weight: Tensor, total: Tensor) -> Tensor:
    """Return the isotonic regression over the bins that hold at least one token (pool adjacent violators); an empty bin
    takes the value of the next larger one.
    """
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
