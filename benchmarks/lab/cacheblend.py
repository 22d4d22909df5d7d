"""CacheBlend on this engine: base KV is reused unchanged, and the tokens that deviate most are computed again.

Yao et al., *CacheBlend*, EuroSys 2025, section 4; KVCOMM compares with it at 20 % (Table 1). From the second layer on
(the first sees no context) a token's KV is computed and compared with the reused KV. The tokens that deviate most go on
to the next layer, fewer in each (gradual filtering), until `ratios` ends; these are computed in all layers above.

The choice of tokens, and every K and V, are those of the paper's layerwise forward pass. The time is not: the chosen
tokens run through the first layers a second time, with the same result, because the engine then computes them like any
others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.lab.baselines import without_offsets
from kedge.anchors.translator import translate_into
from kedge.engine.local.attention.paged import Batch
from kedge.engine.local.batch import flatten
from kedge.engine.local.components import Assembler
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.scheduler import Work
from kedge.engine.local.sequence import Sequence
from kedge.errors import ConfigError
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.plan import ReusePlan, spans_of
from kedge.types import GenerateRequest, Source


class LayerwisePass:
    """A pass over the positions of a prompt that have no exact KV. They may become fewer from layer to layer."""

    def __init__(self, model: Any, request: GenerateRequest, table: SlotTable, sources: Many[Source]) -> None:
        """Embed the positions of `sources` that are translated or computed. `model` is a decoder of Transformers."""
        self._model = model
        self._sequence = Sequence(request.request_id, request.namespace, list(request.tokens), table)
        self.rows = [p for p, source in enumerate(sources) if source in (Source.TRANSLATED, Source.COMPUTED)]
        """Positions on their way, ascending."""
        self.reused = torch.tensor([sources[p] is Source.TRANSLATED for p in self.rows])
        """bool [rows at the start], on the CPU."""
        tokens = torch.tensor([self._sequence.tokens[p] for p in self.rows], device=model.device)
        self._hidden: Tensor = model.embed_tokens(tokens[None])

    def batch(self, storage: PagedStorage) -> Batch:
        """Return the batch of the positions on their way; a layer that runs on it reads and writes `storage`."""
        return flatten([Work(self._sequence, self.rows)], storage)

    def run(self, layer: nn.Module, batch: Batch) -> None:
        """Run one layer on a batch of this pass."""
        places = batch.positions[None]
        turns = self._model.rotary_emb(self._hidden, position_ids=places)
        self._hidden = layer(
            self._hidden, attention_mask=None, position_ids=places, position_embeddings=turns, kedge=batch
        )

    def keep(self, kept: Tensor) -> None:
        """Go on with some of the rows only: bool [rows], on the CPU."""
        self._hidden = self._hidden[:, kept]
        self.rows = [p for p, stays in zip(self.rows, kept, strict=True) if stays]


def sources_of(plan: ReusePlan) -> list[Source]:
    """Return one source per position."""
    return [span.source for span in plan.spans for _ in range(len(span))]


def computing(sources: Many[Source], positions: Iterable[int]) -> list[Source]:
    """Return the sources with these positions computed."""
    changed = list(sources)
    for position in positions:
        changed[position] = Source.COMPUTED
    return changed


RATIOS = (0.3, 0.25, 0.2)


@dataclass(frozen=True, slots=True)
class CacheBlend:
    """The shares of reused tokens to compute again, from the second layer on.

    The last ratio holds for all layers above; a model with fewer layers takes the last ratios. Raises `ConfigError` for
    ratios that grow or lie outside (0, 1].
    """

    ratios: tuple[float, ...] = RATIOS

    def __post_init__(self) -> None:
        falling = all(a >= b for a, b in pairwise(self.ratios))
        if not self.ratios or not falling or not all(0 < ratio <= 1 for ratio in self.ratios):
            raise ConfigError("cacheblend.ratios", self.ratios, "must be in (0, 1] and never grow")

    def __call__(self, runner: ModelRunner, storage: PagedStorage) -> Assembler:
        return _CacheBlendAssembler(runner, storage, self.ratios[-(runner.spec.layers - 1) :])


class _CacheBlendAssembler:
    """An assembler that reuses base KV and marks the deviating tokens as computed."""

    works_ahead: ClassVar[bool] = False

    def __init__(self, runner: ModelRunner, storage: PagedStorage, ratios: tuple[float, ...]) -> None:
        self._model, self._storage, self._ratios = runner.model.base_model, storage, ratios
        self._translate_into = translate_into(storage)

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        plan = replace(plan, translations=tuple(map(without_offsets, plan.translations)))
        self._translate_into(table, plan.translations)
        if not plan.translates:
            return plan
        sources = sources_of(plan)
        return replace(plan, spans=spans_of(computing(sources, self._choose(request, table, sources))))

    @torch.inference_mode()
    def _choose(self, request: GenerateRequest, table: SlotTable, sources: Many[Source]) -> list[int]:
        """Return the positions to compute. KV of positions that were dropped on the way stays as it was computed."""
        going = LayerwisePass(self._model, request, table, sources)
        filtering, reused = _FilteredStorage(self._storage, going.reused), int(going.reused.sum())
        for layer, ratio in zip(self._model.layers, (1.0, *self._ratios), strict=False):
            filtering.keep = math.ceil(ratio * reused)
            going.run(layer, going.batch(filtering))
            going.keep(filtering.kept)
        return going.rows


class _FilteredStorage(PagedStorage):
    """A view of a storage in which a pass may overwrite only the `keep` reused rows that deviate most."""

    def __init__(self, storage: PagedStorage, reused: Tensor) -> None:
        """Take `reused`, bool [rows] on the CPU. Rows that are not reused are always written and always kept."""
        self.keys, self.values, self.pools = storage.keys, storage.values, storage.pools
        self.spec, self.block_size, self.rotary = storage.spec, storage.block_size, storage.rotary
        self.places, self.parts = storage.places, storage.parts
        self.keep = 0
        self.kept = torch.ones_like(reused)
        """bool [rows] of the layer that was stored last, on the CPU."""
        self._reused = reused

    def store(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self._reused = self._reused[self.kept]
        self.kept = ~self._reused
        deviation = _distance(self.keys[layer, slots], keys) + _distance(self.values[layer, slots], values)
        reused = self._reused.nonzero().flatten()
        self.kept[reused[deviation.cpu()[reused].topk(self.keep).indices]] = True
        kept = self.kept.to(slots.device)
        super().store(layer, slots[kept], keys[kept], values[kept])


def _distance(before: Tensor, after: Tensor) -> Tensor:
    """Return the squared L2 distance over heads and dimensions, float32 [tokens]."""
    return (before.float() - after.float()).square().sum((1, 2))
