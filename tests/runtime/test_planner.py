"""Plans keep what the cache says of the exact tokens' sources."""

from __future__ import annotations

from types import SimpleNamespace
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


class Known:
    """Base KV of everything, and anchors by which everything is shareable but for some tokens."""

    kv = SimpleNamespace(tokens=8, slice=lambda start, stop=None: None)  # noqa: ARG005
    key = "base"

    def __init__(self, weak: list[int], weak_prefix: list[int]) -> None:
        self._estimate = SimpleNamespace(
            shareable=True, phi=self.kv, prefix=self.kv, phi_table=None, prefix_table=None,
            weak_positions=lambda: weak, weak_prefix_positions=lambda: weak_prefix,
        )  # fmt: skip

    def prefixes(self, *_: object) -> dict[int, object]:
        return dict.fromkeys(range(9), self.kv)

    def find(self, *_: object) -> Known:
        return self

    def estimate(self, *_: object) -> Any:
        return self._estimate


def computed_of(weak: list[int], weak_prefix: list[int], **policy: int) -> list[int]:
    """What is computed of p0 (5 tokens), x (8 tokens), p1 (6 tokens)."""
    segments = (
        Segment((1,) * 5, "p0"), Segment((2,) * 8, "x", SampleId("x@0")), Segment((3,) * 6, "p1")
    )  # fmt: skip
    known = cast(Any, Known(weak, weak_prefix))
    planner = Planner(known, known, ReusePolicy(**policy), None)
    return planner.plan(GenerateRequest(segments, reuse=ReuseMode.TRANSLATE), (Span(0, 5, Source.DEVICE),)).computed


def test_weak_tokens_of_the_value_and_of_the_template_behind_it_are_computed() -> None:
    assert computed_of([], []) == [18]
    assert computed_of([1, 7], []) == [6, 12, 18]
    assert computed_of([], [0, 3]) == [13, 16, 18]
    assert computed_of([1], [3], recompute_head=1) == [5, 6, 13, 16, 18]


def test_exact_tokens_keep_their_source() -> None:
    assert plan_of(ReuseMode.EXACT) == (*LEASED, Span(6, 9, Source.COMPUTED))
    assert plan_of(ReuseMode.TRANSLATE, "no rotation") == (*LEASED, Span(6, 9, Source.COMPUTED))


def test_without_a_hit_all_is_computed() -> None:
    assert plan_of(ReuseMode.OFF, leased=()) == (Span(0, 9, Source.COMPUTED),)
