from __future__ import annotations

import pytest

from kedge.errors import ConfigError
from kedge.settings import AnchorSettings


@pytest.mark.parametrize(
    ("name", "value"),
    [("capacity", 0), ("top_k", -1), ("noise", 0.0), ("gamma", -0.1), ("max_bytes", 0), ("match_layer", -1),
     ("max_error", float("nan")), ("match_dim", "many"), ("min_anchors", True), ("temperature", None),
     ("estimator", "guess"), ("criterion", "hope")],
)  # fmt: skip
def test_a_bad_value_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        AnchorSettings(**{name: value})
    assert caught.value.key == f"engine.anchors.{name}"
    assert caught.value.value is value


def test_bounds_that_are_allowed() -> None:
    AnchorSettings(gamma=0, match_layer=0, max_error=float("inf"))


def test_an_unknown_estimator_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'token' or 'interpolate'"):
        AnchorSettings(estimator="guess")
    with pytest.raises(ConfigError, match="'error' or 'entropy'"):
        AnchorSettings(criterion="hope")
