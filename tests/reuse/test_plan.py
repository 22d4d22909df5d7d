"""Spans tile the prompt, or the plan does not come to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.errors import PlanError
from kedge.reuse.plan import ReusePlan, spans_of
from kedge.types import Source, Span


@given(st.lists(st.sampled_from(list(Source)), min_size=1))
def test_spans_are_the_sources_joined(sources: list[Source]) -> None:
    spans = spans_of(sources)
    assert [span.source for span in spans for _ in range(len(span))] == sources
    assert all(a.source is not b.source for a, b in zip(spans, spans[1:], strict=False))
    plan = ReusePlan(spans)
    assert plan.computed == [i for i, source in enumerate(sources) if source is Source.COMPUTED]
    exact = sources.index(Source.TRANSLATED) if Source.TRANSLATED in sources else len(sources)
    assert plan.exact_tokens == exact


@pytest.mark.parametrize("edges", [[(1, 4)], [(0, 3), (4, 6)], [(0, 3), (2, 6)], [(0, 3), (3, 3)]])
def test_gaps_and_overlaps_are_refused(edges: list[tuple[int, int]]) -> None:
    with pytest.raises(PlanError):
        ReusePlan(tuple(Span(a, b, Source.COMPUTED) for a, b in edges))
