"""Distance of an answer's distributions and a prompt's KV from those of dense prefill.

Measures of probed requests (`kedge.bench.lab.probe`); none of them runs a model. A dense request that is run again,
compared with itself, is the ceiling of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from torch import Tensor
from torch.nn.functional import cosine_similarity

from kedge.bench.lab.probe import ProbeResult
from kedge.kv.segment import KVSegment
from kedge.types import GenerateRequest


@dataclass(frozen=True)
class Layers:
    """One number per layer, of keys and of values."""

    keys: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def mean(cls, items: Sequence[Layers]) -> Layers:
        """Return the mean of at least one item, layer by layer."""
        return cls(
            *(tuple(map(fmean, zip(*(getattr(i, part) for i in items), strict=True))) for part in ("keys", "values"))
        )


@dataclass(frozen=True)
class Fidelity:
    """One request, forced to the answer of dense prefill, compared with dense prefill."""

    kl: float
    """Mean KL(dense ‖ other) in nats, over the first tokens of the answer."""
    top1: float
    """Share of these tokens at which both have the same argmax."""
    error: Layers | None
    """‖other - dense‖ / ‖dense‖ over all tokens from the first placeholder on."""
    cosine: Layers | None
    """Mean cosine between other and dense over the same tokens, heads concatenated."""


def compare(dense: ProbeResult, other: ProbeResult) -> Fidelity:
    """Measure one pair; KV is compared where both have it."""
    rows = min(len(dense.logits), len(other.logits))
    kl, top1 = compare_logits(dense.logits[:rows], other.logits[:rows])
    if dense.kv is None or other.kv is None:
        return Fidelity(kl, top1, None, None)
    first = _first_placeholder(dense.request)
    kv = dense.kv.slice(first), other.kv.slice(first)
    return Fidelity(kl, top1, relative_error(*kv), cosines(*kv))


def compare_logits(dense: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the mean KL(dense ‖ other) in nats and the share of equal argmax, for logits [rows, vocab]."""
    log_p, log_q = dense.double().log_softmax(1), other.double().log_softmax(1)
    kl = (log_p.exp() * (log_p - log_q)).sum(1).mean()
    return float(kl), float((dense.argmax(1) == other.argmax(1)).double().mean())


def relative_error(dense: KVSegment, other: KVSegment) -> Layers:
    """Return ‖other - dense‖ / ‖dense‖ by layer, over all tokens."""
    return Layers(*(_errors(a, b) for a, b in ((dense.keys, other.keys), (dense.values, other.values))))


def _errors(dense: Tensor, other: Tensor) -> tuple[float, ...]:
    wrong, size = ((x.float().flatten(1)).norm(dim=1) for x in (other - dense, dense))
    return tuple((wrong / size).tolist())


def cosines(dense: KVSegment, other: KVSegment) -> Layers:
    """Return the cosine by layer, mean over tokens."""
    return Layers(*(_cosines(a, b) for a, b in ((dense.keys, other.keys), (dense.values, other.values))))


def _cosines(dense: Tensor, other: Tensor) -> tuple[float, ...]:
    return tuple(cosine_similarity(dense.float().flatten(2), other.float().flatten(2), dim=2).mean(1).tolist())


def _first_placeholder(request: GenerateRequest) -> int:
    start = 0
    for segment in request.segments:
        if segment.is_placeholder:
            break
        start += len(segment.tokens)
    return start


# judge consistency ----------------------------------------------------------------------------------------------------


def shuffled(request: GenerateRequest, rng: Random) -> GenerateRequest:
    """Return the judge's request with the other agents' answers in a random order; the rest stays in place."""
    places = [i for i, segment in enumerate(request.segments) if segment.is_answer]
    order = rng.sample(places, len(places))
    segments = list(request.segments)
    for place, source in zip(places, order, strict=True):
        given = request.segments[source]
        segments[place] = replace(segments[place], tokens=given.tokens, sample=given.sample)
    return replace(request, segments=tuple(segments))


def consistency(choices: Iterable[tuple[str | None, str | None]]) -> float:
    """Return the share of pairs with the same choice, 1 for no pairs. None matches nothing."""
    same = [a == b and a is not None for a, b in choices]
    return fmean(same) if same else 1.0
