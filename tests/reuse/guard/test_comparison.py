"""Two answers to one prompt: what counts as changed, and what is not a number."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.reuse.guard.comparison import MAX_KL, DecisionComparison, compare, divergence
from kedge.types import TokenLogprob
from tests.reuse.guard.answers import answer, position

SURE = position({1: 0.9, 2: 0.1})
UNSURE = position({1: 0.52, 2: 0.48})
OTHER = position({2: 0.9, 1: 0.1})
NAN = TokenLogprob(1, math.nan, ((1, math.nan), (2, math.nan)))


def changed(*pairs: tuple[TokenLogprob, TokenLogprob], margin: float = 2.0, sampled: bool = False) -> bool:
    seen = compare(answer(*(a for a, _ in pairs)), answer(*(b for _, b in pairs)), margin, sampled=sampled)
    assert seen is not None
    return seen.changed


def test_equal_answers_are_the_same() -> None:
    assert compare(answer(SURE, UNSURE), answer(SURE, UNSURE), 2.0) == DecisionComparison(False, None, 0.0, 0.0)


def test_another_token_that_dense_prefill_clearly_does_not_prefer_is_a_change() -> None:
    seen = compare(answer(SURE, SURE), answer(SURE, OTHER), 2.0)
    assert seen is not None and seen.changed and seen.at == 1 and seen.first_kl == 0.0 and seen.kl > 1


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
    assert compare(answer(SURE), answer(NAN), 2.0) == DecisionComparison(True, 0, MAX_KL, MAX_KL)
    late = compare(answer(SURE, SURE), answer(SURE, NAN), 2.0)
    assert late is not None and late.changed and late.first_kl == 0.0


def test_dense_prefill_without_numbers_shows_nothing() -> None:
    assert compare(answer(NAN), answer(SURE), 2.0) is None


@pytest.mark.parametrize("dense, translated", [((), ()), ((SURE,), ()), ((), (SURE,))])
def test_without_positions_there_is_no_comparison(dense: tuple[()], translated: tuple[()]) -> None:
    assert compare(answer(*dense), answer(*translated), 2.0) is None


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
