"""The estimators and criteria by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from kedge.anchors.criteria import Criterion, Entropy, Error, Length, Leverage
from kedge.anchors.estimators import Estimator, Interpolate, Token, cosine, mean, nearest
from kedge.anchors.sites import CorrectedOffsets, LinearOffsets, MakeSlot, SiteOffsets
from kedge.settings import AnchorSettings

ESTIMATORS: Mapping[str, Callable[[AnchorSettings], Estimator]] = {
    "interpolate": lambda config: Interpolate(config.temperature),
    "nearest": lambda _: nearest(),
    "cosine": lambda config: cosine(config.temperature),
    "mean": lambda _: mean(),
    "linear": lambda config: Token(1, config.tau, config.temperature),  # for judging and counting; it blends no rows
    "token": lambda config: Token(config.top_k, config.tau, config.temperature),
    "linear+token": lambda config: Token(config.top_k, config.tau, config.temperature),
}
SLOTS: Mapping[str, Callable[[AnchorSettings], MakeSlot]] = {
    "linear": lambda config: partial(LinearOffsets, strength=config.ridge),
    "linear+token": lambda config: partial(CorrectedOffsets, strength=config.ridge, bits=config.offset_bits),
}
"""Sites of estimators that keep something else than the rows of their anchors."""
CRITERIA: Mapping[str, Callable[[AnchorSettings], Criterion]] = {
    "entropy": lambda config: Entropy(config.gamma, config.temperature),
    "error": lambda config: Error(config.min_anchors, config.max_error, config.weak_error),
    "length": lambda _: Length(),
    "leverage": lambda config: Leverage(config.min_anchors, config.max_leverage, config.weak_leverage),
}


def make_site_offsets(config: AnchorSettings) -> MakeSlot:
    """Return the function that makes the sites of the configured estimator."""
    if config.estimator in SLOTS:
        return SLOTS[config.estimator](config)
    return partial(SiteOffsets, bits=config.offset_bits)
