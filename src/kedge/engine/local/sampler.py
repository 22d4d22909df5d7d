"""Drawing the next token from logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kedge.types import SamplingParams

Draw = Callable[[Tensor], int]
"""Draws a request's next token from logits [vocab]; called by the engine's thread, token after token"""


class Sampler:
    """Draws the tokens of one request; seeded requests repeat exactly, whatever runs beside them."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def __call__(self, logits: Tensor) -> int:
        """The next token from logits [vocab]."""
        if self._params.temperature == 0:
            return int(logits.argmax())
        weights = torch.softmax(logits.cpu() / self._params.temperature, dim=-1)
        if self._params.top_p < 1:
            weights = _nucleus(weights, self._params.top_p)
        return int(torch.multinomial(weights, 1, generator=self._generator))


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Keeps the fewest tokens whose weights [vocab] reach `top_p`."""
    ordered, order = weights.sort(descending=True)
    dropped = ordered.cumsum(-1) - ordered >= top_p
    return weights.scatter(0, order[dropped], 0.0)
