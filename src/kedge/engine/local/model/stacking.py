"""A check at load, for models with recurrent layers: sequences that decode together get the logits that they get one by
one. Where they do not, they decode one by one from then on.

The model's own pass over a whole prompt is no measure here: single steps of some families differ from it more than
rounding does (Nemotron-H, by 0.004 of their size after five tokens).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kedge.engine.local.model.comparing import TOLERANCE, precision
from kedge.engine.local.model.passes import PromptPiece, one_pass, run, storage_for
from kedge.engine.local.model.probe import LENGTH, random_prompts, relative_errors

if TYPE_CHECKING:
    from kedge.engine.local.model.runner import ModelRunner

BEGUN = 13
"""Tokens of a prompt that are computed before the two decode"""
ALONE = LENGTH - 1
"""The last token, which each computes alone: it sees whether the pass before has written the sequence's own states"""


def stacking_refusal(runner: ModelRunner) -> str | None:
    """Return why sequences cannot decode together in the recurrent layers of a model, or None."""
    one_by_one = _decoded(runner, 1)
    try:
        together = _decoded(runner, len(one_by_one))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the code of any family
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"its code fails with the states of two sequences stacked: {words}"
    dtype = precision(runner.spec.dtype)
    difference = _worst(relative_errors(together, one_by_one), dtype)
    if difference <= TOLERANCE[dtype]:
        return None
    return f"with the states of two sequences stacked its logits differ by {difference:.2g} of their size"


def _decoded(runner: ModelRunner, at_once: int) -> Tensor:
    """Return float32 [prompts, tokens, vocab] of the tokens from `BEGUN` on, so many sequences in a pass."""
    prompts = random_prompts(runner)
    storage, states = storage_for(runner, prompts.numel()), [runner.recurrent.new() for _ in prompts]

    def logits(start: int, stop: int, most: int) -> Tensor:
        pieces = [PromptPiece(p, n * LENGTH, start, stop, states[n]) for n, p in enumerate(prompts)]
        passes = [one_pass(pieces[n : n + most], storage) for n in range(0, len(pieces), most)]
        return torch.cat([run(runner, one) for one in passes])

    logits(0, BEGUN, len(prompts))
    steps = [logits(at, at + 1, at_once if at < ALONE else 1) for at in range(BEGUN, LENGTH)]
    return torch.stack(steps, dim=1)


def _worst(errors: Tensor, dtype: torch.dtype) -> float:
    """Return the error that decides, of rows [prompts, tokens]. In half precision single rows go to other experts: most
    rows of the prompt that is worse off decide, and the better one of those computed alone.
    """
    if dtype is torch.float32:
        return float(errors.max())
    return float(torch.maximum(errors.median(dim=1).values.max(), errors[:, -1].min()))
