"""Every computed segment has a reason, and where a prompt's segments and sources meet."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.reuse import reasons
from kedge.reuse.planner import CHEAPER
from kedge.reuse.reasons import pieces, with_reasons
from kedge.types import GenerateRequest, Miss, ReuseMode, SampleId, Segment, Source, Span, ValueKind

PREFIX, VALUE, LONGER, END = (
    Segment((1,) * 4, "p0"),
    Segment((2,) * 4, "question", SampleId(ValueKind.INPUT, "question")),
    Segment((3,) * 4, "p1"),
    Segment((4,) * 4, "p2"),
)
LETTERS = {"d": Source.DEVICE, "h": Source.HOST, "t": Source.TRANSLATED, "c": Source.COMPUTED}


def request(reuse: ReuseMode = ReuseMode.TRANSLATE) -> GenerateRequest:
    return GenerateRequest((PREFIX, VALUE, LONGER, replace(VALUE, name="answer"), END), reuse=reuse)


def spans(letters: str, width: int = 4) -> tuple[Span, ...]:
    """One source for each four tokens."""
    stops = [0, *accumulate(width for _ in letters)]
    return tuple(Span(start, stop, LETTERS[one]) for (start, stop), one in zip(pairwise(stops), letters, strict=True))


@pytest.mark.parametrize(
    ("mode", "sources", "misses", "expected"),
    [
        (ReuseMode.OFF, "ccccc", {}, {"*": reasons.REUSE_OFF}),
        (ReuseMode.EXACT, "ddccc", {}, dict.fromkeys(("p1", "answer", "p2"), reasons.NOT_CACHED)),
        (
            ReuseMode.TRANSLATE,
            "ddccc",
            {},
            {"p1": "not in the cache", "answer": reasons.TOO_SHORT, "p2": "not in the cache"},
        ),
        (
            ReuseMode.TRANSLATE,
            "dcccc",
            {"question": "1 anchors of 4"},
            {"question": "1 anchors of 4", "p1": "not in the cache", "answer": reasons.DENSE, "p2": "not in the cache"},
        ),
        (ReuseMode.TRANSLATE, "ctttt", {}, {"p0": "not in the cache"}),
        (ReuseMode.TRANSLATE, "dtcct", {"answer": "no base KV"}, {"answer": "no base KV", "p1": CHEAPER}),
        (ReuseMode.TRANSLATE, "dcctt", {"question": "far"}, {"question": "far", "p1": reasons.AFTER_COMPUTED}),
        (ReuseMode.TRANSLATE, "dtttc", {}, {"p2": reasons.PROMPT_END}),
        (ReuseMode.TRANSLATE, "dttct", {}, {"answer": reasons.TOO_SHORT}),
        (ReuseMode.TRANSLATE, "ccccc", {"*": "no model"}, {"*": "no model"}),
    ],
)
def test_every_computed_segment_has_a_reason(
    mode: ReuseMode, sources: str, misses: dict[str, str], expected: dict[str, str]
) -> None:
    given_reasons = tuple(Miss(*one) for one in misses.items())
    found = with_reasons(request(mode), spans(sources), given_reasons)
    assert {miss.segment: miss.reason for miss in found} == expected
    assert found[: len(misses)] == given_reasons


def test_tokens_that_are_computed_again_within_a_translated_value_have_a_reason() -> None:
    cut = (Span(0, 4, Source.DEVICE), Span(4, 6, Source.TRANSLATED), Span(6, 7, Source.COMPUTED))
    rest = (Span(7, 19, Source.TRANSLATED), Span(19, 20, Source.COMPUTED))
    assert with_reasons(request(), (*cut, *rest), ()) == (Miss("question", reasons.UNCERTAIN),)


def test_the_last_token_needs_no_reason_and_neither_does_a_request_that_never_began() -> None:
    assert with_reasons(request(), (Span(0, 19, Source.DEVICE), Span(19, 20, Source.COMPUTED)), ()) == ()
    assert with_reasons(request(), (), ()) == ()
    alone = replace(request(), segments=request().segments[:1])
    assert with_reasons(alone, (Span(0, 4, Source.COMPUTED),), ()) == (Miss("p0", reasons.NOT_CACHED),)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.data())
def test_pieces_are_the_prompt_position_by_position(sizes: list[int], data: st.DataObject) -> None:
    segments = [Segment((7,) * size, f"s{at}") for at, size in enumerate(sizes)]
    total = sum(sizes)
    sources = data.draw(st.lists(st.sampled_from(list(Source)), min_size=total, max_size=total))
    found = list(pieces(segments, [Span(at, at + 1, source) for at, source in enumerate(sources)]))
    owners = [at for at, size in enumerate(sizes) for _ in range(size)]
    assert [(one.segment, one.source) for one in found for _ in range(one.start, one.stop)] == list(
        zip(owners, sources, strict=True)
    )
