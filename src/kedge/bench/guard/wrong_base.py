"""The model's rotation at another RoPE base."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kedge.errors import ConfigError
from kedge.kv.rotary import Rotation

TIMES_BASE = 50.0
"""The wrong base over the model's: that of long-context models over the usual 10000"""


class WrongBase(nn.Module):
    """A rotary module with the model's frequencies as they are at another base."""

    def __init__(self, rotary: Rotation) -> None:
        super().__init__()
        if rotary.tables is None:
            raise ConfigError("model", "rotation", "the fault needs one rotation of all layers, half with half")
        cos, sin = rotary.tables
        frequencies = torch.atan2(sin[1], cos[1])
        places = torch.arange(len(frequencies), device=frequencies.device) / len(frequencies)
        self._frequencies = frequencies / TIMES_BASE**places

    def forward(self, _: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [1, positions, rotary_dim]."""
        angles = position_ids[..., None] * self._frequencies
        both = torch.cat([angles, angles], dim=-1)
        return both.cos(), both.sin()
