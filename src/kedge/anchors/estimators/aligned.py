"""Estimators with other weights of whole anchors than Eq. 6: those of the paper's Table A.4, and the mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kedge.anchors.anchor import Query
from kedge.anchors.estimators.blending import Proposal, anchor_weights, repeat, whole_anchors
from kedge.anchors.keys import KeyBlock

Weigh = Callable[[Query, KeyBlock, Tensor, Tensor], Tensor]
"""The value, the block, anchors of it (int64 [anchors]), squared distances to their tokens (float32 [anchors, tokens])
-> float32 [anchors] that sum to 1"""


@dataclass(frozen=True, slots=True)
class Aligned:
    """An estimator in which token t takes the weighted offsets of token t of every anchor that is at least as long."""

    weigh: Weigh
    aligned: bool = True

    def propose(self, query: Query, block: KeyBlock, same: int | None) -> Proposal:
        if same is not None:
            return repeat(query, block, same)
        anchors = block.long_enough(len(query.tokens))
        squared = block.aligned(query, anchors)
        return whole_anchors(query, block, anchors, squared, self.weigh(query, block, anchors, squared))


def nearest() -> Aligned:
    """Return the estimator that uses the one anchor of least L2 distance (Table A.4)."""
    return Aligned(_least)


def mean() -> Aligned:
    """Return the estimator that uses the mean of all offsets, whatever the value."""
    return Aligned(_equal)


def cosine(temperature: float) -> Aligned:
    """Return the estimator that weighs anchors by cosine similarity over all tokens (Table A.4).

    The distance is the chord sqrt(2 - 2 cos), the L2 distance of normalised vectors, so that `temperature` has the same
    meaning as for `interpolate`.
    """
    return Aligned(partial(_by_angle, temperature))


def _least(_: Query, block: KeyBlock, anchors: Tensor, squared: Tensor) -> Tensor:  # noqa: ARG001
    return anchor_weights(squared.sum(1), 1.0, int(squared.sum(1).argmin()))


def _equal(_: Query, block: KeyBlock, anchors: Tensor, squared: Tensor) -> Tensor:  # noqa: ARG001
    return squared.new_full((len(anchors),), 1 / len(anchors))


def _by_angle(temperature: float, query: Query, block: KeyBlock, anchors: Tensor, _: Tensor) -> Tensor:
    places = block.starts[anchors, None] + torch.arange(len(query.tokens), device=anchors.device)
    similarity = torch.cosine_similarity(block.keys[places].flatten(1), query.keys.flatten()[None])
    return anchor_weights((2 - 2 * similarity).clamp_min(0).sqrt(), temperature)
