"""The settings of anchors."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kedge.errors import ConfigError

_OPTIONAL = frozenset({"match_layer"})
_TEXT = frozenset({"estimator", "criterion"})


@dataclass(frozen=True, slots=True)
class AnchorConfig:
    """How anchors are kept, matched and judged. Raises `ConfigError` for a number out of its range.

    The names of estimator and criterion are checked where they are looked up (`make_estimator`, `make_criterion`).
    """

    estimator: str = "token"
    """`token`, `interpolate` (KVCOMM, Eq. 6 and 7), or another of `kedge.anchors.registry.ESTIMATORS`"""
    criterion: str = "error"
    """`error` (predicted relative error), `entropy` (KVCOMM, Eq. 5), `length` or `leverage`"""
    capacity: int = 20
    """Anchors per pool (the paper's V)"""
    gamma: float = 0.3
    """Entropy over log of the number of anchors, above which a value is not shareable (Eq. 5)"""
    temperature: float = 10.0
    """Sharpness of an anchor's weight: softmax(-temperature · d / mean d)"""
    tau: float = 0.05
    """Softness of a token's weight: softmax(-d² / (tau · mean d²))"""
    top_k: int = 4
    """Anchor tokens that a token's offset is blended from"""
    match_layer: int | None = None
    """Layer whose base KV is compared; None is max(1, layers // 3)"""
    match_dim: int = 32
    """Dimensions that base KV is projected to before it is compared"""
    offset_bits: int = 16
    """Of every number of an offset that is kept: 16, or 8 with a scale for each head (not those of `linear`)"""
    ridge: float = 0.005
    """How much `linear` holds its weights down, in units of the mean square of base KV"""
    max_error: float = 0.35
    """Mean predicted relative error of a value's offsets, up to which it is shareable"""
    weak_error: float = 0.15
    """Predicted relative error, above which a single token is to be computed"""
    max_leverage: float = 2.0
    """Mean leverage of a value's tokens, in units of the anchors' own mean, up to which `leverage` shares it"""
    weak_leverage: float = 6.0
    """Leverage in the same units, above which a single token is to be computed"""
    min_anchors: int = 4
    """Anchors with the agent's offsets, below which `error` and `leverage` share nothing"""
    max_bytes: int = 2 << 30
    """Memory of all pools together"""
    max_pools: int = 256
    """Pools at once; the one that was used longest ago goes first"""
    max_slots: int = 64
    """Slots per pool; the one that was used longest ago goes first"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in _TEXT and not (value is None and field.name in _OPTIONAL):
                self._check(field.name, value)
        if self.offset_bits not in (8, 16):
            raise ConfigError("anchors.offset_bits", self.offset_bits, "is neither 8 nor 16")

    def _check(self, name: str, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"anchors.{name}", value, "is not a number")
        if not value >= 0 or (value == 0 and name not in {"gamma", "match_layer"}):
            raise ConfigError(f"anchors.{name}", value, "is too small")
