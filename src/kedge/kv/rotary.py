"""Rotation of keys to a position and back, with cos and sin from the model's own rotary module."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pairing:
    """The dimensions of a key that are rotated: those from `start` on, in pairs."""

    start: int = 0
    neighbours: bool = False
    """Whether dimension 0 pairs with 1, 2 with 3, and so on; otherwise the first half pairs with the second half."""
    backwards: bool = False
    """Whether keys are rotated by the negative angle."""

    def split(self, keys: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        """Return views of the first and the second dimensions of all pairs, each [..., pairs]."""
        rotated = keys[..., self.start : self.start + 2 * pairs]
        if self.neighbours:
            return rotated[..., ::2], rotated[..., 1::2]
        return rotated[..., :pairs], rotated[..., pairs:]

    def spread(self, table: Tensor) -> Tensor:
        """Return the entry of each pair [..., pairs] at both of its dimensions [..., 2 * pairs]."""
        return table.repeat_interleave(2, dim=-1) if self.neighbours else torch.cat([table, table], dim=-1)


HALVES = Pairing()


class Rotary:
    """The rotation of keys [layers, tokens, kv_heads, head_dim], the same in all layers.

    The tables hold the outputs of the model's module (llama3 and YaRN scaling included), for every position up to
    `max_positions`. YaRN scales cos and sin by a factor s, so that rotating back must divide by s².
    """

    def __init__(self, module: Callable[..., Any], max_positions: int, device: torch.device) -> None:
        """Fill the tables from `module`, which returns cos and sin as Transformers' rotary modules do."""
        probe = torch.zeros(1, dtype=torch.float32, device=device)
        with torch.no_grad():
            cos, sin = module(probe, position_ids=torch.arange(max_positions, device=device)[None])
        half = cos.shape[-1] // 2
        self._cos, self._sin = (table[0, :, None, :half].contiguous() for table in (cos, sin))  # [positions, 1, pairs]
        self.square = float(self._cos[0, 0, 0] ** 2 + self._sin[0, 0, 0] ** 2)
        """The square of the factor by which YaRN scales keys, 1 without it"""
        self.pairing = HALVES

    def paired(self, pairing: Pairing) -> Self:
        """Return the rotation by the same angles of other dimensions."""
        other = copy(self)
        other.pairing = pairing
        if pairing.backwards:
            other._sin = -self._sin
        return other

    @property
    def pairs(self) -> int:
        """Number of pairs of dimensions that are rotated."""
        return self._cos.shape[-1]

    @property
    def tables(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines, each float32 [positions, pairs]; None unless the first dimensions pair half with half."""
        return None if self.pairing.start or self.pairing.neighbours else (self._cos[:, 0], self._sin[:, 0])

    def rotate(self, keys: Tensor, positions: Tensor | slice, out: Tensor) -> None:
        """Write `keys` [L, T, H, D], rotated to `positions` [T], into `out`, which must not overlap them."""
        self._apply(keys, self._cos[positions], self._sin[positions], out)

    def unrotate(self, keys: Tensor, positions: Tensor | slice) -> Tensor:
        """Return a copy of `keys` [L, T, H, D] as they were before they were rotated to `positions` [T]."""
        out = torch.empty_like(keys)
        self._apply(keys, self._cos[positions] / self.square, -self._sin[positions] / self.square, out)
        return out

    def _apply(self, keys: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        pairs, start = cos.shape[-1], self.pairing.start
        stop = start + 2 * pairs
        # Repeated for every head: with rows as long as the keys' it takes two thirds of the time.
        cos, sin = (x.to(keys.dtype).expand(-1, keys.shape[2], -1) for x in (self.pairing.spread(cos), sin))
        torch.mul(keys[..., start:stop], cos.contiguous(), out=out[..., start:stop])
        (first, second), (out_first, out_second) = (self.pairing.split(x, pairs) for x in (keys, out))
        out_first.addcmul_(second, sin := sin.contiguous(), value=-1)
        out_second.addcmul_(first, sin)
        if start:
            out[..., :start] = keys[..., :start]
        if keys.shape[-1] > stop:
            out[..., stop:] = keys[..., stop:]


class RotaryByLayer:
    """The rotation of keys [layers, tokens, kv_heads, head_dim] where layers differ; None leaves a layer's keys."""

    tables = None
    """There is not one table for all layers."""

    def __init__(self, layers: Sequence[Rotary | None]) -> None:
        """Take one rotation per layer; neighbours with the same object are rotated together."""
        self._runs: list[tuple[slice, Rotary | None]] = []
        for _, run in groupby(enumerate(layers), lambda item: id(item[1])):
            numbers = list(run)
            self._runs.append((slice(numbers[0][0], numbers[-1][0] + 1), numbers[0][1]))

    def rotate(self, keys: Tensor, positions: Tensor | slice, out: Tensor) -> None:
        """Write rotated keys into `out`, as `Rotary.rotate` does."""
        for layers, rotary in self._runs:
            if rotary is None:
                out[layers] = keys[layers]
            else:
                rotary.rotate(keys[layers], positions, out=out[layers])

    def unrotate(self, keys: Tensor, positions: Tensor | slice) -> Tensor:
        """Return a copy of `keys` as they were before, as `Rotary.unrotate` does."""
        return torch.cat(
            [
                keys[layers] if rotary is None else rotary.unrotate(keys[layers], positions)
                for layers, rotary in self._runs
            ]
        )


Rotation = Rotary | RotaryByLayer


def by_layer(layers: Sequence[Rotary | None]) -> Rotation:
    """Return the rotation of all layers: one for all of them where they have the same."""
    first = layers[0]
    if first is not None and all(rotary is first for rotary in layers):
        return first
    return RotaryByLayer(layers)
