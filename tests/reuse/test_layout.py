"""How a prompt is cut: what follows a value may belong to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.guard import GuardOrders
from kedge.reuse.layout import known_segments, plan_key, template_key, template_tokens, with_trails
from kedge.settings import PlannerConstants
from kedge.types import GenerateRequest, ReuseMode, SampleId, Segment, Tokens, ValueKind, WorkflowId


def value(*tokens: int, trail: Tokens = (3, 4), name: str = "q") -> Segment:
    kind = ValueKind.AGENT if name.startswith("agent_") else ValueKind.INPUT
    return Segment(tokens, name, SampleId(kind, name), base_context=(8,), placeholder_text=(7, 7), trail=trail)


def request(*segments: Segment, trail: Tokens = ()) -> GenerateRequest:
    return GenerateRequest(segments, trail=trail)


def trailed(prompt: GenerateRequest, most: int, *, of_answers: bool = True) -> GenerateRequest:
    return with_trails(prompt, PlannerConstants(trail=most), of_answers=of_answers)


PROMPT = request(Segment((1, 2), "p0"), value(50, 51), Segment((3, 4, 5), "p1"))


def test_a_value_takes_the_tokens_that_follow_it() -> None:
    cut = trailed(PROMPT, 2)
    assert [segment.tokens for segment in cut.segments] == [(1, 2), (50, 51, 3, 4), (5,)]
    assert cut.segments[1].base_context == (8,), "its base KV begins as before"
    assert template_tokens(cut) == template_tokens(PROMPT), "so does the template"


def test_no_more_than_asked_for_and_than_all_agents_share() -> None:
    assert [len(segment.tokens) for segment in trailed(PROMPT, 1).segments] == [2, 3, 2]
    assert [len(segment.tokens) for segment in trailed(PROMPT, 9).segments] == [2, 4, 1]
    assert trailed(trailed(PROMPT, 2), 2) == trailed(PROMPT, 2)
    assert trailed(PROMPT, 0) == PROMPT
    plain = request(Segment((1,), "p0"), value(5, trail=()), Segment((2,), "p1"))
    assert trailed(plain, 2) == plain


@pytest.mark.parametrize(
    "other",
    [
        replace(PROMPT, reuse=ReuseMode.TRANSLATE),
        replace(PROMPT, guard=GuardOrders(withheld=frozenset("q"))),
        replace(PROMPT, workflow=WorkflowId("other")),
        replace(PROMPT, segments=(Segment((1, 9), "p0"), *PROMPT.segments[1:])),
    ],
)
def test_other_modes_orders_and_templates_have_plans_of_their_own(other: GenerateRequest) -> None:
    assert plan_key(other) != plan_key(PROMPT)
    assert plan_key(request(PROMPT.segments[0], value(60), PROMPT.segments[2])) == plan_key(PROMPT)


def test_a_segment_that_is_all_trail_goes() -> None:
    cut = trailed(request(value(5), Segment((3, 4), "p1"), value(6, trail=(), name="x")), 2)
    assert [(segment.name, segment.tokens) for segment in cut.segments] == [("q", (5, 3, 4)), ("x", (6,))]


def test_a_value_that_is_yet_to_come_stays_unknown_and_the_template_the_same() -> None:
    pending = request(Segment((1, 2), "p0"), value(), Segment((3, 4, 5), "p1"))
    cut, filled = trailed(pending, 2), trailed(PROMPT, 2)
    assert known_segments(cut) == 1
    assert (cut.segments[1].tokens, cut.segments[1].held) == ((), (3, 4))
    assert cut.segments[2] == filled.segments[2]
    assert template_key(cut) == template_key(filled)


def test_an_answer_has_no_trail_where_nobody_leaves_one() -> None:
    answer = value(6, name="agent_a_current")
    both = request(value(5), Segment((3, 4, 1), "p1"), answer, Segment((3, 4, 2), "p2"), trail=(9, 9, 9))
    with_it, without = trailed(both, 2), trailed(both, 2, of_answers=False)
    assert [one.tokens for one in with_it.segments] == [(5, 3, 4), (1,), (6, 3, 4), (2,)]
    assert [one.tokens for one in without.segments] == [(5, 3, 4), (1,), (6,), (3, 4, 2)]
    assert (with_it.trail, without.trail) == ((9, 9), ())


words = st.lists(st.integers(1, 9), max_size=4).map(tuple)


@given(st.lists(st.tuples(words, words, words, st.sampled_from(["q", "agent_a"])), max_size=4), st.integers(0, 4))
def test_the_prompt_and_the_template_never_change(parts: list[tuple[Tokens, Tokens, Tokens, str]], most: int) -> None:
    """A value, what follows it everywhere, and what follows it here."""
    cuts = [(value(*said, trail=trail, name=name), Segment(trail + own, "p")) for said, trail, own, name in parts]
    before = request(*(segment for pair in cuts for segment in pair))
    after = trailed(before, most)
    assert template_tokens(after) == template_tokens(before)
    assert [one.value for one in after.segments if one.is_placeholder] == [said for said, *_ in parts]
    if all(said for said, *_ in parts):
        assert after.tokens == before.tokens
