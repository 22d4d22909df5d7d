"""Plans keep what the cache says of the exact tokens' sources."""

from __future__ import annotations

from typing import Any, cast

from kedge.runtime.interfaces import ReusePolicy
from kedge.runtime.planner import Planner
from kedge.types import GenerateRequest, ReuseMode, SampleId, Segment, Source, Span

NOBODY = cast(Any, None)
"""Neither anchors nor base KV are asked where nothing can be translated."""
LEASED = (Span(0, 4, Source.DEVICE), Span(4, 6, Source.HOST))


def plan_of(reuse: ReuseMode, refusal: str | None = None, leased: tuple[Span, ...] = LEASED) -> tuple[Span, ...]:
    segments = (Segment((1, 2, 3, 4, 5), "p0"), Segment((6, 7, 8, 9), "x", SampleId("x@0")))
    return Planner(NOBODY, NOBODY, ReusePolicy(), refusal).plan(GenerateRequest(segments, reuse=reuse), leased).spans


def test_exact_tokens_keep_their_source() -> None:
    assert plan_of(ReuseMode.EXACT) == (*LEASED, Span(6, 9, Source.COMPUTED))
    assert plan_of(ReuseMode.TRANSLATE, "no rotation") == (*LEASED, Span(6, 9, Source.COMPUTED))


def test_without_a_hit_all_is_computed() -> None:
    assert plan_of(ReuseMode.OFF, leased=()) == (Span(0, 9, Source.COMPUTED),)
