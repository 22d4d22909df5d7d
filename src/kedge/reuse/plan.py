"""A reuse plan: for every prompt token where its KV will come from, and what is still to be computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from kedge.errors import PlanError
from kedge.reuse.holes import Holes, joined
from kedge.types import Miss, Source, Span

if TYPE_CHECKING:
    from kedge.anchors.sites import OffsetEstimate
    from kedge.anchors.translator import Translation

ALL_COMPUTED = Miss("*", "the log-probabilities of the prompt need all of it to be computed")
CHEAPER = "translating it would save too little time"
NOT_WORTH_IT = Miss("*", CHEAPER)


class Sentinel(NamedTuple):
    """A token that is translated and computed as well, so that the two can be compared."""

    position: int
    is_weak: bool
    """Whether it is computed anyway, as no offset predicts it; else it was drawn from the translated ones"""


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """Spans tile the prompt in order. Translations are written first, then computed positions run through the model.

    Raises `PlanError` where the spans leave a gap or overlap.
    """

    spans: tuple[Span, ...]
    translations: tuple[Translation, ...] = ()
    misses: tuple[Miss, ...] = ()
    estimates: tuple[OffsetEstimate, ...] = field(default=(), repr=False)
    """The estimates that were used, for counting anchor hits."""
    teaches: bool = False
    """A value in it is computed so that something can be learned from it."""
    sentinels: tuple[Sentinel, ...] = ()
    moved: tuple[int, ...] = ()
    """Numbers of the values that are translated by rotation alone, with the prefix segment after it computed: the
    offsets of that can be learned"""

    def __post_init__(self) -> None:
        starts, stops = [span.start for span in self.spans], [span.stop for span in self.spans]
        if starts != [0, *stops[:-1]] or any(len(span) <= 0 for span in self.spans):
            raise PlanError("spans", self.spans, "they do not tile the prompt")

    @classmethod
    def dense(cls, exact: Sequence[Span], size: int) -> ReusePlan:
        """Return the plan of a prompt of `size` tokens that reuses nothing but the `exact` spans."""
        start = exact[-1].stop if exact else 0
        return cls((*exact, Span(start, size, Source.COMPUTED)))

    def without_translation(self, miss: Miss) -> ReusePlan:
        """Return the plan that computes everything from the first translated token on, for this reason."""
        kept = [span for span in self.spans if span.stop <= self.exact_tokens]
        return replace(ReusePlan.dense(kept, self.spans[-1].stop), misses=(*self.misses, miss))

    @property
    def translates(self) -> bool:
        return bool(self.translations)

    @property
    def translated_tokens(self) -> int:
        """Tokens that are written by translation, those included that are computed all the same."""
        return sum(one.tokens for one in self.translations)

    def writes_in(self, start: int, stop: int) -> bool:
        """Return whether a token at positions [start, stop) is written by translation."""
        return any(one.start < stop and start < one.start + one.tokens for one in self.translations)

    @property
    def exact_tokens(self) -> int:
        """Prompt tokens before the first translated one: their KV is what dense prefill would give."""
        first = next((span.start for span in self.spans if span.source is Source.TRANSLATED), None)
        return self.spans[-1].stop if first is None else first

    @property
    def holes(self) -> Holes:
        """The runs of positions to run through the model."""
        return joined(range(span.start, span.stop) for span in self.spans if span.source is Source.COMPUTED)

    @property
    def computed(self) -> list[int]:
        """Positions to run through the model, ascending."""
        return [position for hole in self.holes for position in hole]


def spans_of(sources: Iterable[Source]) -> tuple[Span, ...]:
    """Join one source per position into spans."""
    spans, start = list[Span](), 0
    for source, run in groupby(sources):
        stop = start + len(list(run))
        spans.append(Span(start, stop, source))
        start = stop
    return tuple(spans)
