"""The estimators and their criteria: every name of the settings serves a store."""

from __future__ import annotations

from kedge.anchors.criteria import Entropy, Error
from kedge.anchors.store import methods
from kedge.settings import AnchorSettings


def test_the_papers_estimator_has_the_papers_criterion_and_each_its_own_limit() -> None:
    assert methods(AnchorSettings(estimator="interpolate"))[1] == Entropy(0.3)
    assert methods(AnchorSettings(estimator="interpolate", max_error=0.5))[1] == Entropy(0.5)
    assert methods(AnchorSettings())[1] == Error(4, 0.35, 0.1)
    assert methods(AnchorSettings(max_error=9, weak_error=2, min_anchors=1))[1] == Error(1, 9, 2)
