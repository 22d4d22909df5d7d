"""Where the fixed part of a prompt ends: declared, shrunk, grown, forgotten; and the trap of an early date."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from kedge.policies.fixed_prompts import FixedBoundary, FixedLengths
from kedge.types import GenerateRequest, SampleId, Segment

FIXED = tuple(range(100))
fresh = itertools.count(1000)


def suffix(size: int = 20) -> tuple[int, ...]:
    """Tokens that no other prompt has."""
    return tuple(next(fresh) for _ in range(size))


def prompts(*lengths: int) -> list[tuple[int, ...]]:
    """Prompts that begin with so many tokens of `FIXED`."""
    return [FIXED[:length] + suffix() for length in lengths]


def observe(boundary: FixedBoundary, calls: Iterable[tuple[int, ...]], agent: str = "a") -> list[int | None]:
    return [boundary.observe(agent, prompt, 0.0) for prompt in calls]


def test_declared_after_m_confirmations() -> None:
    assert observe(FixedBoundary(8, 3), prompts(*[50] * 5)) == [None, None, None, 50, 50]


def test_a_suffix_that_begins_alike_by_chance_does_not_count() -> None:
    calls = [FIXED[:50] + start + suffix() for start in ((7,), (7,), (8,), (9,), (9,), (3,))]
    assert observe(FixedBoundary(8, 3), calls) == [None, None, None, None, None, 50]


def test_shrinks_at_once() -> None:
    boundary = FixedBoundary(8, 3)
    assert observe(boundary, prompts(50, 50, 50, 50, 30)) == [None, None, None, 50, 30]


def test_grows_after_m_confirmations() -> None:
    boundary = FixedBoundary(8, 3)
    observe(boundary, prompts(*[30] * 5))
    # The first prompt that is longer has still 30 in common with the one before it.
    assert observe(boundary, prompts(60, 60, 60, 60)) == [30, 30, 30, 60]


def test_one_that_parts_earlier_leaves_the_others_as_they_were() -> None:
    boundary = FixedBoundary(window=8, confirmations=3)
    observe(boundary, prompts(*[60] * 4))
    assert observe(boundary, prompts(30, 60, 60, 30, 60)) == [30, 60, 60, 30, 60]


def test_something_new_is_believed_only_after_a_whole_window_without_contradiction() -> None:
    boundary = FixedBoundary(window=8, confirmations=3)
    observe(boundary, prompts(*[60] * 4))
    new = [FIXED[:30] + tuple(range(500, 550)) + suffix() for _ in range(10)]
    assert observe(boundary, new) == [30] * 8 + [80, 80]


def test_a_date_in_the_first_line_ends_the_fixed_part() -> None:
    """PEER's planner: `You are a planner. Today is {date}. <long instructions> {question}`, five calls a day."""
    head, instructions = tuple(range(10)), tuple(range(100, 400))
    boundary = FixedBoundary(window=8, confirmations=3)
    seen = []
    for day in range(40):
        calls = [(*head, 5000 + day, *instructions, *suffix()) for _ in range(5)]
        seen.append(observe(boundary, calls))
    assert all(length == 10 for day in seen[2:] for length in day)


@pytest.mark.parametrize("calls", [5, 20, 60])
def test_a_date_that_often_changed_is_not_believed_again(calls: int) -> None:
    """The more often a length was contradicted, the longer the next one is doubted."""
    boundary = FixedBoundary(window=8, confirmations=3)
    days = [[FIXED[:10] + (5000 + day,) + FIXED + suffix() for _ in range(calls)] for day in range(20)]
    seen = [observe(boundary, day) for day in days]
    assert seen[0] == [None] * 3 + [111] * (calls - 3)
    assert {length for day in seen[8:] for length in day} == {10}


def test_a_date_that_shares_its_beginning_is_cut_before_what_differs() -> None:
    head, year, month = (1, 2, 3), (2025,), (7,)
    boundary = FixedBoundary(window=4, confirmations=2)
    calls = [(*head, *year, *month, 900 + day, *FIXED, *suffix()) for day in range(6)]
    assert observe(boundary, calls)[-1] == 5
    assert observe(boundary, [(*head, *year, 8, 901, *FIXED, *suffix())]) == [4]


def test_a_template_that_begins_with_a_variable_has_no_fixed_part() -> None:
    assert observe(FixedBoundary(), [suffix() + FIXED for _ in range(5)])[-1] == 0


def test_agents_are_apart() -> None:
    boundary = FixedBoundary(confirmations=1)
    observe(boundary, prompts(50, 50), "a")
    observe(boundary, prompts(30, 30), "b")
    assert [observe(boundary, prompts(n), agent) for n, agent in ((50, "a"), (30, "b"), (50, "c"))] == [
        [50],
        [30],
        [None],
    ]


def test_it_expires() -> None:
    boundary = FixedBoundary(confirmations=1, ttl=10.0)
    observe(boundary, prompts(50, 50))
    assert boundary.observe("a", prompts(50)[0], 9.9) == 50
    assert boundary.observe("a", prompts(50)[0], 19.9) is None
    assert len(boundary) == 1


def test_every_call_renews_it() -> None:
    boundary = FixedBoundary(confirmations=1, ttl=10.0)
    for now in range(0, 100, 9):
        boundary.observe("a", prompts(50)[0], float(now))
    assert boundary.observe("a", prompts(50)[0], 105.0) == 50


def test_no_more_agents_than_its_capacity() -> None:
    boundary = FixedBoundary(confirmations=1, capacity=3)
    for agent in "abcad":
        observe(boundary, prompts(50, 50), agent)
    assert len(boundary) == 3
    assert [observe(boundary, prompts(50), agent) for agent in "cadb"] == [[50], [50], [50], [None]]


def test_no_more_tokens_than_its_bound() -> None:
    boundary = FixedBoundary(confirmations=1, max_tokens=300)
    for agent in "abcde":
        observe(boundary, prompts(50, 50), agent)
        assert boundary.tokens <= 300
    assert len(boundary) == 3
    assert [observe(boundary, prompts(50), agent) for agent in "cda"] == [[50], [50], [None]]
    assert observe(boundary, [suffix(301)], "b") == [None]
    assert (boundary.tokens, len(boundary)) == (0, 0)


def test_forgotten_agents_give_their_tokens_back() -> None:
    boundary = FixedBoundary(ttl=10.0, capacity=2)
    for agent in "abc":
        observe(boundary, prompts(50), agent)
    assert boundary.tokens == 2 * 70
    boundary.observe("d", prompts(50)[0], 10.0)
    assert boundary.tokens == 70


def test_a_length_comes_from_the_request_then_from_its_segments_then_from_history() -> None:
    lengths = FixedLengths()
    parts = (Segment(FIXED, "p0"), Segment((1, 2), "q", SampleId.parse("q@0")))
    assert lengths.of(GenerateRequest(parts, fixed=7), 0.0) == 7
    assert lengths.of(GenerateRequest(parts, fixed=len(FIXED) + 3), 0.0) == len(FIXED), "longer than the prompt"
    assert lengths.of(GenerateRequest(parts), 0.0) == len(FIXED)
    found = [lengths.of(GenerateRequest((Segment(FIXED + suffix(), "p0"),)), 0.0) for _ in range(5)]
    assert found[0] is None and found[-1] == len(FIXED)
