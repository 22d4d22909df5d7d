"""Ridge regression from base KV to offset, which keeps no samples, only sums over all observed tokens."""

from __future__ import annotations

import torch
from torch import Tensor


class Ridge:
    """A regression for every layer, K and V, and head separately: offset = base · W + c (KVCOMM.md, section 3,
    `linear`).

    Minimises Σ ‖offset - base · W - c‖² + λ ‖W‖², where λ is `strength` times the mean of the diagonal of Σ baseᵀ base;
    c is not regularised. Memory is constant.
    """

    def __init__(self, shape: tuple[int, int, int, int], strength: float, device: torch.device) -> None:
        """Start without data. `shape` is (layers without the first, 2 for K before V, heads, head_dim)."""
        *groups, dim = shape
        self._shape, self._strength = shape, strength
        self._gram = torch.zeros(*groups, dim + 1, dim + 1, device=device)
        self._moment = torch.zeros(*groups, dim + 1, dim, device=device)
        self._weights = torch.zeros_like(self._moment)
        """[layers, 2, heads, dim + 1, dim]; the last row is c"""

    @property
    def nbytes(self) -> int:
        """Bytes of the sums and the weights."""
        return self._gram.nbytes + self._moment.nbytes + self._weights.nbytes

    def add(self, base: Tensor, offset: Tensor) -> None:
        """Add rows [tokens, width] of base KV and of their offsets (finite, float32)."""
        features, targets = _with_one(self._groups(base)), self._groups(offset)
        self._gram += features.mT @ features
        self._moment += features.mT @ targets
        self._weights = self._solved()

    def _solved(self) -> Tensor:
        gram = self._gram.double()
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        held = torch.zeros_like(diagonal)
        held[..., :-1] = self._strength * diagonal[..., :-1].mean(-1, keepdim=True)
        # where base KV is zero throughout, nothing but c is left to find
        held[..., :-1] += torch.finfo(torch.float32).tiny
        return torch.linalg.solve(gram + torch.diag_embed(held), self._moment.double()).float()

    def predict(self, base: Tensor) -> Tensor:
        """Return float32 rows [tokens, width]: the predicted offsets of rows of base KV; zeros before any data."""
        return self._rows(_with_one(self._groups(base)) @ self._weights)

    def predict_change(self, difference: Tensor) -> Tensor:
        """Return float32 rows: how the offset changes where base KV changes by these rows."""
        return self._rows(self._groups(difference) @ self._weights[..., :-1, :])

    def _groups(self, rows: Tensor) -> Tensor:
        """Return rows as float32 [layers, 2, heads, tokens, dim]."""
        return rows.float().view(len(rows), *self._shape).permute(1, 2, 3, 0, 4)

    def _rows(self, groups: Tensor) -> Tensor:
        return groups.permute(3, 0, 1, 2, 4).flatten(1)


def _with_one(features: Tensor) -> Tensor:
    return torch.cat([features, features.new_ones(*features.shape[:-1], 1)], dim=-1)
