"""Confidence bounds of a share: against an oracle, and valid whenever they are looked at."""

from __future__ import annotations

from math import comb, exp, log

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.reuse.guard.record import CHANGED, SAME, ChangeEvidence

ALPHA, SHARE = 0.05, 0.02
counts = st.integers(0, 400).flatmap(lambda checks: st.tuples(st.just(checks), st.integers(0, checks)))


def mixture_by_sum(checks: int, changed: int) -> float:
    """The mixture's probability of one such sequence: the Beta integral, by numerical integration."""
    grid = (numpy.arange(400_000) + 0.5) / 400_000
    prior = grid ** (CHANGED - 1) * (1 - grid) ** (SAME - 1)
    return float((prior * grid**changed * (1 - grid) ** (checks - changed)).sum() / prior.sum())


@pytest.mark.parametrize("checks, changed", [(0, 0), (1, 0), (1, 1), (10, 2), (200, 0), (200, 9)])
def test_the_e_value_is_the_mixture_over_the_likelihood(checks: int, changed: int) -> None:
    expected = log(mixture_by_sum(checks, changed)) - changed * log(SHARE) - (checks - changed) * log(1 - SHARE)
    assert ChangeEvidence(checks, changed).log_e_value(SHARE) == pytest.approx(expected, abs=2e-2)


@pytest.mark.parametrize("checks", [0, 1, 5, 30])
def test_an_e_value_is_expected_to_be_one(checks: int) -> None:
    """At every number of checks: it is a martingale under the share that it tests."""
    likelihood = [comb(checks, k) * SHARE**k * (1 - SHARE) ** (checks - k) for k in range(checks + 1)]
    values = [exp(ChangeEvidence(checks, k).log_e_value(SHARE)) for k in range(checks + 1)]
    assert sum(p * e for p, e in zip(likelihood, values, strict=True)) == pytest.approx(1.0)


@pytest.mark.parametrize("share", [0.005, 0.02, 0.1, 0.4])
def test_the_bound_holds_the_true_share_at_all_times_at_once(share: float) -> None:
    """Ville: of many sequences that are looked at after every check, at most alpha ever leave it out."""
    rng, sequences, missed = numpy.random.default_rng(0), 300, 0
    for _ in range(sequences):
        seen = ChangeEvidence()
        draws = rng.random(300) < share
        missed += any(seen.observe(bool(one)) or seen.is_below(share, ALPHA) for one in draws)
    assert missed <= ALPHA * sequences * 1.6  # three standard deviations


@given(counts)
def test_the_bound_is_where_the_test_turns(seen: tuple[int, int]) -> None:
    evidence = ChangeEvidence(*seen)
    upper = evidence.upper(ALPHA)
    assert evidence.share <= upper <= 1
    if upper < 1:
        assert evidence.is_below(min(1 - 1e-12, upper * (1 + 1e-6)), ALPHA)
        assert not evidence.is_below(upper * (1 - 1e-6), ALPHA)


@given(counts)
def test_more_changes_raise_the_bound_and_more_confidence_too(seen: tuple[int, int]) -> None:
    checks, changed = seen
    upper = ChangeEvidence(checks, changed).upper(ALPHA)
    assert ChangeEvidence(checks + 1, changed + 1).upper(ALPHA) >= upper - 1e-9
    assert ChangeEvidence(checks + 1, changed).upper(ALPHA) <= upper + 1e-9
    assert ChangeEvidence(checks, changed).upper(ALPHA / 10) >= upper - 1e-9


@given(counts, st.floats(1e-6, 1 - 1e-6), st.floats(1e-12, 0.5))
def test_a_share_is_never_both_above_and_below(seen: tuple[int, int], share: float, alpha: float) -> None:
    evidence = ChangeEvidence(*seen)
    assert not (evidence.exceeds(share, alpha) and evidence.is_below(share, alpha))


def test_nothing_seen_is_nothing_known() -> None:
    nothing = ChangeEvidence()
    assert (nothing.share, nothing.upper(ALPHA)) == (0.0, 1.0)
    assert not nothing.exceeds(SHARE, ALPHA) and not nothing.is_below(SHARE, ALPHA)


def test_how_many_clean_checks_it_takes() -> None:
    needed = next(n for n in range(1000) if ChangeEvidence(n, 0).is_below(SHARE, ALPHA))
    assert 150 < needed < 300
