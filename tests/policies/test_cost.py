from __future__ import annotations

import pytest

from kedge.policies.prefetch import CostModel, UnitCost


def test_an_estimate_follows_what_is_observed() -> None:
    estimate = UnitCost()
    assert estimate.seconds_per_unit is None
    estimate.observe(10, 1.0)
    assert estimate.seconds_per_unit == 0.1
    for _ in range(50):
        estimate.observe(10, 3.0)
    assert estimate.seconds_per_unit == pytest.approx(0.3, rel=1e-3)


@pytest.mark.parametrize(("units", "seconds"), [(0, 1.0), (5, 0.0), (5, -1.0)])
def test_nothing_is_learned_from_nothing(units: int, seconds: float) -> None:
    estimate = UnitCost()
    estimate.observe(units, seconds)
    assert estimate.seconds_per_unit is None


def test_a_load_pays_while_it_beats_computing_with_all_that_is_ahead() -> None:
    cost = CostModel()
    assert cost.load_pays(1, 16)
    cost.load.observe(10, 1.0)
    assert cost.load_pays(1000, 16), "computing has never been measured"
    cost.compute.observe(100, 1.0)
    assert cost.load_pays(blocks=4, tokens=64)
    assert not cost.load_pays(blocks=4, tokens=64, blocks_ahead=3)
    assert not cost.load_pays(blocks=4, tokens=40), "as much is not less"
