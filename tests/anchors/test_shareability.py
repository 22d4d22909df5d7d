from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kedge.anchors.anchor import Anchor, AnchorId, KeyBlock, Query
from kedge.anchors.calibration import Calibration
from kedge.anchors.criteria import Entropy, Error, Verdict
from kedge.anchors.estimators import Interpolate, Match, Token

NONE = Calibration()


def at_distances(*distances: float, tokens: int = 1) -> Match:
    """A value of zeros, with one anchor at each distance from it."""
    keys = [torch.full((tokens, 1), d / tokens**0.5) for d in distances]
    block = KeyBlock([Anchor(AnchorId(i), (0,) * tokens, k) for i, k in enumerate(keys)])
    query = Query((0,) * tokens, torch.zeros(tokens, 1), 1e-3)
    return Match(query, block, None, Interpolate().propose(query, block, None))


def learned(distance: torch.Tensor, error: torch.Tensor, *prefix: float, times: int = 1) -> Calibration:
    calibration = NONE
    for _ in range(times):
        calibration = calibration.updated(distance, tuple(range(9, 9 + len(distance))), error, torch.tensor(prefix))
    return calibration


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
    criterion = Entropy(1e9)
    assert criterion.lacks(2, at_distances(1.0, 2.0).block, NONE) == "longer than every anchor"
    assert criterion.lacks(1, at_distances(0.0).block, NONE) == "only one anchor is as long"
    assert criterion.lacks(1, at_distances(0.0, 1.0).block, NONE) == ""


def test_error_needs_anchors_and_a_calibration() -> None:
    criterion, block = Error(3, 0.3, 0.6), at_distances(1, 2, 3).block
    assert criterion.lacks(1, at_distances(1, 2).block, NONE) == "2 anchors of 3"
    assert criterion.lacks(1, block, NONE) == "not calibrated yet"
    assert criterion.lacks(1, block, learned(torch.ones(1), torch.ones(1))) == ""


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
    doubted = Error(3, 0.3, 0.022).judge(case, calibration)
    assert doubted.weak.all() and not Error(3, 0.3, 0.05).judge(case, calibration).weak[:3].any(), "ids never seen"
    heavy, light = (Error(3, 0.3, 0.6).judge(replace(case, weight=weight), calibration) for weight in (40.0, 0.6))
    assert heavy.weak.all() and not light.weak.any()
    assert not Error(3, 0.2, 1.0).judge(case, calibration).shareable, "nothing of it is weak"
    assert not Error(3, 0.2, 0.001).judge(case, calibration).shareable, "all of it is weak"
