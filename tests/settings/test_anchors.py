from __future__ import annotations

from typing import get_args

import pytest

from kedge.errors import ConfigError
from kedge.settings import AnchorSettings
from kedge.settings.sections import EstimatorName


@pytest.mark.parametrize(
    ("name", "value"),
    [("capacity", 0), ("weak_error", 0.0), ("max_error", -0.1), ("max_bytes", 0), ("max_error", float("nan")),
     ("capacity", "many"), ("min_anchors", True), ("weak_error", None), ("estimator", "guess")],
)  # fmt: skip
def test_a_bad_value_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        AnchorSettings(**{name: value})
    assert caught.value.key == f"engine.anchors.{name}"
    assert caught.value.value is value


def test_bounds_that_are_allowed() -> None:
    AnchorSettings(max_error=0)
    AnchorSettings(max_error=float("inf"))


def test_an_unknown_estimator_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        AnchorSettings(estimator="guess")
    assert all(f"'{name}'" in str(caught.value) for name in get_args(EstimatorName))
