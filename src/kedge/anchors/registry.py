"""The estimators and criteria by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kedge.anchors.criteria import Criterion, Entropy, Error, Length
from kedge.anchors.estimators import Estimator, Interpolate, Token, cosine, mean, nearest
from kedge.settings import AnchorSettings

ESTIMATORS: Mapping[str, Callable[[AnchorSettings], Estimator]] = {
    "interpolate": lambda config: Interpolate(config.temperature),
    "nearest": lambda _: nearest(),
    "cosine": lambda config: cosine(config.temperature),
    "mean": lambda _: mean(),
    "token": lambda config: Token(config.top_k, config.noise, config.temperature),
}
CRITERIA: Mapping[str, Callable[[AnchorSettings], Criterion]] = {
    "entropy": lambda config: Entropy(config.gamma, config.temperature),
    "error": lambda config: Error(config.min_anchors, config.max_error, config.weak_error),
    "length": lambda _: Length(),
}
