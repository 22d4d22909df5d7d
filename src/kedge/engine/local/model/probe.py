"""Checks at load: with Kedge's attention a model computes what it computes with its own.

**Logits.** Two short prompts run through the model's own eager attention, whole and without a cache, and through the
paged one, side by side and in two pieces each. What differs by more than the rounding of the dtype is refused, and so
is whatever the model's code raises on the way. That is three forward passes of at most 32 tokens.

**Masks.** A window is larger than any prompt that could be tried. But Transformers makes masks from functions of two
positions, which can be evaluated for positions far apart. For that, one token runs through the model, with an attention
function that inspects its mask and passes the values on: a single token attends only to itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kedge.engine.local.attention.arguments import unsupported
from kedge.engine.local.model.layout import TOLERANCE, attention, observe, precision
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sequence import Sequence, Work, flatten
from kedge.errors import KedgeError, UnsupportedModel
from kedge.kv.storage import PagedStorage

LENGTH = 16
"""Tokens of a prompt"""
SPLITS = (5, 11)
"""Positions at which the prompts are cut in two: the second pieces read cached keys, at positions of their own"""
MASKS = "kedge-masks"
Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query position, key position) -> whether the query sees the key"""


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
    if not model.is_backend_compatible():
        why = "Transformers runs it with attention of its own only (no `AttentionInterface`)"
        raise UnsupportedModel("model_type", model.config_class.model_type, why)


def require_same(runner: ModelRunner) -> None:
    """Raise `UnsupportedModel` unless the paged logits of two prompts equal those of the model's own attention."""
    if runner.spec.dtype not in TOLERANCE:
        raise refusal(runner, f"its weights are of {runner.spec.dtype}, which Kedge does not know")
    generator = torch.Generator().manual_seed(0)  # always the same prompts, without use of global random state
    prompts = torch.randint(runner.vocab_size, (len(SPLITS), LENGTH), generator=generator).to(runner.device)
    ours, theirs = _paged(runner, prompts), eager_logits(runner.model, prompts)
    if ours.shape != theirs.shape:
        raise refusal(runner, f"it gives logits of shape {tuple(ours.shape)}, and {tuple(theirs.shape)} by itself")
    if not theirs.isfinite().all():
        raise refusal(runner, "its own logits are not finite")
    dtype, errors = precision(runner.spec.dtype), relative_errors(ours, theirs)
    error = float(errors.max() if dtype is torch.float32 else _usual(errors.cpu()))
    if not error <= TOLERANCE[dtype]:
        raise refusal(runner, f"its logits differ from those of its own attention by {error:.2g} of their size")


def _paged(runner: ModelRunner, prompts: Tensor) -> Tensor:
    """Return float32 [prompts, tokens, vocab], computed as the engine does."""
    storage = PagedStorage(runner.spec, prompts.numel(), 1, runner.device, runner.rotary)
    sequences = [ProbedSequence.at(prompt.tolist(), i * LENGTH) for i, prompt in enumerate(prompts)]
    pieces = [[range(split) for split in SPLITS], [range(split, LENGTH) for split in SPLITS]]
    steps = [[Work(one, [*piece]) for one, piece in zip(sequences, step, strict=True)] for step in pieces]
    logits = [runner.forward(flatten(step, storage)).split([one.logit_rows for one in step]) for step in steps]
    return torch.stack([torch.cat(parts) for parts in zip(*logits, strict=True)])


class ProbedSequence(Sequence):
    """A sequence with the logits after every position."""

    @property
    def needs_all_logits(self) -> bool:
        return True


@torch.inference_mode()
def eager_logits(model: PreTrainedModel, prompts: Tensor) -> Tensor:
    """Return float32 [prompts, tokens, vocab] as the model computes them without Kedge."""
    with attention(model, "eager"):
        return model(input_ids=prompts, use_cache=False).logits.float()


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


def refusal(runner: ModelRunner, why: str) -> UnsupportedModel:
    """Return the error that refuses a model."""
    return UnsupportedModel("model_type", runner.model.config.model_type, why)


# masks ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mask:
    """A stand-in for a mask: it holds the function that the mask is made from."""

    sees: Sees


def require_causal_masks(runner: ModelRunner) -> None:
    """Raise `UnsupportedModel` unless every layer's mask fits the window passed to its attention function."""
    look = partial(_require_window, runner.max_positions)
    token = torch.zeros(1, 1, dtype=torch.int64, device=runner.device)
    with attention(runner.model, MASKS), torch.inference_mode():
        runner.model(input_ids=token, position_ids=token, use_cache=False, kedge=look)


def _require_window(
    longest: int, module: nn.Module, _key: Tensor, _value: Tensor, mask: object, window: int | None
) -> None:
    """Raise `UnsupportedModel` unless a mask is that of causal attention within a window, up to position `longest`."""
    if not isinstance(mask, Mask):
        raise unsupported(module, "its mask is not made by Transformers' functions, and cannot be checked")
    query, key = _pairs(longest, window)
    zero = torch.zeros_like(query)
    theirs = mask.sees(zero, zero, query, key)
    ours = (key <= query) & (key > query - (window or longest))
    if (odd := (theirs != ours).nonzero().flatten()).numel():
        q, k = int(query[odd[0]]), int(key[odd[0]])
        handed = f"a window of {window}" if window else "no window"
        raise unsupported(module, f"it hands over {handed}, and masks position {k} from {q} otherwise")


def _pairs(longest: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Return positions of queries and keys at which different masks differ: near, at a window's edge, far."""
    edges = (0, 1, 2, longest // 2) if window is None else (0, 1, 2, window - 1, window, window + 1, longest // 2)
    points = sorted({at for edge in edges for at in (edge, longest - 1 - edge) if 0 <= at < longest})
    query, key = torch.meshgrid(torch.tensor(points), torch.tensor(points), indexing="ij")
    return query.flatten(), key.flatten()


AttentionInterface.register(MASKS, observe)
AttentionMaskInterface.register(MASKS, lambda mask_function, **_: Mask(mask_function))
