"""The section `[engine.anchors]`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from kedge.settings.section import Bytes, BytesOrNone, SettingsSection

EstimatorName = Literal["token", "interpolate", "nearest", "cosine", "mean", "linear", "linear+token"]
CriterionName = Literal["error", "entropy", "length", "leverage"]


class AnchorSettings(SettingsSection):
    """How anchors are kept, matched and judged."""

    section = "engine.anchors"

    estimator: EstimatorName = "token"
    """How offsets are estimated: `token` looks up single tokens, `interpolate` blends whole anchors (KVCOMM, Eq. 6
    and 7); the others are for comparison."""
    criterion: CriterionName = "error"
    """What makes a value shareable: `error` is the predicted relative error of its offsets, `entropy` is KVCOMM's
    Eq. 5, `length` needs only long anchors, `leverage` tokens that lie among those of the anchors."""
    capacity: PositiveInt = 20
    """Anchors per pool (the paper's V)."""
    gamma: NonNegativeFloat = 0.3
    """Highest entropy of a shareable value, as a share of the log of the number of anchors (Eq. 5)."""
    temperature: PositiveFloat = 10.0
    """Sharpness of an anchor's weight: softmax(-temperature · d / mean d)."""
    tau: PositiveFloat = 0.05
    """Softness of a token's weight: softmax(-d² / (tau · mean d²))."""
    top_k: PositiveInt = 4
    """Anchor tokens that a token's offset is blended from."""
    match_layer: NonNegativeInt | None = None
    """Layer whose base KV is compared; None is max(1, layers // 3)."""
    match_dim: PositiveInt = 32
    """Dimensions that base KV is projected to before it is compared."""
    offset_bits: Literal[8, 16] = 16
    """Bits per number of a stored offset; 8 adds a scale per head. `linear` always keeps its own precision."""
    ridge: PositiveFloat = 0.005
    """Regularization of `linear`, in units of the mean square of base KV."""
    max_error: PositiveFloat = 0.35
    """Highest mean predicted relative error of a shareable value: over all its tokens until twice `min_anchors`
    values were observed, then over those that are translated."""
    weak_error: PositiveFloat = 0.15
    """Predicted relative error above which a single token of a shareable value, or of the template behind it, is
    computed: where on the frontier of quality and cost to be. 0.15 computes most and is nearest to dense prefill, 0.5
    is enough where answers do not depend on every token of a question, and 1 or more computes none."""
    max_leverage: PositiveFloat = 2.0
    """Highest mean leverage of a value that `leverage` shares, in units of the anchors' own mean."""
    weak_leverage: PositiveFloat = 6.0
    """Leverage in the same units above which a single token of a shareable value is computed."""
    min_anchors: PositiveInt = 4
    """Anchors with the agent's offsets below which `error` and `leverage` share nothing."""
    max_bytes: Bytes = 2 << 30
    """Bytes of all pools together on the device."""
    max_pools: PositiveInt = 256
    """Pools at once; the least recently used goes first."""
    max_sites: PositiveInt = 64
    """Slots per pool; the least recently used goes first."""
    max_base_bytes: Bytes = 1 << 30
    """Bytes of all base KV on the device."""
    host_bytes: BytesOrNone = 0
    """Bytes of host memory for offsets beyond `max_bytes`; with 0 they are dropped."""
    host_base_bytes: BytesOrNone = 0
    """Bytes of host memory for base KV beyond `max_base_bytes`; with 0 it is dropped."""

    @property
    def compared(self) -> dict[str, Any]:
        """The settings that saved anchors depend on: how values are compared."""
        return self.model_dump(include={"estimator", "match_layer", "match_dim", "top_k", "tau", "temperature"})

    @property
    def computes_weak_tokens(self) -> bool:
        """Whether tokens with bad offsets are computed. An error of 1 is that of no offset at all."""
        return self.criterion == "error" and self.weak_error < 1


def estimator_settings(name: str) -> dict[str, Any]:
    """Return the settings of the estimator `name` with its criterion: Eq. 5 for those that weigh whole anchors, as
    the paper compares them (Table A.4), else the predicted error.
    """
    if name in {"interpolate", "nearest", "cosine", "mean"}:
        return {"estimator": name, "criterion": "entropy", "temperature": 100.0}
    return {"estimator": name, "criterion": "error"}
