"""The least time in which a translated prompt's first token could come: the bytes that must move, over the bandwidth.

Counted is what no implementation can leave out: base KV and each row of offsets are read once, translated KV is written
once, and the pass reads the model's weights and the KV of the whole prompt. Key vectors that are compared, activations
and all arithmetic are left out.
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
"""Bytes of the copy that is timed: more than any cache holds"""
_COPIES = 10


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy within `device` moves, read and written ones; the best of some copies."""
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
class Moved:
    """Bytes that must move until the first token of one translated prompt."""

    base: int
    """Base KV that is read"""
    offsets: int
    """Distinct rows of offsets that are read"""
    written: int
    """Translated KV"""
    context: int
    """KV of the whole prompt that the pass reads"""
    weights: int
    """Of the model, which the pass reads"""

    def floor_ms(self, bandwidth: float) -> float:
        return sum(asdict(self).values()) / bandwidth * 1e3


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a pass reads: all but the table of embeddings, where the output has its own."""
    table = model.get_input_embeddings().weight
    unread = 0 if model.get_output_embeddings().weight is table else table.nbytes
    return sum(weight.nbytes for weight in model.parameters()) - unread


class Watch:
    """Replaces an engine's assembler by one that also remembers what it translates, in microseconds."""

    works_ahead: ClassVar[bool] = True

    def __init__(self) -> None:
        self._seen: dict[RequestId, tuple[Translation, ...]] = {}
        self._weights, self._spec = 0, KVSpec(0, 0, 0, 0, torch.float32)

    def __call__(self, runner: ModelRunner, storage: PagedStorage) -> Watch:
        self._inner = Translating(runner, storage)
        self._weights, self._spec = weight_bytes(runner.model), runner.spec
        return self

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        self._seen[request.request_id] = plan.translations
        return self._inner.assemble(request, table, plan)

    def moved(self, request: GenerateRequest) -> Moved | None:
        """Of a request that has been answered; None where nothing was translated. Forgets it."""
        items, token = self._seen.pop(request.request_id, ()), self._spec.bytes_per_token
        if not items:
            return None
        kv = sum(item.base.tokens for item in items) * token
        offsets = sum(item.blend.rows.unique().numel() * item.table.row_bytes for item in items)
        return Moved(kv, offsets, kv, request.prompt_tokens * token, self._weights)
