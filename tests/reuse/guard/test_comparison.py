"""Two answers to one prompt: what counts as changed, and what is not a number."""

import math
from operator import itemgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.guard import DecisionKind
from kedge.reuse.guard.comparison import (
    MAX_KL,
    AnswerDecisions,
    DecisionComparison,
    compare_decisions,
    divergence,
    mean_divergence,
)
from kedge.types import TokenLogprob
from tests.reuse.guard.answers import answer, position

SURE = position({1: 0.9, 2: 0.1})
UNSURE = position({1: 0.52, 2: 0.48})
OTHER = position({2: 0.9, 1: 0.1})
NAN, PART = (TokenLogprob(1, math.nan, ((1, first), (2, math.nan))) for first in (math.nan, -0.1))


def test_the_divergence_of_an_answer_is_the_mean_of_its_tokens() -> None:
    nearby = position({1: 0.6, 2: 0.4})
    expected = (divergence(SURE, nearby) + 0.0 + divergence(UNSURE, SURE)) / 3
    found = mean_divergence(answer(SURE, SURE, UNSURE), answer(nearby, SURE, SURE))
    assert found == pytest.approx(expected) and expected > 0


def test_the_token_at_which_answers_part_is_compared_and_none_behind_it() -> None:
    found = mean_divergence(answer(SURE, UNSURE, SURE), answer(SURE, OTHER, OTHER))
    assert found == pytest.approx(divergence(UNSURE, OTHER) / 2)


def test_a_sampled_answer_is_compared_no_further_than_both_drew_the_same() -> None:
    unlucky = position({1: 0.9, 2: 0.1}, drawn=2)
    both = mean_divergence(answer(unlucky, SURE), answer(unlucky, OTHER))
    assert both == pytest.approx(divergence(SURE, OTHER) / 2)
    assert mean_divergence(answer(unlucky, SURE), answer(SURE, OTHER)) == 0.0


@pytest.mark.parametrize("dense, translated, found", [
    ((SURE,), (NAN,), MAX_KL), ((SURE,), (PART,), MAX_KL), ((SURE, SURE), (SURE, NAN), MAX_KL),
    ((NAN,), (SURE,), None), ((SURE, NAN), (SURE, SURE), None),
    ((), (), None), ((SURE,), (), None), ((), (SURE,), None),
])  # fmt: skip
def test_what_is_no_number_is_never_a_clean_check_and_shows_nothing_where_dense_prefill_has_none(
    dense: tuple[TokenLogprob, ...], translated: tuple[TokenLogprob, ...], found: float | None
) -> None:
    assert mean_divergence(answer(*dense), answer(*translated)) == found


def test_tokens_that_cannot_be_drawn_have_no_weight() -> None:
    assert divergence(position({1: 1.0, 2: 0.0}), position({1: 1.0, 2: 0.0})) == 0.0
    assert divergence(position({1: 1.0}), position({2: 1.0, 1: 0.0})) == pytest.approx(MAX_KL, rel=0.1)


SHARES = st.lists(st.floats(1e-6, 1), min_size=3, max_size=20)


@given(SHARES, SHARES, st.integers(1, 20))
def test_the_divergence_is_that_of_the_distributions_or_a_lower_bound_of_it(
    p: list[float], q: list[float], top: int
) -> None:
    """That with all tokens that are not listed as one, up to what floors leave, where both list the same ones."""
    size = min(len(p), len(q))
    p, q = ([share / sum(one[:size]) for share in one[:size]] for one in (p, q))
    exact = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    listed = [dict(sorted(enumerate(one), key=itemgetter(1))[-top:]) for one in (p, q)]
    found = divergence(*map(position, listed))
    assert 0 <= found <= min(exact + 1e-5, MAX_KL + 1e-6)
    if listed[0].keys() == listed[1].keys():
        pairs = [(p[at], q[at]) for at in listed[0]]
        rests = [max(1e-9, 1 - sum(one)) for one in zip(*pairs, strict=True)]
        assert found == pytest.approx(sum(a * math.log(a / b) for a, b in [*pairs, rests]), abs=1e-5)


CALL, OTHER_CALL = '{"name": "look_up", "parameters": {}}', '{"name": "delete", "parameters": {}}'


def decisions(dense: str, translated: str, pick: str = "", cut: int | None = None) -> dict[DecisionKind, bool]:
    """What differs between two answers."""
    return compare_decisions(*(AnswerDecisions.of(one, pick, is_whole=True) for one in (dense, translated)), cut)


@pytest.mark.parametrize("dense, translated, differs", [
    (CALL, CALL, False), (CALL, OTHER_CALL, True), (CALL, "I look it up.", True), ("Let me see.", CALL, True),
    ("Yes.", "No.", False),
])  # fmt: skip
def test_a_call_in_place_of_prose_or_of_another_function_is_a_change(
    dense: str, translated: str, differs: bool
) -> None:
    assert decisions(dense, translated) == {DecisionKind.CALL: differs}


def test_an_answer_that_was_cut_off_is_compared_as_far_as_it_goes() -> None:
    """Else a name that is cut in two would be prose."""
    assert decisions(CALL, CALL[:12])[DecisionKind.CALL]
    assert not decisions(CALL, CALL[:12], cut=12)[DecisionKind.CALL]
    assert decisions("I look it up, so that", CALL, cut=21)[DecisionKind.CALL]


def test_picks_are_compared_where_any_answer_has_one() -> None:
    mark = "The answer is"
    assert not decisions("So.\nThe answer is B.", "The answer is **b**\nas shown", mark)[DecisionKind.PICK]
    assert decisions("The answer is B", "The answer is C", mark)[DecisionKind.PICK]
    assert decisions("The answer is B", "Nobody knows", mark)[DecisionKind.PICK]
    assert DecisionKind.PICK not in decisions("Hm.", "Nobody knows", mark)


def test_any_kind_of_change_is_one_of_the_answer() -> None:
    same = dict.fromkeys(DecisionKind, False)
    assert not DecisionComparison(same, 0.0).changed
    assert all(DecisionComparison({**same, kind: True}, 0.0).changed for kind in DecisionKind)
