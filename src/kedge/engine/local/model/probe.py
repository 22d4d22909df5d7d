"""A check at load: with Kedge's attention a model computes what it computes with its own.

Two short prompts run through the model's own eager attention, whole and without a cache, and through the paged one,
side by side and in two pieces each. What differs by more than the rounding of the dtype is refused, and so is whatever
the model's code raises on the way. That is three forward passes of at most 32 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kedge.engine.local.model.comparing import TOLERANCE, attention, precision
from kedge.engine.local.model.passes import PromptPiece, one_pass, refusal, run, storage_for
from kedge.errors import KedgeError, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kedge.engine.local.model.runner import ModelRunner

LENGTH = 16
"""Tokens of a prompt"""
SPLITS = (5, 11)
"""Positions at which the prompts are cut in two: the second pieces read cached keys, at positions of their own"""


@contextmanager
def refusing(model_type: str) -> Iterator[None]:
    """Turn errors of a model's code into `UnsupportedModel` with their text; out-of-memory errors stay as they are."""
    try:
        yield
    except (KedgeError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the code of any family, with any configuration
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        why = f"its code fails with Kedge's attention: {words}"
        raise UnsupportedModel("model_type", model_type, why) from error


def require_interface(model: type[PreTrainedModel]) -> None:
    """Raise `UnsupportedModel` if the class does not support external attention functions, according to
    Transformers.
    """
    if not (model.is_backend_compatible() or model._is_stateful):  # of these hardly any says so, and most are
        why = "Transformers runs it with attention of its own only (no `AttentionInterface`)"
        raise UnsupportedModel("model_type", model.config_class.model_type, why)


def require_same(runner: ModelRunner) -> None:
    """Raise `UnsupportedModel` unless the paged logits of two prompts equal those of the model's own attention."""
    if runner.spec.dtype not in TOLERANCE:
        raise refusal(runner, f"its weights are of {runner.spec.dtype}, which Kedge does not know")
    prompts = random_prompts(runner)
    ours, theirs = _paged(runner, prompts), eager_logits(runner.model, prompts)
    if ours.shape != theirs.shape:
        raise refusal(runner, f"it gives logits of shape {tuple(ours.shape)}, and {tuple(theirs.shape)} by itself")
    if not theirs.isfinite().all():
        raise refusal(runner, "its own logits are not finite")
    error, most = _difference(ours, theirs, precision(runner.spec.dtype))
    if not error <= most:
        raise refusal(runner, f"its logits differ from those of its own attention by {error:.2g} of their size")


def random_prompts(runner: ModelRunner) -> Tensor:
    """Return int64 [prompts, tokens], always the same, without use of global random state."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(runner.vocab_size, (len(SPLITS), LENGTH), generator=generator).to(runner.device)


def _paged(runner: ModelRunner, prompts: Tensor) -> Tensor:
    """Return float32 [prompts, tokens, vocab], computed as the engine does."""
    storage = storage_for(runner, prompts.numel())
    starts = [
        (prompt, i * LENGTH, split, runner.recurrent.new())
        for i, (prompt, split) in enumerate(zip(prompts, SPLITS, strict=True))
    ]
    first = [PromptPiece(prompt, slot, 0, split, states) for prompt, slot, split, states in starts]
    second = [PromptPiece(prompt, slot, split, LENGTH, states) for prompt, slot, split, states in starts]
    logits = [run(runner, one_pass(step, storage)).split([p.stop - p.start for p in step]) for step in (first, second)]
    return torch.stack([torch.cat(parts) for parts in zip(*logits, strict=True)])


@torch.inference_mode()
def eager_logits(model: PreTrainedModel, prompts: Tensor) -> Tensor:
    """Return float32 [prompts, tokens, vocab] as the model computes them without Kedge."""
    with attention(model, "eager"):
        return model(input_ids=prompts, use_cache=False).logits.float()


def _difference(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return the relative difference of logits [prompts, tokens, vocab], and its limit."""
    errors = relative_errors(ours, theirs)
    worst = errors.max() if dtype is torch.float32 else _usual(errors.cpu())
    return float(worst), TOLERANCE[dtype]


def relative_errors(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the relative difference of the logits of every row, [prompts, tokens]. A constant added to all logits of
    a row does not count.
    """
    ours, theirs = (x - x.mean(-1, keepdim=True) for x in (ours, theirs))
    return (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-9)


def _usual(errors: Tensor) -> Tensor:
    """Return the error of rows [prompts, tokens] without outliers: by rounding, single rows go to other experts.

    Most rows decide, in the first pieces and behind them; and both rows where a second piece begins, since a model may
    see only one token of state that it keeps beside its keys.
    """
    splits = torch.tensor(SPLITS)[:, None]
    cached = torch.arange(LENGTH) >= splits
    seams = errors.gather(1, splits)
    return torch.stack([errors[cached].median(), errors[~cached].median(), seams.min()]).max()
