"""The figures of batches on two engines that take turns."""

from __future__ import annotations

import pytest

from kedge.bench.plain.idle import IdleResult
from kedge.bench.plain.measure import PlainResult


def test_pairs_are_compared_and_their_spread_is_reported() -> None:
    idle = IdleResult(stock=(1.0, 2.0, 4.0, 3.0, 1.0), kedge=(2.0, 2.0, 2.0, 4.0, 1.25))
    assert idle.ratios == [0.5, 1.0, 2.0, 0.75, 0.8]
    assert idle.share == 0.8 and idle.quartiles == (0.75, 1.0)
    assert PlainResult(idle=idle).as_json() == {
        "cost": {"idle_share": 0.8, "idle_quartiles": [0.75, 1.0], "idle_pairs": 5}
    }


def test_seconds_of_one_engine_without_the_others_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        _ = IdleResult(stock=(1.0, 2.0), kedge=(1.0,)).ratios
