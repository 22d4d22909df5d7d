"""KV of consecutive tokens, independent of position: keys are unrotated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.errors import PlanError


@dataclass(frozen=True, slots=True)
class KVSegment:
    """The keys (unrotated) and values of neighbouring tokens, each [layers, tokens, kv_heads, head_dim], of one dtype.

    Raises `PlanError` where the two differ in shape or dtype.
    """

    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        if self.keys.shape != self.values.shape or self.keys.dtype != self.values.dtype or self.keys.ndim != 4:
            raise PlanError("kv", (tuple(self.keys.shape), tuple(self.values.shape)), "keys and values do not match")

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.keys.shape[1]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.keys.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        """Device of keys and values."""
        return self.keys.device

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def slice(self, start: int, stop: int | None = None) -> KVSegment:
        """Return tokens [start, stop) as a view; `stop=None` is the end."""
        return KVSegment(self.keys[:, start:stop], self.values[:, start:stop])

    def owned(self) -> KVSegment:
        """Return the same KV in its own memory: a view is copied, so that it does not keep a larger tensor alive."""
        return KVSegment(_owned(self.keys), _owned(self.values))

    @classmethod
    def empty(cls, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> KVSegment:
        """Return KV of no tokens, of the model's `shape` (layers, kv_heads, head_dim)."""
        layers, *rest = shape
        nothing = torch.empty(layers, 0, *rest, dtype=dtype, device=device)
        return cls(nothing, nothing)


def _owned(tensor: Tensor) -> Tensor:
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
