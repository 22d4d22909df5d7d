"""The ways to serve a workflow that the papers' tables compare, by name, and the components that they need.

A baseline changes the plan of a request before it is written; planning, pools and everything after are Kedge's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, fields, replace
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from kedge.anchors.anchor import PlaceholderSite, PoolKey, SampleView
from kedge.anchors.base_store import BaseStore, KnownBase
from kedge.anchors.offsets import empty_table
from kedge.anchors.sites import OffsetEstimate, no_offsets
from kedge.anchors.store import AnchorStore, Experience
from kedge.anchors.translator import Translate, Translation, translate_into
from kedge.bench.probe import SERVED, Method
from kedge.engine.local.attention.latent import LatentWeights
from kedge.engine.local.attention.paged import Batch, Scoring
from kedge.engine.local.batch import flatten
from kedge.engine.local.components import Assembler, EngineComponents
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.scheduler import Work
from kedge.engine.local.sequence import Sequence
from kedge.errors import ConfigError
from kedge.kv.rotary import Rotation
from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.layout import Placed, layout
from kedge.reuse.plan import ReusePlan, spans_of
from kedge.types import GenerateRequest, Namespace, ReuseMode, RunKey, SampleId, Source, Tokens
from kedge.workloads.miniature import role_last


class NoAnchors(AnchorStore):
    """An anchor store without offsets: every value with base KV is shareable, and its keys are only rotated."""

    def estimate(self, site: PlaceholderSite, sample: SampleView, *_: object, **__: object) -> OffsetEstimate:  # noqa: ARG002
        table = empty_table(sample.base)
        nothing = no_offsets(sample.base, table)
        return OffsetEstimate(
            True, "", learnable=False, value=nothing, prefix=nothing, value_table=table, prefix_table=table
        )

    def prepare(self, sample: SampleView) -> None:
        """Do nothing: there is nothing to look up ahead of time."""

    def use(self, estimate: OffsetEstimate) -> None:  # noqa: ARG002
        self._used += 1

    def observe(self, site: PlaceholderSite, sample: SampleView, *_: KVSegment | None) -> None:
        """Do nothing: no offsets are learned."""


def without_offsets(item: Translation) -> Translation:
    """Return the translation with its base KV unchanged but for the rotation."""
    return replace(item, blend=no_offsets(item.base, item.table))


@dataclass(frozen=True, slots=True)
class Ablation:
    """A choice of KVCOMM's three steps of alignment (Table 5)."""

    rotation: bool = True
    """Whether keys are rotated to the segment's new position."""
    values: bool = True
    """Whether offsets are added to placeholders."""
    prefixes: bool = True
    """Whether offsets are added to the prefix segments after them."""

    def __call__(self, runner: ModelRunner, storage: PagedStorage) -> Assembler:
        return _AblatedAssembler(self, runner.rotary, translate_into(storage))


@dataclass(slots=True)
class _AblatedAssembler:
    """An assembler that leaves out steps. Without rotation, keys keep the rotation of where base KV was computed."""

    works_ahead: ClassVar[bool] = False
    steps: Ablation
    rotary: Rotation
    translate: Translate
    prompts: dict[tuple[RunKey, SampleId], int] = field(default_factory=dict)
    """Tokens of the prompt before an answer."""

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        if request.produces is not None:
            self.prompts[request.run_key, request.produces] = request.prompt_tokens
        placed = layout(request)
        plan = replace(plan, translations=tuple(self._edited(request, placed, item) for item in plan.translations))
        self.translate(table, plan.translations)
        return plan

    def _edited(self, request: GenerateRequest, placed: tuple[Placed, ...], item: Translation) -> Translation:
        here = next(p for p in placed if p.start <= item.start < p.stop)
        if not (self.steps.values if here.segment.is_placeholder else self.steps.prefixes):
            item = without_offsets(item)
        if self.steps.rotation:
            return item
        return self._left_there(item, self._origin(request, placed, here) + item.start - here.start)

    def _origin(self, request: GenerateRequest, placed: tuple[Placed, ...], here: Placed) -> int:
        """Return the position at which a segment's base KV was computed: after its producer's prompt, after a lead-in,
        or in the template with the placeholders' names as text.
        """
        segment = here.segment
        if segment.sample is not None:
            return self.prompts.get((request.run_key, segment.sample), len(segment.base_context))
        return sum(
            len(p.segment.placeholder_text if p.segment.is_placeholder else p.segment.tokens)
            for p in placed[: here.index]
        )

    def _left_there(self, item: Translation, origin: int) -> Translation:
        """Undo in advance the translator's rotation, so that the keys stay rotated as at `origin`."""
        count = item.base.tokens
        there = torch.empty_like(item.base.keys)
        self.rotary.rotate(item.base.keys, slice(origin, origin + count), out=there)
        keys = self.rotary.unrotate(there, slice(item.start, item.start + count))
        return replace(item, base=KVSegment(keys, item.base.values))


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
    """The shares of reused tokens to compute again, from the second layer on (Yao et al., EuroSys 2025, section 4).

    From there on a token's KV is computed and compared with the reused KV; those that deviate most go on to the next
    layer, fewer in each. The choice, and every K and V, are the paper's; the time is not: chosen tokens run through the
    first layers twice, as the engine then computes them like any others.

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
        self.parts = storage.parts
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


class ReadOnlyStorage(PagedStorage):
    """A view of a storage that keeps what a pass would write, and writes nothing."""

    def __init__(self, storage: PagedStorage) -> None:
        self.keys, self.values, self.pools = storage.keys, storage.values, storage.pools
        self.spec, self.block_size, self.rotary = storage.spec, storage.block_size, storage.rotary
        self.parts = storage.parts
        self.fresh: tuple[int, Tensor, Tensor]
        """Layer, keys and values [rows, kv_heads, head_dim] of the last pass."""

    def store(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:  # noqa: ARG002
        self.fresh = layer, keys, values


class WatchedBatch(Batch):
    """A batch of one sequence over a `ReadOnlyStorage`, with what its last layer saw."""

    query: Tensor
    """[heads, rows, head_dim], rotated: queries to what attention reads of a token"""
    scaling: float

    @classmethod
    def of(cls, batch: Batch) -> WatchedBatch:
        """Return a batch like this one, watched."""
        return cls(**{field.name: getattr(batch, field.name) for field in fields(batch)})

    def attend(self, layer: int, query: Tensor, how: Scoring, latent: LatentWeights | None = None) -> Tensor:
        self.query, self.scaling = query if latent is None else latent.absorbed(query), how.scaling
        return Batch.attend(self, layer, query, how, latent)

    def distances(self, rows: Tensor) -> Tensor:
        """Return the cosine distance of the stored values from the fresh ones, float32 [rows], on the CPU."""
        layer, _, values = self._fresh()
        stored = self.storage.parts[layer][1][self.slots[rows], :, : values.shape[2]]
        return 1 - cosine_similarity(stored.float().flatten(1), values[rows].float().flatten(1)).cpu()

    def attention(self, rows: Tensor) -> Tensor:
        """Return the attention that each position of the context gets from some rows, summed over these and over all
        heads: float32 [context], on the CPU. Keys are fresh where there are some.
        """
        layer, fresh, values = self._fresh()
        (sequence,) = self.sequences
        keys = torch.cat([self.storage.pools[layer][0][run] for run in sequence.runs])
        fresh = torch.cat([values, fresh], dim=-1) if self.storage.spec.latent else fresh
        keys[self.positions] = fresh.to(keys.dtype)
        query = self.query[:, rows].unflatten(0, (keys.shape[1], -1)).float()
        scores = torch.einsum("kgtd,skd->kgts", query, keys.float()) * self.scaling
        later = torch.arange(len(keys), device=keys.device) > self.positions[rows][:, None]
        return scores.masked_fill(later, float("-inf")).softmax(-1).sum((0, 1, 2)).cpu()

    def _fresh(self) -> tuple[int, Tensor, Tensor]:
        assert isinstance(self.storage, ReadOnlyStorage)
        return self.storage.fresh


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
        return known or KnownBase(_NOT_DECODED, tokens, KVSegment(nothing, nothing))

    def prefixes(self, namespace: Namespace, template: str) -> Mapping[int, KVSegment]:  # noqa: ARG002
        return MappingProxyType({})


class RelayedAnswers(NoAnchors):
    """An anchor store by which every decoded answer is shareable, without offsets, and no other value."""

    def estimate(self, site: PlaceholderSite, sample: SampleView, *_: object, **__: object) -> OffsetEstimate:
        if sample.key == _NOT_DECODED:
            return OffsetEstimate(False, "no agent of this run has decoded it", learnable=False)
        return super().estimate(site, sample)

    def experience(self, site: PlaceholderSite, pool: PoolKey) -> Experience:  # noqa: ARG002
        """Return that there is nothing to learn from dense prompts."""
        return Experience(0, is_calibrated=True, is_saturated=True)


@dataclass(frozen=True, slots=True)
class RelayCaching:
    """The choice of tokens to correct: by thresholds, or a fixed share of them (Geng et al., arXiv 2603.13289).

    From the paper: decode-time KV moved to the reader's positions; at a detection layer in the middle a token is
    corrected if the cosine distance of its reused value from its recomputed one, or the attention of its answer's last
    tokens to it, exceeds a multiple of the mean. The constants 1.5, 1.45 and 10 are taken from a public implementation:
    we had no more of the text than its introduction. Our reading: means are taken answer by answer; the detection layer
    is the middle one; only answers are relayed; tokens run from the first layer on, and a corrected one is corrected in
    every layer above. Corrected tokens run through the first layers twice, so its time is not comparable.

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


_PAPER: Mapping[str, Any] = {
    "recompute_head": 0,
    "recompute_short": 0,
    "min_translated": 0.0,
    "move": "never",
}
"""The paper recomputes one token, and has no least share."""


def ablation(*, rotation: bool, values: bool, prefixes: bool) -> Method:
    """Return KVCOMM as published without some of its three steps (Table 5)."""
    steps = Ablation(rotation, values, prefixes)
    return Method(ReuseMode.TRANSLATE, {"estimator": "interpolate"}, _PAPER, EngineComponents(assembler=steps))


def cacheblend(*ratios: float) -> Method:
    """Return CacheBlend with these shares of recomputed tokens."""
    components = EngineComponents(NoAnchors, CacheBlend(ratios))
    return Method(ReuseMode.TRANSLATE, {}, _PAPER, components, is_timed=False, has_anchors=False)


def epic(first: int) -> Method:
    """Return EPIC's LegoLink (Hu et al., arXiv 2410.15332): base KV at its new place, with the `first` tokens of every
    moved chunk recomputed.

    A chunk's first tokens attended to nothing before them when its base KV was computed, and later ones attend to them
    as to the beginning of a text. Here every value and every prefix segment behind one is a chunk; a shorter one is
    recomputed as a whole. Raises `ConfigError` for a negative number.
    """
    if first < 0:
        raise ConfigError("epic.first", first, "must be at least 0")
    return Method(
        ReuseMode.TRANSLATE,
        planner={**_PAPER, "recompute_head": first},
        components=EngineComponents(NoAnchors, Ablation(values=False, prefixes=False)),
        has_anchors=False,
    )


def relay(share: float | None = None) -> Method:
    """Return RelayCaching, with this share of each answer's tokens corrected; None: as its thresholds choose them."""
    components = EngineComponents(RelayedAnswers, RelayCaching(share), DecodedBases)
    return Method(ReuseMode.TRANSLATE, {}, _PAPER, components, is_timed=share == 0, has_anchors=False)


METHODS: Mapping[str, Method] = {
    **SERVED,
    "role-last": Method(ReuseMode.EXACT, team=role_last),
    "rotation": epic(0),
    "epic": epic(16),
    "cacheblend": cacheblend(*RATIOS),
    "relay": relay(),
    "kvcomm": Method(ReuseMode.TRANSLATE, {"estimator": "interpolate"}, _PAPER),
    "no-rotation": ablation(rotation=False, values=True, prefixes=True),
    "no-phi": ablation(rotation=True, values=False, prefixes=True),
    "no-prefix": ablation(rotation=True, values=True, prefixes=False),
    "only-rotation": ablation(rotation=True, values=False, prefixes=False),
    "only-phi": ablation(rotation=False, values=True, prefixes=False),
    "only-prefix": ablation(rotation=False, values=False, prefixes=True),
    "cacheblend-10": cacheblend(0.15, 0.12, 0.1),
    "cacheblend-40": cacheblend(0.6, 0.5, 0.4),
    **{f"relay-{share}": relay(share / 100) for share in (0, 20, 40)},
}
"""`kvcomm`, `epic`, `cacheblend` and `relay` are as published. Numbers are percent of tokens computed or corrected."""


def _levels() -> Iterator[str]:
    """Yield methods that share every value they can, by the predicted error above which they compute tokens."""
    shared = "max_error=1e9:min_anchors=2:recompute_short=0:min_translated=0"
    yield from (f"token:{shared}:weak_error={level:g}" for level in (0.15, 0.3, 0.5, 0.8))


SETS: Mapping[str, tuple[str, ...]] = {
    "table-5": ("kvcomm", "no-rotation", "no-phi", "no-prefix", "only-rotation", "only-phi", "only-prefix"),
    "table-6": (
        *(f"kvcomm:max_error={gamma:g}" for gamma in (0.1, 0.3, 0.5, 0.7, 0.9)),
        *(f"kvcomm:capacity={size}" for size in (5, 10, 15, 20, 25)),
        *(f"token:weak_error={error:g}" for error in (0.1, 0.15, 0.2, 0.25, 0.4, 1e9)),
    ),
    "frontier": (
        "kedge", *_levels(), "rotation", "kvcomm", "epic:recompute_head=4",
        "epic", "epic:recompute_head=64", "cacheblend-10", "cacheblend", "cacheblend-40", "relay-0", "relay-20",
        "relay-40", "relay",
    ),
}  # fmt: skip
"""What `kedge bench fidelity --methods` also takes by one name: KVCOMM's tables of methods, and a frontier of quality
over computed tokens. Pools hold what was taught: for `table-6` that is to be more than its capacities."""
