"""How wrong a site's estimates turn out to be: what the criterion `error` predicts with.

A model sums up what it has read in a few tokens: line breaks, colons, the last word of a step. Their KV depends on more
of the text than their base KV shows, so their offsets are estimated badly, again and again. Three things are learned:
the error by the distance of the best match, how much more or less it is for this or that token id, and the error of
every token of the prefix segment after the value, which is the same each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from kedge.errors import TranslationRefused
from kedge.types import Tokens

PARTS = ("bins", "prefix", "token_ids", "token_sums")
"""The tensors of a calibration"""
_BINS = 12
_FORGET = 0.9
"""Factor on an observation's weight at every later one."""
_FORGET_TOKEN = 0.97
"""The same factor for single token ids, of which only a few occur in each observation."""
_UNKNOWN = 1.0
"""Relative error assumed at distances beyond all observed ones: as bad as no offset at all."""
_PRIOR = 0.2
"""Prior for the observed and for the predicted errors of a token id."""
_DOUBT = 1.25
"""Factor on the error of a token id that was never seen, where the worst counts and not the mean."""
_FORGOTTEN = 1e-3
"""Sum of predicted errors below which a token id is dropped."""


@dataclass(frozen=True)
class TokenErrors:
    """The ratios of observed to predicted errors by token id."""

    sums: Mapping[int, tuple[float, float]] = field(default_factory=lambda: MappingProxyType({}))
    """Observed and predicted errors by token id, with exponential forgetting."""

    def updated(self, tokens: Sequence[int], observed: Tensor, predicted: Tensor) -> TokenErrors:
        """Return a copy with the errors of one more value, each [tokens]."""
        sums = {one: (seen * _FORGET_TOKEN, due * _FORGET_TOKEN) for one, (seen, due) in self.sums.items()}
        for one, error, due in zip(tokens, observed.tolist(), predicted.tolist(), strict=True):
            before = sums.get(one, (0.0, 0.0))
            sums[one] = before[0] + error, before[1] + due
        return TokenErrors({one: pair for one, pair in sums.items() if pair[1] >= _FORGOTTEN})

    def factors(self, tokens: Sequence[int]) -> Tensor:
        """Return float32 [tokens]: the factors on predicted errors."""
        return self.factors_from(tokens, 1.0)[0]

    def factors_from(self, tokens: Sequence[int], *unseen: float) -> Tensor:
        """Return float32 [len(unseen), tokens]: the factors on predicted errors, for each factor of a token id that was
        never seen, from which every observation leads away.
        """
        sums, nothing = self.sums, (0.0, 0.0)
        seen, due = torch.tensor([sums.get(one, nothing) for one in tokens], dtype=torch.float64).view(-1, 2).T
        return ((seen + torch.tensor(unseen)[:, None] * _PRIOR) / (due + _PRIOR)).float()


class Calibration:
    """The expected errors of a site's estimates.

    Relative errors are averaged in log-spaced bins of distance (with exponential forgetting) and made monotone; an
    empty bin takes the error of the next larger distance. Immutable: `updated` returns a new one.
    """

    __slots__ = ("_curve", "_edges", "_sum", "_weight", "observations", "prefix_sums", "token_errors")

    def __init__(self) -> None:
        self._edges = torch.logspace(-2, 0, _BINS - 1)
        self._weight = torch.zeros(_BINS)
        self._sum = torch.zeros(_BINS)
        self._curve = torch.full((_BINS,), _UNKNOWN)
        self.token_errors = TokenErrors()
        self.prefix_sums = torch.zeros(())
        """float32 [tokens of the prefix segment], or [] before the first observation, on the CPU: sums of errors"""
        self.observations = 0

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], observations: int) -> Calibration:
        """Rebuild a calibration from its `tensors`. Raises `KeyError` if one is missing."""
        sums, prefix_sums, ids, of_ids = (tensors[part] for part in PARTS)
        result = cls()
        result._weight, result._sum = sums.clone()
        result._curve = _monotone(result._weight, result._sum)
        result.token_errors = TokenErrors({i: (a, b) for i, (a, b) in zip(ids.tolist(), of_ids.tolist(), strict=True)})
        result.prefix_sums, result.observations = prefix_sums, observations
        return result

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is known but the number of observations, by the names in `PARTS`, on the CPU."""
        by_id = self.token_errors.sums
        ids, of_ids = (
            torch.tensor(list(by_id), dtype=torch.int64),
            torch.tensor(list(by_id.values()), dtype=torch.float64),
        )
        bins = torch.stack([self._weight, self._sum])
        return dict(zip(PARTS, (bins, self.prefix_sums, ids, of_ids.view(-1, 2)), strict=True))

    def updated(self, distance: Tensor, tokens: Tokens, error: Tensor, prefix_error: Tensor) -> Calibration:
        """Return a copy with one more observation: distance, id and relative error of the value's tokens, and the
        relative errors of the prefix segment after it. All float32 [tokens].

        Raises `TranslationRefused` if an error is not finite.
        """
        if not (torch.isfinite(error).all() and torch.isfinite(prefix_error).all()):
            raise TranslationRefused("error", float(error.max()), "an observed offset is not finite")
        bins, seen = torch.bucketize(distance.cpu(), self._edges), error.cpu()
        result = Calibration()
        result._weight = (self._weight * _FORGET).index_add_(0, bins, torch.ones(len(bins)))
        result._sum = (self._sum * _FORGET).index_add_(0, bins, seen)
        result._curve = _monotone(result._weight, result._sum)
        result.token_errors = self.token_errors.updated(tokens, seen, result._curve[bins])
        result.prefix_sums = self.prefix_sums * _FORGET + prefix_error.cpu()
        result.observations = self.observations + 1
        return result

    def predict(self, distance: Tensor, tokens: Tokens) -> Tensor:
        """Return float32 [tokens], on the CPU: predicted relative error of a value's tokens."""
        return self._at(distance) * self.token_errors.factors(tokens)

    def predict_worst(self, distance: Tensor, tokens: Tokens) -> Tensor:
        """Return float32 [tokens], on the CPU: the relative error to reckon with, token by token. Of an id that was
        seen little it is up to `_DOUBT` times the predicted one, as it may sum up more than others at its distance.
        """
        predicted, doubted = self._at(distance) * self.token_errors.factors_from(tokens, 1.0, _DOUBT)
        return torch.maximum(predicted, doubted.clamp_max(_UNKNOWN))

    def _at(self, distance: Tensor) -> Tensor:
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
