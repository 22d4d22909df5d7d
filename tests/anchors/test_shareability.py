from __future__ import annotations

import pytest
import torch

from kedge.anchors.anchor import Anchor, AnchorId, Query
from kedge.anchors.estimators import Interpolate, Match, Token
from kedge.anchors.keys import KeyBlock
from kedge.anchors.shareability import Calibration, Entropy, Error, Verdict

NONE = Calibration()


def at_distances(*distances: float, tokens: int = 1) -> Match:
    """A value of zeros, with one anchor at each distance from it."""
    keys = [torch.full((tokens, 1), d / tokens**0.5) for d in distances]
    block = KeyBlock([Anchor(AnchorId(i), (0,) * tokens, k) for i, k in enumerate(keys)])
    query = Query((0,) * tokens, torch.zeros(tokens, 1), 1e-3)
    return Match(query, block, None, Interpolate(10.0).propose(query, block, None))


def entropy_verdict(match: Match) -> Verdict:
    return Entropy(0.3, 10.0).judge(match, NONE)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("tokens", [1, 300])
def test_entropy_means_the_same_at_any_scale_and_length(scale: float, tokens: int) -> None:
    far = entropy_verdict(at_distances(*(scale * d for d in (960, 950, 958)), tokens=tokens))
    near = entropy_verdict(at_distances(*(scale * d for d in (960, 100, 958)), tokens=tokens))
    assert not far.shareable
    assert far.reason == "entropy is 1.00 of its maximum, above 0.3"
    assert near.shareable
    assert not near.weak.any()


def test_entropy_never_shares_from_one_anchor_or_from_shorter_ones() -> None:
    criterion = Entropy(1e9, 10.0)
    assert criterion.lacks(2, at_distances(1.0, 2.0).block, NONE) == "longer than every anchor"
    assert criterion.lacks(1, at_distances(0.0).block, NONE) == "only one anchor is as long"
    assert criterion.lacks(1, at_distances(0.0, 1.0).block, NONE) == ""


def test_error_needs_anchors_and_a_calibration() -> None:
    criterion, block = Error(3, 0.3, 0.6), at_distances(1, 2, 3).block
    assert criterion.lacks(1, at_distances(1, 2).block, NONE) == "2 anchors of 3"
    assert criterion.lacks(1, block, NONE) == "not calibrated yet"
    assert criterion.lacks(1, block, NONE.updated(torch.ones(1), torch.ones(1))) == ""


def test_calibration_learns_the_error_at_each_distance() -> None:
    distance = torch.logspace(-2.2, 0.2, 400)
    calibration = NONE.updated(distance, distance / 2)
    assert NONE.observations == 0
    assert calibration.observations == 1
    predicted = calibration.predict(distance)
    assert (predicted.diff() >= 0).all()
    assert ((predicted - distance / 2).abs() <= 0.35 * distance / 2 + 0.01).all()


def test_calibration_is_monotone_and_looks_upwards_where_it_knows_nothing() -> None:
    noisy = NONE.updated(torch.tensor([0.02] * 10 + [0.1] * 30), torch.tensor([0.5] * 10 + [0.1] * 30))
    assert noisy.predict(torch.tensor([0.02, 0.1])).tolist() == pytest.approx([0.2, 0.2])
    assert noisy.predict(torch.tensor([0.0, 0.05])).tolist() == pytest.approx([0.2, 0.2])
    assert noisy.predict(torch.tensor([0.9, 7.0])).tolist() == [1.0, 1.0]
    assert NONE.predict(torch.tensor([0.0])).tolist() == [1.0]


def test_calibration_forgets() -> None:
    calibration = NONE.updated(torch.full((10,), 0.1), torch.full((10,), 0.9))
    for _ in range(40):
        calibration = calibration.updated(torch.full((10,), 0.1), torch.full((10,), 0.1))
    assert float(calibration.predict(torch.tensor([0.1]))) < 0.11


def test_error_marks_weak_tokens_and_refuses_a_bad_mean() -> None:
    known = torch.cat([torch.full((50,), d) for d in (0.02, 0.9)])
    calibration = NONE.updated(known, known)
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
    bad = Error(3, 0.2, 0.6).judge(case, calibration)
    assert bad.reason == "predicted error is 0.24, above 0.2"
