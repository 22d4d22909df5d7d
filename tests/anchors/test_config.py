from __future__ import annotations

import pytest

from kedge.anchors.config import AnchorConfig
from kedge.anchors.registry import make_criterion, make_estimator
from kedge.anchors.store import AnchorStore
from kedge.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [("capacity", 0), ("top_k", -1), ("tau", 0.0), ("gamma", -0.1), ("max_bytes", 0), ("match_layer", -1),
     ("max_error", float("nan")), ("match_dim", "64"), ("min_anchors", True), ("temperature", None)],
)  # fmt: skip
def test_a_bad_number_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        AnchorConfig(**{name: value})
    assert caught.value.key == f"anchors.{name}"
    assert caught.value.value is value


def test_bounds_that_are_allowed() -> None:
    AnchorConfig(gamma=0, match_layer=0, max_error=float("inf"))


def test_an_unknown_estimator_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="anchors.estimator='guess': is none of cosine, interpolate, linear"):
        make_estimator(AnchorConfig(estimator="guess"))
    with pytest.raises(ConfigError, match="anchors.criterion='hope': is none of entropy, error, length, leverage"):
        make_criterion(AnchorConfig(criterion="hope"))
    with pytest.raises(ConfigError, match="guess"):
        AnchorStore(AnchorConfig(estimator="guess"))
