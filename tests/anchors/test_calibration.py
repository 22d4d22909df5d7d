"""How large the error of an estimate will be: by distance, by token id, and by place in the prefix segment."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kedge.anchors.calibration import Calibration, TokenErrors
from kedge.errors import TranslationRefused

NONE = Calibration()
NO_PREFIX = torch.zeros(0)
NEVER_SEEN = 10**6
"""The first of the token ids that no observation has"""


def learned(distance: Tensor, error: Tensor, before: Calibration = NONE, prefix: Tensor = NO_PREFIX) -> Calibration:
    """One more observation, of a value without a token that comes twice."""
    return before.updated(distance, tuple(range(len(distance))), error, prefix)


def predicted(calibration: Calibration, distance: Tensor, first: int = NEVER_SEEN) -> Tensor:
    return calibration.predict(distance, tuple(range(first, first + len(distance))))


def test_it_learns_the_error_at_each_distance() -> None:
    distance = torch.logspace(-2.2, 0.2, 400)
    calibration = learned(distance, distance / 2)
    assert NONE.observations == 0
    assert calibration.observations == 1
    errors = predicted(calibration, distance)
    assert (errors.diff() >= 0).all()
    assert ((errors - distance / 2).abs() <= 0.35 * distance / 2 + 0.01).all()


def test_a_token_that_was_worse_than_predicted_is_expected_to_be_again() -> None:
    errors = TokenErrors({7: (0.9, 0.35), 8: (0.1, 0.3)})
    wanted = torch.tensor([1.1 / 0.55, 1.0, 0.3 / 0.5, 1.1 / 0.55])
    torch.testing.assert_close(errors.factors([7, 9, 8, 7]), wanted)


def test_a_token_that_was_hardly_seen_is_reckoned_to_be_worse() -> None:
    """In "skip the first 8 numbers" the last word sums up the step: of its id the lookup knew those of other steps."""
    near = torch.full((10,), 0.05)
    once = learned(near, torch.full((10,), 0.1))
    known, unknown = ((0,), (NEVER_SEEN,))
    assert once.predict_worst(near[:1], unknown).tolist() == pytest.approx([0.125])
    assert once.predict(near[:1], unknown).tolist() == pytest.approx([0.1])
    assert once.predict_worst(near[:1], known).tolist() == pytest.approx([0.1 * (0.1 + 0.25) / (0.1 + 0.2)])
    often = once
    for _ in range(40):
        often = learned(near, torch.full((10,), 0.1), often)
    assert 0.1 < float(often.predict_worst(near[:1], known)) < 0.11
    assert float(often.predict_worst(torch.tensor([0.9]), unknown)) == 1.0, "no more than without any offset"
    bad = learned(near, torch.full((10,), 1.6))
    assert bad.predict_worst(near[:1], known).tolist() == bad.predict(near[:1], known).tolist() == pytest.approx([1.6])


def test_it_is_monotone_and_looks_upwards_where_it_knows_nothing() -> None:
    noisy = learned(torch.tensor([0.02] * 10 + [0.1] * 30), torch.tensor([0.5] * 10 + [0.1] * 30))
    assert predicted(noisy, torch.tensor([0.02, 0.1])).tolist() == pytest.approx([0.2, 0.2])
    assert predicted(noisy, torch.tensor([0.0, 0.05])).tolist() == pytest.approx([0.2, 0.2])
    assert predicted(noisy, torch.tensor([0.9, 7.0])).tolist() == [1.0, 1.0]
    assert predicted(NONE, torch.tensor([0.0])).tolist() == [1.0]


def test_it_forgets() -> None:
    calibration = learned(torch.full((10,), 0.1), torch.full((10,), 0.9))
    for _ in range(40):
        calibration = learned(torch.full((10,), 0.1), torch.full((10,), 0.1), calibration)
    assert float(predicted(calibration, torch.tensor([0.1]))) < 0.11


def test_a_token_that_is_often_wrong_is_expected_to_be_wrong() -> None:
    """Line breaks sum up what was said: as near as other tokens, and further off."""
    calibration, near = NONE, torch.full((10,), 0.05)
    error = torch.tensor([0.1] * 9 + [0.8])
    for _ in range(8):
        calibration = learned(near, error, calibration)
    told = predicted(calibration, near, first=0)
    assert ((told - error).abs() < 0.25 * error).all()
    assert predicted(calibration, near[:1]).tolist() == pytest.approx([0.17]), "a new token is like all together"


def test_a_token_id_is_forgotten_once_it_does_not_come_any_more() -> None:
    calibration = learned(torch.full((2,), 0.05), torch.tensor([0.1, 0.9]))
    for _ in range(400):
        calibration = learned(torch.full((1,), 0.05), torch.full((1,), 0.1), calibration)
    assert set(calibration.token_errors.sums) == {0}


def test_every_token_of_the_prefix_segment_has_an_error_of_its_own() -> None:
    one, two = torch.tensor([0.1, 0.7, 0.2]), torch.tensor([0.3, 0.5, 0.0])
    once = learned(torch.ones(1), torch.ones(1), prefix=one)
    assert once.prefix_error.tolist() == pytest.approx(one.tolist())
    twice = learned(torch.ones(1), torch.ones(1), once, prefix=two)
    assert twice.prefix_error.tolist() == pytest.approx(((0.9 * one + two) / 1.9).tolist())


@pytest.mark.parametrize("bad", ["value", "prefix"])
def test_what_is_not_finite_is_refused(bad: str) -> None:
    error, prefix = torch.tensor([0.1]), torch.tensor([0.1])
    (error if bad == "value" else prefix)[0] = torch.nan
    with pytest.raises(TranslationRefused):
        learned(torch.ones(1), error, prefix=prefix)


errors = st.lists(st.floats(0, 2, width=32), min_size=1, max_size=5)


@given(st.lists(st.tuples(errors, errors), max_size=4), st.integers(0, 3))
def test_it_comes_back_from_its_tensors(observed: list[tuple[list[float], list[float]]], prefix: int) -> None:
    calibration = NONE
    for distance, error in observed:
        size = min(len(distance), len(error))
        pair = torch.tensor(distance[:size]), torch.tensor(error[:size])
        calibration = learned(*pair, calibration, torch.full((prefix,), 0.5))
    again = Calibration.restored(calibration.tensors, calibration.observations)
    asked = torch.linspace(0, 2, 9)
    assert torch.equal(predicted(again, asked, first=0), predicted(calibration, asked, first=0))
    assert again.tensors.keys() == calibration.tensors.keys()
    assert all(torch.equal(one, calibration.tensors[part]) for part, one in again.tensors.items())
