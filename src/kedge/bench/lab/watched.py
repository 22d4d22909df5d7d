"""What one layer of a pass sees: the KV that it would write, and its queries."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kedge.engine.local.attention.latent import LatentWeights
from kedge.engine.local.attention.paged import Batch, Scoring
from kedge.kv.storage import PagedStorage


class ReadOnlyStorage(PagedStorage):
    """A view of a storage that keeps what a pass would write, and writes nothing."""

    def __init__(self, storage: PagedStorage) -> None:
        self.keys, self.values, self.pools = storage.keys, storage.values, storage.pools
        self.spec, self.block_size, self.rotary = storage.spec, storage.block_size, storage.rotary
        self.places, self.parts = storage.places, storage.parts
        self.fresh: tuple[int, Tensor, Tensor]
        """Layer, keys and values [rows, kv_heads, head_dim] of the last pass."""

    def store(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:  # noqa: ARG002
        self.fresh = layer, keys, values


class WatchedBatch(Batch):
    """A batch of one sequence over a `ReadOnlyStorage`, with what its last layer saw."""

    query: Tensor
    """[heads, rows, head_dim], rotated: queries to what attention reads of a token"""
    scaling: float

    @classmethod
    def of(cls, batch: Batch) -> WatchedBatch:
        """Return a batch like this one, watched."""
        return cls(**{field.name: getattr(batch, field.name) for field in fields(batch)})

    def attend(self, layer: int, query: Tensor, how: Scoring, latent: LatentWeights | None = None) -> Tensor:
        self.query, self.scaling = query if latent is None else latent.absorbed(query), how.scaling
        return Batch.attend(self, layer, query, how, latent)

    def distances(self, rows: Tensor) -> Tensor:
        """Return the cosine distance of the stored values from the fresh ones, float32 [rows], on the CPU."""
        layer, _, values = self._fresh()
        stored = self.storage.parts[layer][1][self.slots[rows], :, : values.shape[2]]
        return 1 - cosine_similarity(stored.float().flatten(1), values[rows].float().flatten(1)).cpu()

    def attention(self, rows: Tensor) -> Tensor:
        """Return the attention that each position of the context gets from some rows, summed over these and over all
        heads: float32 [context], on the CPU. Keys are fresh where there are some.
        """
        layer, fresh, values = self._fresh()
        (sequence,) = self.sequences
        keys = torch.cat([self.storage.pools[layer][0][run] for run in sequence.runs])
        fresh = torch.cat([values, fresh], dim=-1) if self.storage.spec.latent else fresh
        keys[self.positions] = fresh.to(keys.dtype)
        query = self.query[:, rows].unflatten(0, (keys.shape[1], -1)).float()
        scores = torch.einsum("kgtd,skd->kgts", query, keys.float()) * self.scaling
        later = torch.arange(len(keys), device=keys.device) > self.positions[rows][:, None]
        return scores.masked_fill(later, float("-inf")).softmax(-1).sum((0, 1, 2)).cpu()

    def _fresh(self) -> tuple[int, Tensor, Tensor]:
        assert isinstance(self.storage, ReadOnlyStorage)
        return self.storage.fresh
