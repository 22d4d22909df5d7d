"""A lower bound of a translated prompt's TTFT: the bytes that must move, over the bandwidth.

Counted is what no implementation can avoid: base KV and each row of offsets are read once, translated KV is written
once, and the pass reads the model's weights and the KV of the whole prompt. Compared key vectors, activations and all
arithmetic are left out.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.engine.local.components import Translating
from kedge.engine.local.model.runner import ModelRunner
from kedge.kv.spec import KVSpec
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.plan import ReusePlan, Translation
from kedge.types import GenerateRequest, RequestId

_COPIED = {"cpu": 256 << 20, "cuda": 1 << 30}
"""Bytes of the timed copy: more than any CPU or GPU cache holds."""
_COPIES = 10


def bandwidth(device: torch.device) -> float:
    """Measure the bytes per second of a large copy within `device`, read and written; the best of several copies."""
    source = torch.ones(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(_copy_seconds(source, target) for _ in range(_COPIES))


def _copy_seconds(source: Tensor, target: Tensor) -> float:
    _wait(source)
    began = time.perf_counter()
    target.copy_(source)
    _wait(target)
    return time.perf_counter() - began


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


@dataclass(frozen=True)
class MovedBytes:
    """Bytes that must move until the first token of one translated prompt."""

    base: int
    """Base KV that is read."""
    offsets: int
    """Distinct rows of offsets that are read."""
    written: int
    """Translated KV."""
    context: int
    """KV of the whole prompt, which the pass reads."""
    weights: int
    """The model's weights, which the pass reads."""

    def floor_ms(self, bandwidth: float) -> float:
        """Return milliseconds at `bandwidth` bytes per second."""
        return sum(asdict(self).values()) / bandwidth * 1e3


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a pass reads: all but the embedding table, unless the output shares it."""
    table = model.get_input_embeddings().weight
    unread = 0 if model.get_output_embeddings().weight is table else table.nbytes
    return sum(weight.nbytes for weight in model.parameters()) - unread


class WatchingAssembler:
    """An assembler that also records what it translates, which takes microseconds."""

    works_ahead: ClassVar[bool] = True

    def __init__(self) -> None:
        self._seen: dict[RequestId, tuple[Translation, ...]] = {}
        self._weights, self._spec = 0, KVSpec(0, 0, 0, 0, torch.float32)

    def __call__(self, runner: ModelRunner, storage: PagedStorage) -> WatchingAssembler:
        self._inner = Translating(runner, storage)
        self._weights, self._spec = weight_bytes(runner.model), runner.spec
        return self

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        self._seen[request.request_id] = plan.translations
        return self._inner.assemble(request, table, plan)

    def moved(self, request: GenerateRequest) -> MovedBytes | None:
        """Return and forget the bytes of an answered request; None where nothing was translated."""
        items, token = self._seen.pop(request.request_id, ()), self._spec.bytes_per_token
        if not items:
            return None
        kv = sum(item.base.tokens for item in items) * token
        offsets = sum(item.blend.rows.unique().numel() * item.table.row_bytes for item in items)
        return MovedBytes(kv, offsets, kv, request.prompt_tokens * token, self._weights)
