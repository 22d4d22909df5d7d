from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kedge.anchors.anchor import Anchor, KeyBlock, Query
from kedge.anchors.calibration import Calibration
from kedge.anchors.criteria import Entropy, Error, Verdict
from kedge.anchors.estimators import Interpolate, Match, Token

NONE = Calibration()
NO_PREFIX = torch.zeros(0)


def at_distances(*distances: float, tokens: int = 1) -> Match:
    """A value of zeros, with one anchor at each distance from it."""
    keys = [torch.full((tokens, 1), d / tokens**0.5) for d in distances]
    block = KeyBlock([Anchor(i, (0,) * tokens, k) for i, k in enumerate(keys)])
    query = Query((0,) * tokens, torch.zeros(tokens, 1), 1e-3)
    return Match(query, block, None, Interpolate(10.0).propose(query, block, None))


def learned(
    distance: Tensor, error: Tensor, before: Calibration = NONE, prefix: Tensor = NO_PREFIX, times: int = 1
) -> Calibration:
    for _ in range(times):
        before = before.updated(distance, error, prefix)
    return before


def entropy_verdict(match: Match) -> Verdict:
    return Entropy(0.3).judge(match, NONE)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("tokens", [1, 300])
def test_entropy_means_the_same_at_any_scale_and_length(scale: float, tokens: int) -> None:
    far = entropy_verdict(at_distances(*(scale * d for d in (960, 950, 958)), tokens=tokens))
    near = entropy_verdict(at_distances(*(scale * d for d in (960, 100, 958)), tokens=tokens))
    assert not far.shareable
    assert far.reason == "entropy is 1.00 of its maximum, above 0.3"
    assert near.shareable
    assert not near.weak.any()
    criterion = Entropy(1e9)
    assert criterion.lacks(1, at_distances(0.0).block, NONE) == "only one anchor is as long"
    assert criterion.lacks(1, at_distances(0.0, 1.0).block, NONE) == "", "from one anchor it is nothing"


def test_error_marks_weak_tokens_and_refuses_a_bad_mean() -> None:
    known = torch.cat([torch.full((50,), d) for d in (0.02, 0.9)])
    calibration = learned(known, known)
    match = at_distances(1, 2, 3)
    distance = torch.tensor([0.02, 0.02, 0.02, 0.9])
    proposal = Token(1, 0.05, 10.0).propose(match.query, match.block, None)
    case = Match(
        match.query,
        match.block,
        None,
        type(proposal)(proposal.columns, proposal.weights, distance, proposal.mass, proposal.after),
    )
    fine = Error(3, 0.3, 0.6).judge(case, calibration)
    assert fine.shareable
    assert fine.weak.tolist() == [False, False, False, True]
    bad = Error(3, 0.2, 0.6).judge(case, learned(known, known, times=5))
    assert bad.reason == "predicted error is 0.24, above 0.2"
    calibration = learned(known, known, times=6)
    learned_enough = Error(3, 0.2, 0.6).judge(case, calibration)
    assert learned_enough.shareable, "and what is weak is computed"
    assert learned_enough.weak.tolist() == bad.weak.tolist()
    assert not Error(3, 0.01, 0.6).judge(case, calibration).shareable
    heavy, light = (Error(3, 0.3, 0.6).judge(replace(case, weight=weight), calibration) for weight in (40.0, 0.6))
    assert heavy.weak.all() and not light.weak.any()
    assert not Error(3, 0.2, 1.0).judge(case, calibration).shareable, "nothing of it is weak"
    assert not Error(3, 0.2, 0.001).judge(case, calibration).shareable, "all of it is weak"


# calibration: how large an error will be, by distance, and by place in the prefix segment -----------------------------


def test_it_learns_the_error_at_each_distance() -> None:
    distance = torch.logspace(-2.2, 0.2, 400)
    calibration = learned(distance, distance / 2)
    assert (NONE.observations, calibration.observations) == (0, 1)
    errors = calibration.predict(distance)
    assert (errors.diff() >= 0).all()
    assert ((errors - distance / 2).abs() <= 0.35 * distance / 2 + 0.01).all()


def test_it_is_monotone_and_looks_upwards_where_it_knows_nothing() -> None:
    noisy = learned(torch.tensor([0.02] * 10 + [0.1] * 30), torch.tensor([0.5] * 10 + [0.1] * 30))
    assert noisy.predict(torch.tensor([0.02, 0.1])).tolist() == pytest.approx([0.2, 0.2])
    assert noisy.predict(torch.tensor([0.0, 0.05])).tolist() == pytest.approx([0.2, 0.2])
    assert noisy.predict(torch.tensor([0.9, 7.0])).tolist() == [1.0, 1.0]
    assert NONE.predict(torch.tensor([0.0])).tolist() == [1.0]


def test_it_forgets() -> None:
    calibration = learned(torch.full((10,), 0.1), torch.full((10,), 0.9))
    for _ in range(40):
        calibration = learned(torch.full((10,), 0.1), torch.full((10,), 0.1), calibration)
    assert float(calibration.predict(torch.tensor([0.1]))) < 0.11


def test_every_token_of_the_prefix_segment_has_an_error_of_its_own() -> None:
    one, two = torch.tensor([0.1, 0.7, 0.2]), torch.tensor([0.3, 0.5, 0.0])
    once = learned(torch.ones(1), torch.ones(1), prefix=one)
    assert once.prefix_error.tolist() == pytest.approx(one.tolist())
    twice = learned(torch.ones(1), torch.ones(1), once, prefix=two)
    assert twice.prefix_error.tolist() == pytest.approx(((0.9 * one + two) / 1.9).tolist())


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
    assert torch.equal(again.predict(asked), calibration.predict(asked))
    assert again.tensors.keys() == calibration.tensors.keys()
    assert all(torch.equal(one, calibration.tensors[part]) for part, one in again.tensors.items())
