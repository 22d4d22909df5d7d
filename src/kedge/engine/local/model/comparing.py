"""Means of the checks at load: running a model with another attention function, and how far results may differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""By how much of their size logits may differ: rounding errors grow from layer to layer (with 32 random layers to 1e-5,
0.008 and 0.06). Logits that have nothing in common differ by 1.4 times their size."""
FASTER = {"high": torch.float16, "medium": torch.bfloat16}
"""Dtypes that products of float32 are rounded to, by PyTorch's precision setting"""


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run a model with another attention function temporarily."""
    before = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def precision(dtype: torch.dtype) -> torch.dtype:
    """Return the coarsest dtype that a product of a model of this dtype is rounded to."""
    return FASTER.get(torch.get_float32_matmul_precision(), dtype) if dtype is torch.float32 else dtype
