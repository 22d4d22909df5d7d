"""Two answers to one prompt: what counts as changed, and what is not a number."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.guard import DecisionKind
from kedge.reuse.guard.comparison import (
    MAX_KL,
    AnswerDecisions,
    DecisionComparison,
    WordingComparison,
    compare_decisions,
    compare_wording,
    divergence,
)
from kedge.types import TokenLogprob
from tests.reuse.guard.answers import answer, position

SURE = position({1: 0.9, 2: 0.1})
UNSURE = position({1: 0.52, 2: 0.48})
OTHER = position({2: 0.9, 1: 0.1})
NAN = TokenLogprob(1, math.nan, ((1, math.nan), (2, math.nan)))


def changed(*pairs: tuple[TokenLogprob, TokenLogprob], margin: float = 2.0, sampled: bool = False) -> bool:
    seen = compare_wording(answer(*(a for a, _ in pairs)), answer(*(b for _, b in pairs)), margin, sampled=sampled)
    assert seen is not None
    return seen.changed


def test_equal_answers_are_the_same() -> None:
    assert compare_wording(answer(SURE, UNSURE), answer(SURE, UNSURE), 2.0) == WordingComparison(False, None, 0.0)


def test_another_token_that_dense_prefill_clearly_does_not_prefer_is_a_change() -> None:
    seen = compare_wording(answer(SURE, SURE), answer(SURE, OTHER), 2.0)
    assert seen is not None and seen.changed and seen.at == 1 and seen.kl > 1


def test_two_tokens_as_good_as_equal_are_none() -> None:
    assert not changed((UNSURE, OTHER))
    assert changed((UNSURE, OTHER), margin=1.0)


def test_what_follows_a_parting_is_not_compared() -> None:
    assert not changed((UNSURE, OTHER), (SURE, OTHER))


def test_a_sampled_answer_is_compared_by_what_is_most_likely() -> None:
    """Whichever token was drawn, and no further than both drew the same."""
    unlucky = position({1: 0.9, 2: 0.1}, drawn=2)
    assert not changed((SURE, unlucky), (SURE, OTHER), sampled=True)
    assert changed((SURE, position({2: 0.9, 1: 0.1}, drawn=1)), sampled=True)


def test_a_grammar_that_allows_neither_most_likely_token_decides() -> None:
    """Under a grammar greedy decoding draws another token than the most likely one: the same one both times here."""
    assert not changed((position({1: 0.9, 7: 0.1}, drawn=7), position({2: 0.8, 7: 0.2}, drawn=7)))
    assert changed((position({1: 0.9, 7: 0.09, 8: 0.01}, drawn=7), position({1: 0.9, 8: 0.09, 7: 0.01}, drawn=8)))


def test_numbers_that_are_none_are_a_change_and_never_a_clean_check() -> None:
    assert compare_wording(answer(SURE), answer(NAN), 2.0) == WordingComparison(True, 0, MAX_KL)
    late = compare_wording(answer(SURE, SURE), answer(SURE, NAN), 2.0)
    assert late is not None and late.changed and (late.at, late.kl) == (1, MAX_KL)


def test_dense_prefill_without_numbers_shows_nothing() -> None:
    assert compare_wording(answer(NAN), answer(SURE), 2.0) is None


@pytest.mark.parametrize("dense, translated", [((), ()), ((SURE,), ()), ((), (SURE,))])
def test_without_positions_there_is_no_comparison(dense: tuple[()], translated: tuple[()]) -> None:
    assert compare_wording(answer(*dense), answer(*translated), 2.0) is None


def test_tokens_that_cannot_be_drawn_have_no_weight() -> None:
    assert divergence(position({1: 1.0, 2: 0.0}), position({1: 1.0, 2: 0.0})) == 0.0
    assert divergence(position({1: 1.0}), position({2: 1.0, 1: 0.0})) == pytest.approx(MAX_KL, rel=0.1)


@given(st.lists(st.floats(1e-6, 1), min_size=3, max_size=20), st.lists(st.floats(1e-6, 1), min_size=3, max_size=20))
def test_the_divergence_is_that_of_the_distributions(p: list[float], q: list[float]) -> None:
    """With all tokens among the most likely ones, up to what floors leave."""
    size = min(len(p), len(q))
    p = [one / sum(p[:size]) for one in p[:size]]
    q = [one / sum(q[:size]) for one in q[:size]]
    exact = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    found = divergence(position(dict(enumerate(p))), position(dict(enumerate(q))))
    assert found == pytest.approx(exact, abs=1e-5) and 0 <= found <= MAX_KL + 1e-6


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


def test_only_other_words_with_the_same_pick_are_no_other_decision() -> None:
    wording, call, pick = DecisionKind.WORDING, DecisionKind.CALL, DecisionKind.PICK
    assert DecisionComparison({wording: True, call: False}, 0.0).changed
    assert not DecisionComparison({wording: True, call: False, pick: False}, 0.0).changed
    assert DecisionComparison({wording: False, call: True, pick: False}, 0.0).changed
    assert DecisionComparison({wording: False, call: False, pick: True}, 0.0).changed
    assert not DecisionComparison({wording: False, call: False}, 0.0).changed
