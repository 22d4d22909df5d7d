"""Offsets as 8-bit integers, at half the memory of `OffsetTable`.

Every head of a layer's keys or values has its own scale in every row: heads differ in size by far more than the
dimensions of one head, and 2 bytes per head are 1/64 of a row with head_dim 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.anchors.offsets import Blend, OffsetTable

_LARGEST = 127
_SCALE = torch.bfloat16
"""A scale rounded to bfloat16 is off by less than half a step of the largest number, over float32's whole range."""


class EightBitTable(OffsetTable):
    """A table with rows of `width` numbers (int8), followed by the bytes of a scale (bfloat16) for every `group` of
    them.
    """

    def __init__(self, width: int, group: int, dtype: torch.dtype, device: torch.device) -> None:
        """Create an empty table. `group` divides `width`; `dtype` is that of blends."""
        super().__init__(width, dtype, device)
        self.arena = torch.empty(0, width + width // group * _SCALE.itemsize, dtype=torch.int8, device=device)
        self._group = group

    @property
    def scales(self) -> Tensor:
        """bfloat16 [capacity, width / group], a view."""
        return self.arena[:, self.width :].view(_SCALE)

    def encode(self, rows: Tensor) -> Tensor:
        grouped = super().encode(rows).float().unflatten(1, (-1, self._group))
        scales = (grouped.abs().amax(2) / _LARGEST).to(_SCALE)
        numbers = grouped / scales.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]
        numbers = numbers.round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
        return torch.cat([numbers.flatten(1), scales.view(torch.int8)], dim=1)

    def decode(self, stored: Tensor) -> Tensor:
        numbers = stored[:, : self.width].unflatten(1, (-1, self._group))
        scales = stored[:, self.width :].contiguous().view(_SCALE)
        return (numbers.float() * scales.float()[..., None]).flatten(1).to(self.dtype)

    def _sums(self, blend: Blend) -> Tensor:
        numbers = self.arena[:, : self.width][blend.rows].unflatten(2, (-1, self._group)).float()
        weights = self.scales[blend.rows].float() * blend.weights[..., None]
        return torch.einsum("tkgd,tkg->tgd", numbers, weights).flatten(1).to(self.dtype)
