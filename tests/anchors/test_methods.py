"""The estimators and their criteria: every name of the settings serves a store."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from kedge.anchors.criteria import Entropy, Error
from kedge.anchors.store import methods
from kedge.settings import AnchorSettings
from kedge.settings.sections import EstimatorName
from tests.anchors.helpers import OPEN, SLOT, filled, sample


@pytest.mark.parametrize("estimator", get_args(EstimatorName))
def test_every_estimator_serves_a_store(estimator: str) -> None:
    store = filled(range(5), estimator=estimator, **OPEN)
    estimate = store.estimate(SLOT, sample(50, tokens=9))
    assert estimate.shareable, estimate.reason
    assert torch.isfinite(estimate.value_table.blend(estimate.value)).all()
    assert len(estimate.prefix_table.blend(estimate.prefix)) == 5
    store.check_integrity()


def test_the_papers_estimator_has_the_papers_criterion_and_each_its_own_limit() -> None:
    assert methods(AnchorSettings(estimator="interpolate"))[1] == Entropy(0.3)
    assert methods(AnchorSettings(estimator="interpolate", max_error=0.5))[1] == Entropy(0.5)
    assert methods(AnchorSettings())[1] == Error(4, 0.35, 0.1)
    assert methods(AnchorSettings(max_error=9, weak_error=2, min_anchors=1))[1] == Error(1, 9, 2)
