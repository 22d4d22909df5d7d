from __future__ import annotations

from typing import get_args

import pytest
import torch

from kedge.anchors.registry import CRITERIA, ESTIMATORS
from kedge.settings import AnchorSettings, estimator_settings
from kedge.settings.sections import CriterionName, EstimatorName
from tests.anchors.helpers import OPEN, SLOT, filled, sample


def test_every_name_of_the_settings_is_there() -> None:
    assert set(ESTIMATORS) == set(get_args(EstimatorName))
    assert set(CRITERIA) == set(get_args(CriterionName))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_every_pair_serves_a_store(estimator: str, criterion: str) -> None:
    store = filled(range(5), estimator=estimator, criterion=criterion, **OPEN)
    value = sample(50, tokens=9)
    estimate = store.estimate(SLOT, value)
    assert estimate.shareable, estimate.reason
    assert torch.isfinite(estimate.value_table.blend(estimate.value)).all()
    assert len(estimate.prefix_table.blend(estimate.prefix)) == 5
    store.check_integrity()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_has_its_criterion(estimator: str) -> None:
    named = estimator_settings(estimator)
    assert named["estimator"] == estimator
    assert named["criterion"] in CRITERIA
    assert (named["criterion"] == "entropy") is ESTIMATORS[estimator](AnchorSettings()).aligned
