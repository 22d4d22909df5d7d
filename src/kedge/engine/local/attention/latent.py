"""Multi-head latent attention (MLA) over the latents themselves, instead of keys and values of all heads.

A module computes a small latent of a token, and from it, with one projection, the unrotated part of every head's key
and every head's value; the rotated part of the key is the same for all heads. So it is enough to keep the latent and
that part, together a *row*. A score is then q · (W latent) = (Wᵀ q) · latent, and a head's attention is its part of the
projection of a weighted sum of latents: all heads attend to one row of a token, as in multi-query attention. That reads
little memory, but takes more arithmetic for each pair of tokens: for many queries the keys and values of their context
are computed from its rows, for the length of one call.

The module runs unchanged. What it projects is noted on the way, before it calls its attention function.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from kedge.engine.local.attention.arguments import unsupported
from kedge.kv.spec import keeps_latent

MARK = "_kedge_latent"
"""Attribute of an attention module whose projection is watched"""
PROJECTION = "kv_b_proj"
"""The name of the projection in Transformers' modules"""


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """What a module projects latents with, by head."""

    weight: Tensor
    """[heads, unrotated dimensions of a key + value_dim, rank]"""
    value_dim: int

    @property
    def of_keys(self) -> Tensor:
        """The weights of keys [heads, unrotated dimensions, rank]: a view."""
        return self.weight[:, : -self.value_dim]

    @property
    def of_values(self) -> Tensor:
        """The weights of values [heads, value_dim, rank]: a view."""
        return self.weight[:, -self.value_dim :]

    def absorbed(self, query: Tensor) -> Tensor:
        """Return queries to rows [heads, tokens, rank + rotated] for queries to keys [heads, tokens, key_dim]."""
        unrotated = self.of_keys.shape[1]
        return torch.cat([query[..., :unrotated] @ self.of_keys, query[..., unrotated:]], dim=-1)

    def projected(self, out: Tensor) -> Tensor:
        """Return attention to values [tokens, heads, value_dim] for that to rows [tokens, heads, rank + rotated]."""
        sums = out[..., : self.weight.shape[2]].transpose(0, 1)
        return (sums @ self.of_values.transpose(1, 2)).transpose(0, 1)

    def expanded(self, rows: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Return the keys and values of some heads, each [tokens, heads, key_dim], that follow from rows [tokens,
        rank + rotated]. Values are as wide as keys, the rest being zero.
        """
        weight, rank = self.weight[heads], self.weight.shape[2]
        both = linear(rows[:, :rank], weight.flatten(0, 1)).unflatten(1, weight.shape[:2])
        unrotated, values = both.split([weight.shape[1] - self.value_dim, self.value_dim], dim=-1)
        keys = torch.cat([unrotated, rows[:, None, rank:].expand(-1, len(weight), -1)], dim=-1)
        return keys, pad(values, (0, keys.shape[2] - self.value_dim))

    def is_worth_expanding(self, queries: int, context: int, width: int) -> bool:
        """Return whether so many queries, the last of a context of rows as wide as `width`, take less arithmetic with
        the keys and values of the whole context than with its rows.
        """
        numbers, rank = self.weight.shape[1:]
        more = (width + rank) - (numbers + width - rank)  # of a query and a token that it sees
        return more * queries * (context - queries / 2) > rank * numbers * context


class LatentProjection:
    """The projection of an attention module from latents to keys and values, and the latents that it projected last."""

    def __init__(self, projection: nn.Linear) -> None:
        self.rank = projection.in_features
        self._projection = projection
        self._noted: Tensor | None = None
        self.hook = projection.register_forward_pre_hook(self._note)

    def _note(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self._noted = args[0]

    def rows(self, key: Tensor, value: Tensor) -> Tensor | None:
        """Return the rows [tokens, 1, rank + rotated] of what was projected last, once. Returns None where keys and
        values [1, heads, tokens, dim] cannot have been computed from it, by their shapes.
        """
        noted, self._noted = self._noted, None
        (_, heads, tokens, key_dim), outputs = key.shape, self._projection.out_features
        unrotated = outputs // heads - value.shape[3]
        if noted is None or noted.shape[-1] != self.rank or noted.numel() != tokens * self.rank:
            return None
        if outputs % heads or not 0 < unrotated <= key_dim:
            return None
        return torch.cat([noted.reshape(tokens, 1, self.rank), key[0, :1, :, unrotated:].transpose(0, 1)], dim=-1)

    def explains(self, rows: Tensor, key: Tensor, value: Tensor, tolerance: float) -> bool:
        """Return whether keys and values [1, heads, tokens, dim] follow from their `rows`, with a relative error of at
        most `tolerance`, and are so much larger that rows are worth keeping.
        """
        latents, shared = rows[:, 0].split([self.rank, rows.shape[2] - self.rank], dim=-1)
        heads, key_dim = key.shape[1], key.shape[3]
        if not keeps_latent(heads * (key_dim + value.shape[3]), self.rank, shared.shape[1]):
            return False
        unrotated, rotated = key[0].split([key_dim - shared.shape[1], shared.shape[1]], dim=-1)
        projected = linear(latents, self._projection.weight).unflatten(1, (heads, -1)).transpose(0, 1)
        found = torch.cat([unrotated, value[0]], dim=-1)
        is_close = (projected - found).norm() <= tolerance * found.norm()
        return bool(is_close) and torch.equal(rotated, shared.expand_as(rotated))

    def weights(self, value: Tensor) -> LatentWeights:
        """Return the weights for values [1, heads, tokens, dim]."""
        return LatentWeights(self._projection.weight.view(value.shape[1], -1, self.rank), value.shape[3])


def watch(model: nn.Module) -> None:
    """Note the latents of all attention modules that have a projection, from now on. Idempotent."""
    for module in model.modules():
        projection = getattr(module, PROJECTION, None)
        if type(projection) is nn.Linear and projection.bias is None and not hasattr(module, MARK):
            setattr(module, MARK, LatentProjection(projection))


def unwatch(model: nn.Module) -> None:
    """Note no latents any more."""
    for module in model.modules():
        if (latent := latent_of(module)) is not None:
            latent.hook.remove()
            delattr(module, MARK)


def latent_of(module: nn.Module) -> LatentProjection | None:
    """Return the projection of a watched attention module; None for any other."""
    return getattr(module, MARK, None)


def rows_of(module: nn.Module, key: Tensor, value: Tensor) -> tuple[LatentWeights, Tensor]:
    """Return a module's weights and the rows of a pass's tokens. Raises `UnsupportedModel` where there are none."""
    latent = latent_of(module)
    rows = None if latent is None else latent.rows(key, value)
    if latent is None or rows is None:
        raise unsupported(module, "its keys and values follow from no latent, other than when it was loaded")
    return latent.weights(value), rows
