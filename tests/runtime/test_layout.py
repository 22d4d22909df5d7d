"""How a prompt is cut: what follows a value may belong to it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kedge.runtime.layout import known_segments, template_key, template_tokens, with_trails
from kedge.types import GenerateRequest, SampleId, Segment


def value(*tokens: int, trail: int = 2, name: str = "q") -> Segment:
    return Segment(tokens, name, SampleId(name), lead_in=(8,), stand_in=(7, 7), trail=trail)


def request(*segments: Segment) -> GenerateRequest:
    return GenerateRequest(segments)


PROMPT = request(Segment((1, 2), "p0"), value(50, 51), Segment((3, 4, 5), "p1"))


def test_a_value_takes_the_tokens_that_follow_it() -> None:
    cut = with_trails(PROMPT, 2)
    assert [segment.tokens for segment in cut.segments] == [(1, 2), (50, 51, 3, 4), (5,)]
    assert cut.segments[1].lead_in == (8,), "its base KV begins as before"
    assert template_tokens(cut) == template_tokens(PROMPT), "so does the template"


def test_no_more_than_asked_for_and_than_all_agents_share() -> None:
    assert [len(segment.tokens) for segment in with_trails(PROMPT, 1).segments] == [2, 3, 2]
    assert [len(segment.tokens) for segment in with_trails(PROMPT, 9).segments] == [2, 4, 1]
    assert with_trails(with_trails(PROMPT, 2), 2) == with_trails(PROMPT, 2)
    assert with_trails(PROMPT, 0) is PROMPT
    plain = request(Segment((1,), "p0"), value(5, trail=0), Segment((2,), "p1"))
    assert with_trails(plain, 2) is plain


def test_a_segment_that_is_all_trail_goes() -> None:
    cut = with_trails(request(value(5), Segment((3, 4), "p1"), value(6, trail=0, name="x")), 2)
    assert [(segment.name, segment.tokens) for segment in cut.segments] == [("q", (5, 3, 4)), ("x", (6,))]


def test_a_value_that_is_yet_to_come_stays_unknown_and_the_template_the_same() -> None:
    pending = request(Segment((1, 2), "p0"), value(), Segment((3, 4, 5), "p1"))
    cut, filled = with_trails(pending, 2), with_trails(PROMPT, 2)
    assert known_segments(cut) == 1
    assert cut.segments[2] == filled.segments[2]
    assert template_key(cut) == template_key(filled)


segments = st.builds(
    lambda tokens, is_value, trail: value(*tokens, trail=trail) if is_value else Segment(tuple(tokens), "p"),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.booleans(),
    st.integers(0, 3),
)


@given(st.lists(segments, min_size=1, max_size=6), st.integers(0, 4))
def test_the_prompt_and_the_template_never_change(cuts: list[Segment], most: int) -> None:
    before = request(*cuts)
    after = with_trails(before, most)
    assert after.tokens == before.tokens
    assert template_tokens(after) == template_tokens(before)
