"""Why prompt tokens were computed, segment by segment, where a plan gives no reason of its own."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from kedge.reuse.plan import ALL_COMPUTED, CHEAPER
from kedge.types import GenerateRequest, Miss, ReuseMode, Segment, Source, Span

REUSE_OFF = "reuse is off"
NOT_CACHED = "not in the cache"
UNCERTAIN = "some of its translated tokens are uncertain, and are computed again"
PROMPT_END = "the end of a prompt is computed where that is faster"
AFTER_COMPUTED = "it follows a value that is computed"
TOO_SHORT = "too short to be worth translating"
DENSE = "the whole prompt is computed, because of another segment"


class Piece(NamedTuple):
    """Prompt positions `[start, stop)` of one segment with one source."""

    segment: int
    source: Source
    start: int
    stop: int


def pieces(segments: Sequence[Segment], spans: Sequence[Span]) -> Iterator[Piece]:
    """Cut a prompt wherever its segment or its source changes. O(segments + spans)."""
    stops, at = list(accumulate(len(segment.tokens) for segment in segments)), 0
    for span in spans:
        start = span.start
        while start < span.stop:
            while stops[at] <= start:
                at += 1
            stop = min(span.stop, stops[at])
            yield Piece(at, span.source, start, stop)
            start = stop


def with_reasons(request: GenerateRequest, spans: Sequence[Span], misses: tuple[Miss, ...]) -> tuple[Miss, ...]:
    """Return `misses`, and one more for each segment with computed tokens that they do not explain, or a single one for
    the whole prompt, `*`, where it would be the same for all.

    The last prompt token is always computed, for the first logits, and needs no reason.
    """
    named = {miss.segment for miss in misses}
    if spans and request.prompt_logprobs is not None and request.reuse is not ReuseMode.OFF:
        return (ALL_COMPUTED,)
    if not spans or "*" in named:
        return misses
    counts = [Counter[Source]() for _ in request.segments]
    for piece in pieces(request.segments, spans):
        counts[piece.segment][piece.source] += min(piece.stop, request.prompt_tokens - 1) - piece.start
    unexplained = [
        at
        for at, segment in enumerate(request.segments)
        if counts[at][Source.COMPUTED] > 0 and segment.name not in named
    ]
    more = {request.segments[at].name: _reason(request, counts, at, is_dense=bool(misses)) for at in unexplained}
    if len(unexplained) == len(request.segments) > 1 and len(reason := set(more.values())) == 1:
        return (Miss("*", *reason),)
    return (*misses, *(Miss(name, reason) for name, reason in more.items()))


def _reason(request: GenerateRequest, counts: Sequence[Counter[Source]], at: int, *, is_dense: bool) -> str:
    if request.reuse is ReuseMode.OFF:
        return REUSE_OFF
    is_value = request.segments[at].is_placeholder
    if not any(one[Source.TRANSLATED] for one in counts):
        wants_translation = is_value and request.reuse is ReuseMode.TRANSLATE
        return (DENSE if is_dense else TOO_SHORT) if wants_translation else NOT_CACHED
    if counts[at][Source.TRANSLATED]:
        return UNCERTAIN
    if is_value:
        return TOO_SHORT
    # A prefix segment of a prompt with translated values: it goes with the value before it.
    if at == 0:
        return NOT_CACHED
    if not counts[at - 1][Source.TRANSLATED]:
        return AFTER_COMPUTED
    return PROMPT_END if at == len(request.segments) - 1 else CHEAPER
