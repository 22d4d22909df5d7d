"""RelayCaching on this engine: answers are reused as their decoding left them, and the tokens that deviate corrected.

Geng et al., *RelayCaching: Accelerating LLM Collaboration via Decoding KV Cache Reuse*, arXiv 2603.13289. Its authors
find that KV of the same answer differs little between its decoding and a reader's prefill, and most in middle layers
and at few tokens. So there are no anchors and no base prefills, and the first question is served as any other.

From the paper: decode-time KV moved to the reader's positions; all tokens run up to a *detection layer* in the middle;
there a token is corrected if the cosine distance of its reused value from its recomputed one exceeds `deviation` times
the mean, or if the last tokens of its answer attend to it more than `influence` times the mean. The constants 1.5, 1.45
and 10 are those of its sensitivity analysis, taken from a public implementation, as we had no more of the paper's text
than its introduction.

Our reading, where that left it open: means are taken answer by answer; the detection layer is the middle one, not
profiled; attention is summed over the heads of that layer; only answers are relayed, while questions, tool results and
templates are computed; tokens run from the first layer on, where the paper begins at a later one with hidden states
that the producer kept; and a corrected token is corrected in every layer above. As with CacheBlend, corrected tokens
run through the first layers twice, so its time is not comparable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from kedge.anchors.base_store import BaseStore, KnownBase
from kedge.anchors.sites import OffsetEstimate
from kedge.anchors.translator import translate_into
from kedge.bench.lab.baselines import NoAnchors
from kedge.bench.lab.layerwise import LayerwisePass, computing, sources_of
from kedge.bench.lab.watched import ReadOnlyStorage, WatchedBatch
from kedge.engine.local.components import Assembler
from kedge.engine.local.model.runner import ModelRunner
from kedge.errors import ConfigError
from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.contracts import Experience, PlaceholderSite, PoolKey, SampleView
from kedge.reuse.plan import ReusePlan, spans_of
from kedge.types import GenerateRequest, Namespace, RunKey, SampleId, Source, Tokens

SUFFIX = 10
"""Last tokens of an answer, whose attention decides which of its tokens matter."""
_NOT_DECODED = (-1, -1)
"""Key of the base KV of values that no agent of this run decoded."""


class DecodedBases(BaseStore):
    """A store of base KV that has what decoding left behind, and nothing else.

    For any other value it returns base KV without layers, which is never written, so that the engine does not prefill
    it in a context of its own.
    """

    def find(self, run: RunKey, sample: SampleId, tokens: Tokens, base_context: Tokens) -> KnownBase:
        nothing = torch.empty(0, len(tokens), 0, 0)
        known = super().find(run, sample, tokens, base_context)
        return known or KnownBase(_NOT_DECODED, tokens, KVSegment(nothing, nothing), exact_lineage=True)

    def prefixes(self, namespace: Namespace, template: str) -> Mapping[int, KVSegment]:  # noqa: ARG002
        return MappingProxyType({})


class RelayedAnswers(NoAnchors):
    """An anchor store by which every decoded answer is shareable, without offsets, and no other value."""

    def estimate(self, slot: PlaceholderSite, sample: SampleView) -> OffsetEstimate:
        if sample.key == _NOT_DECODED:
            return OffsetEstimate(False, "no agent of this run has decoded it", learnable=False)
        return super().estimate(slot, sample)

    def experience(self, slot: PlaceholderSite, pool: PoolKey) -> Experience:  # noqa: ARG002
        """Return that there is nothing to learn from dense prompts."""
        return Experience(0, is_calibrated=True, is_saturated=True)


@dataclass(frozen=True, slots=True)
class RelayCaching:
    """The choice of tokens to correct: by thresholds, or a fixed share of them.

    Raises `ConfigError` for a share outside [0, 1] or a threshold that is not positive.
    """

    share: float | None = None
    """Share of each answer's tokens to correct, those that deviate most; None: by the thresholds."""
    deviation: float = 1.5
    """In units of the mean deviation."""
    influence: float = 1.45
    """In units of the mean attention."""

    def __post_init__(self) -> None:
        if self.share is not None and not 0 <= self.share <= 1:
            raise ConfigError("relay.share", self.share, "must be in [0, 1]")
        for key in ("deviation", "influence"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"relay.{key}", getattr(self, key), "must be more than 0")

    def __call__(self, runner: ModelRunner, storage: PagedStorage) -> Assembler:
        return _RelayAssembler(self, runner, storage)

    def choose(self, distance: Tensor, attention: Tensor) -> Tensor:
        """Return which tokens of one answer to correct, bool [tokens], by the cosine distances of their values and the
        attention that they get, each float [tokens].
        """
        if self.share is not None:
            chosen = torch.zeros(len(distance), dtype=torch.bool)
            chosen[distance.topk(math.ceil(self.share * len(distance))).indices] = True
            return chosen
        return (distance > self.deviation * distance.mean()) | (attention > self.influence * attention.mean())


class _RelayAssembler:
    """An assembler that moves decoded KV to its place and marks the tokens to correct as computed."""

    works_ahead: ClassVar[bool] = False

    def __init__(self, choice: RelayCaching, runner: ModelRunner, storage: PagedStorage) -> None:
        self._choice, self._model, self._storage = choice, runner.model.base_model, storage
        self._detection = runner.spec.layers // 2
        self._translate_into = translate_into(storage)

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        self._translate_into(table, plan.translations)
        if not plan.translates or self._choice.share == 0:
            return plan
        sources = sources_of(plan)
        corrected = self._correct(request, table, sources)
        return replace(plan, spans=spans_of(computing(sources, corrected)))

    @torch.inference_mode()
    def _correct(self, request: GenerateRequest, table: SlotTable, sources: list[Source]) -> list[int]:
        """Return the positions to correct. Below the detection layer, KV of all relayed tokens stays as computed."""
        going = LayerwisePass(self._model, request, table, sources)
        for layer in self._model.layers[: self._detection]:
            going.run(layer, going.batch(self._storage))
        watched = WatchedBatch.of(going.batch(ReadOnlyStorage(self._storage)))
        going.run(self._model.layers[self._detection], watched)
        rows = {position: row for row, position in enumerate(going.rows)}
        return [position for answer in _answers(sources) for position in self._of_answer(answer, rows, watched)]

    def _of_answer(self, answer: range, rows: Mapping[int, int], watched: WatchedBatch) -> Iterator[int]:
        at = torch.tensor([rows[position] for position in answer])
        chosen = self._choice.choose(watched.distances(at), watched.attention(at[-SUFFIX:])[list(answer)])
        return (position for position, is_chosen in zip(answer, chosen.tolist(), strict=True) if is_chosen)


def _answers(sources: list[Source]) -> Iterator[range]:
    """Yield the runs of relayed positions. Answers never touch: a template has text between them."""
    for source, run in groupby(range(len(sources)), key=sources.__getitem__):
        if source is Source.TRANSLATED:
            positions = list(run)
            yield range(positions[0], positions[-1] + 1)
