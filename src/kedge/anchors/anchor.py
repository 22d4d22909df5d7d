"""Anchors: past values of a placeholder. How an equal value is recognised, and which tokens of theirs are nearest.

Key vectors, a part of the tokens' base KV, are what is compared.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

import torch
from torch import Tensor

from kedge.errors import PlanError
from kedge.kv.segment import KVSegment
from kedge.types import Namespace, Tokens, WorkflowId

AnchorId = NewType("AnchorId", int)
"""Unique in a store and growing: a smaller id was added earlier."""


class PoolKey(NamedTuple):
    """The name of an anchor pool: the placeholder it is for, in one tenant's workflow."""

    namespace: Namespace
    workflow: WorkflowId
    placeholder: str


@dataclass(frozen=True, slots=True)
class PlaceholderSite:
    """One occurrence of a placeholder in an agent's template."""

    agent_key: str
    """The agent and its template's wording"""
    index: int


@dataclass(frozen=True, slots=True)
class SampleView:
    """A placeholder's value with its base KV. Raises `PlanError` where base KV and tokens differ in number."""

    pool: PoolKey
    tokens: Tokens
    base: KVSegment
    key: Hashable
    """Names this base KV: equal keys in a pool mean equal base KV"""
    weight: float = 1.0
    """How much an error of its KV counts, compared with one of an agent's new answer: inputs, which stand far from
    what is generated, are attended to less, and what was read before moves with less error to begin with, so that what
    is left of it lies in the tokens that count"""

    def __post_init__(self) -> None:
        if self.base.tokens != len(self.tokens):
            raise PlanError("tokens", len(self.tokens), f"base KV has {self.base.tokens}")


@dataclass(frozen=True, slots=True)
class Query:
    """A value to be matched: its token ids and one key vector per token."""

    tokens: Tokens
    keys: Tensor
    """float32 [tokens, match_dim]"""
    tolerance: float
    """Relative difference of key vectors up to which they count as equal, since it is rounding."""


@dataclass(slots=True)
class Anchor:
    """A past value. Its base KV is not kept; its offsets lie in the tables of the sites that observed it."""

    id: AnchorId
    tokens: Tokens
    keys: Tensor
    """float32 [tokens, match_dim]"""
    hits: int = 0
    """Requests whose translation used this anchor."""

    @property
    def length(self) -> int:
        """Tokens of the value."""
        return len(self.tokens)

    def is_value(self, query: Query) -> bool:
        """Return whether a value has the same token ids and, token by token, the same base keys up to rounding."""
        if self.tokens != query.tokens:
            return False
        difference = torch.linalg.vector_norm(self.keys - query.keys, dim=1)
        allowed = query.tolerance * torch.linalg.vector_norm(query.keys, dim=1)
        return bool((difference <= allowed).all())


MATCH_DIM = 32
"""Dimensions that base KV is projected to before it is compared, a bound on what that costs"""
_SEED = 20_250_102
_CHUNK = 128
"""Queries compared at once on a CPU, so that their distances to 10,000 anchor tokens fit a cache and one buffer."""
_GPU_DISTANCES = 1 << 26
"""Distances computed at once on a GPU, where every launch costs more than the memory of 256 MiB"""
_FAR = 1e30
"""Squared distance of padding; finite, since 0 · inf is not a number."""


class KeyReader:
    """A reader of key vectors [tokens, dim] from the base KV of one layer, K and V side by side over all heads.

    A wider layer is projected to `dim` by a random orthonormal matrix with a fixed seed, so that key vectors can
    be compared across processes. Layer 0 has seen no context; the one at two thirds of the depth is read, where base
    KV says most of what its context has changed.
    """

    def __init__(self, dim: int = MATCH_DIM) -> None:
        self._dim = dim
        self._projection: Tensor | None = None

    def read(self, tokens: Tokens, base: KVSegment) -> Query:
        """Return the query for a value."""
        layer = min(max(1, 2 * base.layers // 3), base.layers - 1)
        wide = torch.cat([base.keys[layer].flatten(1), base.values[layer].flatten(1)], dim=1).float()
        return Query(tokens, self._project(wide), max(1e-3, 4 * torch.finfo(base.dtype).eps))

    def _project(self, wide: Tensor) -> Tensor:
        if wide.shape[1] <= self._dim:
            return wide
        if self._projection is None or self._projection.shape[0] != wide.shape[1]:
            # Orthonormal columns, the same on every machine's CPU generator.
            generator = torch.Generator().manual_seed(_SEED)
            noise = torch.randn(wide.shape[1], self._dim, dtype=torch.float64, generator=generator)
            self._projection = torch.linalg.qr(noise).Q.float().to(wide.device)
        return wide @ self._projection


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The nearest anchor tokens of every query token, nearest first."""

    columns: Tensor
    """int64 [tokens, k]"""
    squared: Tensor
    """float32 [tokens, k], squared distances"""
    mean_squared: Tensor
    """float32 []: mean squared distance of all query tokens to all anchor tokens"""


class KeyBlock:
    """The key vectors of some anchors, concatenated; a column is the index of one anchor token among them."""

    def __init__(self, anchors: Sequence[Anchor]) -> None:
        self.ids: tuple[AnchorId, ...] = tuple(a.id for a in anchors)
        device = anchors[0].keys.device
        self.lengths = torch.tensor([a.length for a in anchors]).to(device, non_blocking=True)
        self.starts = self.lengths.cumsum(0) - self.lengths
        keys = torch.cat([a.keys for a in anchors])
        each = torch.arange(len(anchors), device=device)
        self.owner = each.repeat_interleave(self.lengths, output_size=len(keys))
        """int64 [columns]: index of the anchor of each column"""
        # Keys with their squared norms as one more dimension, padded to whole groups, so that one GEMM gives distances.
        columns, dim = keys.shape
        self._groups = 512 if columns > 4096 else 64
        padded = -(-columns // self._groups) * self._groups
        self._matrix = keys.new_zeros(padded, dim + 1)
        self._matrix[:columns, :dim] = keys
        self._matrix[:columns, dim] = keys.square().sum(1)
        self._matrix[columns:, dim] = _FAR
        self._mean, self._mean_norm = keys.mean(0), self._matrix[:columns, dim].mean()

    @property
    def keys(self) -> Tensor:
        """float32 [columns, match_dim]"""
        return self._matrix[: self.columns, :-1]

    @property
    def columns(self) -> int:
        """Number of tokens of all anchors in the block."""
        return len(self.owner)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix and the owners of its columns."""
        return self._matrix.nbytes + self.owner.nbytes

    def long_enough(self, tokens: int) -> Tensor:
        """Return int64: indices of the anchors that have at least `tokens` tokens."""
        return (self.lengths >= tokens).nonzero().flatten()

    def aligned(self, query: Query, anchors: Tensor) -> Tensor:
        """Return float32 [anchors, tokens]: squared distances of the query's tokens to those at the same position."""
        places = self.starts[anchors, None] + torch.arange(len(query.tokens), device=self.starts.device)
        return (self._matrix[places, :-1] - query.keys).square_().sum(-1)

    def ends(self, query: Query, last: int) -> Tensor:
        """Return float32 [anchors]: mean squared distance of the `last` tokens (or of as many as both have), end to
        end.
        """
        back = torch.arange(min(last, len(query.tokens)), device=self.starts.device)
        there = back < self.lengths[:, None]
        places = (self.starts + self.lengths - 1)[:, None] - torch.where(there, back, 0)
        squared = (self._matrix[places, :-1] - query.keys.flip(0)[: len(back)]).square_().sum(-1)
        return (squared * there).sum(1) / there.sum(1)

    def nearest(self, query: Query, k: int) -> Neighbours:
        """Return the `k` nearest columns (all, if there are fewer) of every query token."""
        keys, norms = query.keys, query.keys.square().sum(1, keepdim=True)
        augmented = torch.cat([-2 * keys, torch.ones_like(norms)], dim=1)
        chunk = max(_CHUNK, _GPU_DISTANCES // len(self._matrix)) if keys.is_cuda else _CHUNK
        buffer = keys.new_empty(min(chunk, len(keys)), len(self._matrix))
        parts = [self._search(part, min(k, self.columns), buffer) for part in augmented.split(chunk)]
        squared = (torch.cat([p[0] for p in parts]) + norms).clamp_min_(0)
        mean = norms.mean() + self._mean_norm - 2 * (keys.mean(0) @ self._mean)
        return Neighbours(torch.cat([p[1] for p in parts]), squared, mean.clamp_min(0))

    def _search(self, augmented: Tensor, k: int, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Return the exact top k in two passes: the k nearest lie in the k groups (columns modulo `_groups`) of least
        minimum.

        Three times as fast as `topk` over all columns, since the minimum over groups is vectorised.
        """
        distances = torch.mm(augmented, self._matrix.T, out=buffer[: len(augmented)])
        least = distances.view(len(augmented), -1, self._groups).amin(1)
        groups = least.topk(min(k, self._groups), dim=1, largest=False, sorted=False).indices
        strides = torch.arange(0, len(self._matrix), self._groups, device=groups.device)
        candidates = (groups[:, :, None] + strides).flatten(1)
        best = distances.gather(1, candidates).topk(k, dim=1, largest=False)
        return best.values, candidates.gather(1, best.indices)
