"""The estimators and criteria by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kedge.anchors.criteria import Criterion, Entropy, Error
from kedge.anchors.estimators import Estimator, Interpolate, Token
from kedge.settings import AnchorSettings

ESTIMATORS: Mapping[str, Callable[[AnchorSettings], Estimator]] = {
    "interpolate": lambda config: Interpolate(config.temperature),
    "token": lambda config: Token(config.top_k, config.noise, config.temperature),
}
CRITERIA: Mapping[str, Callable[[AnchorSettings], Criterion]] = {
    "entropy": lambda config: Entropy(config.gamma, config.temperature),
    "error": lambda config: Error(config.min_anchors, config.max_error, config.weak_error),
}
