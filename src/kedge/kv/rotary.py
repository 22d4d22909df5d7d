"""Rotation of keys to a position and back, with cos and sin from the model's own rotary module."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary:
    """The rotation of keys [layers, tokens, kv_heads, head_dim], of which the first `rotary_dim` dimensions pair up
    half with half.

    The tables hold the outputs of the model's module (llama3 and YaRN scaling included), for every position up to
    `max_positions`. YaRN scales cos and sin by a factor s, so that rotating back must divide by s².
    """

    def __init__(self, module: nn.Module, max_positions: int, device: torch.device) -> None:
        probe = torch.zeros(1, dtype=torch.float32, device=device)
        with torch.no_grad():
            cos, sin = module(probe, position_ids=torch.arange(max_positions, device=device)[None])
        half = cos.shape[-1] // 2
        self._cos, self._sin = cos[0, :, None, :half], sin[0, :, None, :half]  # [positions, 1, rotary_dim / 2]
        self._scale = float(self._cos[0, 0, 0] ** 2 + self._sin[0, 0, 0] ** 2)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each float32 [positions, rotary_dim / 2]."""
        return self._cos[:, 0], self._sin[:, 0]

    def rotate(self, keys: Tensor, positions: Tensor | slice, out: Tensor) -> None:
        """Write `keys` [L, T, H, D], rotated to `positions` [T], into `out`, which must not overlap them."""
        self._turn(keys, self._cos[positions], self._sin[positions], out)

    def unrotate(self, keys: Tensor, positions: Tensor | slice) -> Tensor:
        """Return a copy of `keys` [L, T, H, D] as they were before they were rotated to `positions` [T]."""
        out = torch.empty_like(keys)
        self._turn(keys, self._cos[positions] / self._scale, -self._sin[positions] / self._scale, out)
        return out

    @staticmethod
    def _turn(keys: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        half = cos.shape[-1]
        # Spelled out for every head: rows that are as long as those of the keys take two thirds of the time.
        cos, sin = (x.to(keys.dtype).expand(-1, keys.shape[2], -1).contiguous() for x in (cos, sin))
        first, second = keys[..., :half], keys[..., half : 2 * half]
        torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
        if keys.shape[-1] > 2 * half:
            out[..., 2 * half :] = keys[..., 2 * half :]
