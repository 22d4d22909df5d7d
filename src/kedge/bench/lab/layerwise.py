"""A prompt's positions run through a model one layer at a time, so that a method can choose tokens on the way."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor, nn

from kedge.engine.local.attention.paged import Batch
from kedge.engine.local.batch import flatten
from kedge.engine.local.scheduler import Work
from kedge.engine.local.sequence import Sequence
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.plan import ReusePlan
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
