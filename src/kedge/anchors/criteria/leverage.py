"""More criteria: `length`, which is Eq. 5 without its entropy, and `leverage`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.anchors.anchor import AnchorId
from kedge.anchors.calibration import Calibration
from kedge.anchors.criteria.shareability import Verdict, lacks_length
from kedge.anchors.estimators.blending import Match
from kedge.anchors.keys import KeyBlock
from kedge.structures.bounded import BoundedDict

_RIDGE = 1e-3
"""Ridge, in units of the mean square of a dimension of the key vectors."""
_SPREADS = 64


@dataclass(frozen=True, slots=True)
class Length:
    """A criterion by which a value is shareable if two anchors are at least as long (KVCOMM, Table A.3, first row)."""

    calibrates: bool = False

    def lacks(self, tokens: int, block: KeyBlock, calibration: Calibration) -> str:  # noqa: ARG002
        return lacks_length(tokens, block)

    def judge(self, match: Match, calibration: Calibration) -> Verdict:  # noqa: ARG002
        return Verdict("", torch.zeros(len(match.query.tokens), dtype=torch.bool))


class Spread(NamedTuple):
    """The distribution of the key vectors x of a block's tokens: the leverage of any x is ‖factor · [x, 1]‖²."""

    factor: Tensor
    """float32 [match_dim + 1, match_dim + 1]: the inverse of the Cholesky factor of XᵀX + λI"""
    mean: float
    """Mean leverage of the block's own tokens: their degrees of freedom over their number"""

    @classmethod
    def of(cls, keys: Tensor) -> Spread:
        """Return the spread of key vectors [columns, match_dim]."""
        rows = _with_one(keys)
        gram = rows.mT @ rows
        gram += _RIDGE * float(gram.diagonal().mean()) * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        lower = torch.linalg.cholesky(gram)
        factor = torch.linalg.solve_triangular(lower, torch.eye(len(gram), dtype=gram.dtype).to(lower), upper=False)
        return cls(factor.float(), float((rows @ factor.mT).square().sum(1).mean()))

    def leverage(self, keys: Tensor) -> Tensor:
        """Return float32 [tokens]: xᵀ (XᵀX + λI)⁻¹ x, in units of `mean`."""
        return (_with_one(keys).float() @ self.factor.mT).square().sum(1) / self.mean


def _with_one(keys: Tensor) -> Tensor:
    return torch.cat([keys, torch.ones_like(keys[:, :1])], dim=1).double()


@dataclass(frozen=True, slots=True)
class Leverage:
    """A criterion by which a value is shareable if its tokens lie where those of the anchors lie, so that a regression
    on these has seen similar ones.

    It uses the leverage xᵀ (XᵀX + λI)⁻¹ x of the key vectors, over the anchors' own mean: 1 is a token like any other,
    more is extrapolation. It needs no observed errors, so it works before anything has been calibrated.
    """

    min_anchors: int
    max_leverage: float
    weak_leverage: float
    calibrates: bool = False
    _spreads: BoundedDict[tuple[AnchorId, ...], Spread] = field(
        default_factory=lambda: BoundedDict(_SPREADS), repr=False, compare=False
    )

    def lacks(self, tokens: int, block: KeyBlock, calibration: Calibration) -> str:  # noqa: ARG002
        return f"{len(block.ids)} anchors of {self.min_anchors}" if len(block.ids) < self.min_anchors else ""

    def judge(self, match: Match, calibration: Calibration) -> Verdict:  # noqa: ARG002
        spread = self._spreads.use(match.block.ids, lambda: Spread.of(match.block.keys))
        leverage = spread.leverage(match.query.keys).cpu()
        mean = float(leverage.mean())
        reason = f"leverage is {mean:.2f}, above {self.max_leverage:g}" if not mean <= self.max_leverage else ""
        return Verdict(reason, leverage > self.weak_leverage)
