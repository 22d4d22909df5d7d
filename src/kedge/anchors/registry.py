"""The estimators and criteria by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from kedge.anchors.config import AnchorConfig
from kedge.anchors.criteria.leverage import Length, Leverage
from kedge.anchors.criteria.shareability import Criterion, Entropy, Error
from kedge.anchors.estimators.aligned import cosine, mean, nearest
from kedge.anchors.estimators.blending import Estimator, Interpolate, Token
from kedge.anchors.estimators.linear import CorrectedOffsets, LinearOffsets
from kedge.anchors.estimators.site import MakeSlot, SlotOffsets
from kedge.errors import ConfigError

ESTIMATORS: Mapping[str, Callable[[AnchorConfig], Estimator]] = {
    "interpolate": lambda config: Interpolate(config.temperature),
    "nearest": lambda _: nearest(),
    "cosine": lambda config: cosine(config.temperature),
    "mean": lambda _: mean(),
    "linear": lambda config: Token(1, config.tau, config.temperature),  # for judging and counting; it blends no rows
    "token": lambda config: Token(config.top_k, config.tau, config.temperature),
    "linear+token": lambda config: Token(config.top_k, config.tau, config.temperature),
}
SLOTS: Mapping[str, Callable[[AnchorConfig], MakeSlot]] = {
    "linear": lambda config: partial(LinearOffsets, strength=config.ridge),
    "linear+token": lambda config: partial(CorrectedOffsets, strength=config.ridge, bits=config.offset_bits),
}
"""What a slot keeps, where that is something else than the rows of its anchors"""
CRITERIA: Mapping[str, Callable[[AnchorConfig], Criterion]] = {
    "entropy": lambda config: Entropy(config.gamma, config.temperature),
    "error": lambda config: Error(config.min_anchors, config.max_error, config.weak_error),
    "length": lambda _: Length(),
    "leverage": lambda config: Leverage(config.min_anchors, config.max_leverage, config.weak_leverage),
}


def make_estimator(config: AnchorConfig) -> Estimator:
    """Return the estimator that the settings name. Raises `ConfigError` for a name that nobody has."""
    if config.estimator not in ESTIMATORS:
        raise ConfigError("anchors.estimator", config.estimator, f"is none of {', '.join(sorted(ESTIMATORS))}")
    return ESTIMATORS[config.estimator](config)


def make_slot(config: AnchorConfig) -> MakeSlot:
    """How slots of the estimator that the settings name begin."""
    if config.estimator in SLOTS:
        return SLOTS[config.estimator](config)
    return partial(SlotOffsets, bits=config.offset_bits)


def make_criterion(config: AnchorConfig) -> Criterion:
    """Return the criterion that the settings name. Raises `ConfigError` for a name that nobody has."""
    if config.criterion not in CRITERIA:
        raise ConfigError("anchors.criterion", config.criterion, f"is none of {', '.join(sorted(CRITERIA))}")
    return CRITERIA[config.criterion](config)
