"""Short passes through a model as the engine runs it, for the checks at load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kedge.engine.local.attention.latent import LatentWeights
from kedge.engine.local.attention.paged import Batch, Scoring, SequenceSlice
from kedge.errors import UnsupportedModel
from kedge.kv.storage import PagedStorage

if TYPE_CHECKING:
    from kedge.engine.local.model.runner import ModelRunner


@dataclass(slots=True)
class Watched(Batch):
    """A batch that records which layers have attended."""

    layers: list[int] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, how: Scoring, latent: LatentWeights | None = None) -> Tensor:
        self.layers.append(layer)
        return Batch.attend(self, layer, query, how, latent)


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Tokens [start, stop) of a prompt, stored in the slots from `slot` on."""

    prompt: Tensor
    slot: int
    start: int
    stop: int

    def share(self, row: int) -> SequenceSlice:
        """Return its share of a batch, starting at a row."""
        return SequenceSlice(
            start=row,
            stop=row + self.stop - self.start,
            runs=(slice(self.slot, self.slot + self.stop),),
            context=self.stop,
            positions=torch.arange(self.start, self.stop, device=self.prompt.device),
            contiguous=True,
        )


def storage_for(runner: ModelRunner, slots: int) -> PagedStorage:
    """Return storage for the KV of a few tokens."""
    return PagedStorage(runner.spec, slots, 1, runner.device, runner.rotary)


def one_pass(pieces: Sequence[PromptPiece], storage: PagedStorage) -> Watched:
    """Return a batch of all pieces, with the logits of every token."""
    shares: list[SequenceSlice] = []
    for piece in pieces:
        shares.append(piece.share(shares[-1].stop if shares else 0))
    tokens = torch.cat([piece.prompt[piece.start : piece.stop] for piece in pieces])
    slots = torch.cat([piece.slot + share.positions for piece, share in zip(pieces, shares, strict=True)])
    positions = torch.cat([share.positions for share in shares])
    return Watched(tokens, positions, slots, shares, torch.arange(len(tokens), device=tokens.device), storage)


@torch.inference_mode()
def run(runner: ModelRunner, batch: Watched) -> Tensor:
    """Return the logits of all tokens. Raises `UnsupportedModel` unless every layer has attended once."""
    logits = runner.run(batch)
    if sorted(batch.layers) != list(range(runner.spec.layers)):
        counts = f"{len(batch.layers)} times, in {len(set(batch.layers))} of {runner.spec.layers} layers"
        raise refusal(runner, f"Kedge's attention is not called once by every layer, but {counts}")
    if len(logits) != len(batch.tokens):
        raise refusal(runner, f"asked for {len(batch.tokens)} rows of logits it gives {len(logits)}")
    return logits


def refusal(runner: ModelRunner, why: str) -> UnsupportedModel:
    """Return the error that refuses a model."""
    return UnsupportedModel("model_type", runner.model.config.model_type, why)
