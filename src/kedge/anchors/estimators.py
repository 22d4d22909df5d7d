"""Estimators: how the offsets of a value are blended from those of the anchors.

An estimator looks at key vectors only, so that what it proposes for a value holds for every site (agent) that the same
anchors have offsets for. Key vectors are compared where they are; what is proposed comes to the CPU, for what every
site makes of it are dozens of operations over few numbers, each of which takes a GPU longer to start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kedge.anchors.anchor import KeyBlock, Neighbours, Query
from kedge.settings.sections import EstimatorName

TOP_K, NOISE = 8, 0.1
"""Anchor tokens that a token's offset is blended from (`docs/results/fidelity.md` has others), and the share of the
variance of an offset that key vectors do not explain: with more of it, weights are more equal, and 0.3 is as good"""
TEMPERATURE, SHARP = 10.0, 100.0
"""Sharpness of an anchor's weight: for the prefix segment behind a value, and for whole anchors (KVCOMM)"""
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Proposal:
    """A blend in terms of a key block's columns and anchors."""

    columns: Tensor
    """int64 [tokens, k]"""
    weights: Tensor
    """float32 [tokens, k]; each token's sum to 1"""
    distance: Tensor
    """float32 [tokens]: distance to the best match over the root mean square distance"""
    mass: Tensor
    """float32 [anchors]: share of each anchor in the value's offsets"""
    after: Tensor
    """float32 [anchors]: weights for the prefix segment after the value"""

    def on_cpu(self) -> Proposal:
        """Return it with all tensors on the CPU."""
        parts = self.columns, self.weights, self.distance, self.mass, self.after
        return Proposal(*(one.cpu() for one in parts))


@dataclass(frozen=True, slots=True)
class Match:
    """The result of matching a value against the anchors of a block."""

    query: Query
    block: KeyBlock
    same: int | None
    """Index of the anchor that equals this value."""
    proposal: Proposal
    weight: float = 1.0
    """How much an error of the value counts (`SampleView`)."""


class Estimator(Protocol):
    """A rule that chooses anchor tokens and weights."""

    @property
    def aligned(self) -> bool:
        """Whether only anchors at least as long as the value can serve it; then its criterion is the paper's."""

    def propose(self, query: Query, block: KeyBlock, same: int | None) -> Proposal:
        """Return the blend for a value. `same` is the index of the anchor that equals the value, which alone is used
        then.

        The block is not empty and, for an `aligned` estimator, has an anchor that is long enough.
        """


def anchor_weights(distances: Tensor, temperature: float, same: int | None = None) -> Tensor:
    """Return float32 [anchors]: softmax(-temperature · d / mean d), or all on `same`.

    KVCOMM's softmax(-d) depends on length and scale; divided by the mean, only ratios count.
    """
    if same is not None:
        return torch.arange(len(distances), device=distances.device).eq(same).float()
    return torch.softmax(-temperature * distances / distances.mean().clamp_min(_TINY), dim=0)


@dataclass(frozen=True, slots=True)
class Interpolate:
    """The estimator of KVCOMM, Eq. 6 and 7: token t takes the weighted offsets of token t of every anchor that is at
    least as long.

    The weights come from the L2 distance over all tokens; the prefix segment after the value takes the same ones.
    """

    temperature: float = SHARP
    aligned: bool = True

    def propose(self, query: Query, block: KeyBlock, same: int | None) -> Proposal:
        anchors = block.long_enough(len(query.tokens))
        squared = block.aligned(query, anchors)
        chosen = None if same is None else int((anchors == same).nonzero())
        weights = anchor_weights(squared.sum(1).sqrt(), self.temperature, chosen)
        mass = weights.new_zeros(len(block.ids)).index_copy_(0, anchors, weights)
        kept = weights.nonzero().flatten()
        places = torch.arange(len(query.tokens), device=anchors.device)
        return Proposal(
            columns=(block.starts[anchors[kept]] + places[:, None]).contiguous(),
            weights=weights[kept].expand(len(query.tokens), -1).contiguous(),
            distance=(squared.amin(0) / squared.mean().clamp_min(_TINY)).sqrt(),
            mass=mass,
            after=mass,
        )


@dataclass(frozen=True, slots=True)
class Token:
    """An estimator in which every token looks up its most similar tokens among all tokens of all anchors, at any
    position.

    They are weighted by kriging: an offset changes with the distance of key vectors as a random walk does, and `noise`
    is the share of its variance that they do not explain. Anchor tokens that are alike share one weight, and a token
    that is far from all of them takes their mean.

    The prefix segment after the value takes whole anchors, weighted by how similar their last tokens are to the
    value's.
    """

    top_k: int = TOP_K
    noise: float = NOISE
    temperature: float = TEMPERATURE
    last: int = 16
    """Tokens at the end of a value that determine the weights for the prefix segment after it"""
    aligned: bool = False

    def propose(self, query: Query, block: KeyBlock, same: int | None) -> Proposal:
        if same is not None:
            return repeat(query, block, same)
        found = block.nearest(query, self.top_k)
        weights = self._weights(found, block.keys[found.columns])
        owners, mass = block.owner[found.columns].flatten(), weights.new_zeros(len(block.ids))
        return Proposal(
            columns=found.columns,
            weights=weights,
            distance=(found.squared[:, 0] / found.mean_squared.clamp_min(_TINY)).sqrt(),
            mass=mass.index_add_(0, owners, weights.flatten()) / len(weights),
            after=anchor_weights(block.ends(query, self.last).sqrt(), self.temperature),
        )

    def _weights(self, found: Neighbours, keys: Tensor) -> Tensor:
        """Return float32 [tokens, k] that sum to 1: of ordinary kriging with the covariance exp(-distance / scale);
        `keys` are those of the neighbours.
        """
        scale = (found.mean_squared / 2).clamp_min(_TINY).sqrt()
        near = (-found.squared.sqrt() / scale).exp()
        among = (-torch.cdist(keys, keys) / scale).exp()
        among.diagonal(dim1=1, dim2=2).add_(self.noise)
        both = torch.stack([near, torch.ones_like(near)], dim=2)
        solved, _ = torch.linalg.solve_ex(among, both)  # never singular, for the noise; to look would wait for a GPU
        weights, equal = solved.unbind(2)
        return weights + equal * ((1 - weights.sum(1)) / equal.sum(1))[:, None]


ESTIMATORS: Mapping[EstimatorName, Callable[[], Estimator]] = {"token": Token, "interpolate": Interpolate}


def repeat(query: Query, block: KeyBlock, same: int) -> Proposal:
    """Return the blend that takes the offsets of one anchor unchanged."""
    columns = block.starts[same] + torch.arange(len(query.tokens), device=block.starts.device)
    weights = query.keys.new_ones(len(query.tokens), 1)
    mass = anchor_weights(query.keys.new_zeros(len(block.ids)), 1.0, same)
    return Proposal(columns[:, None], weights, torch.zeros_like(weights[:, 0]), mass, mass)
