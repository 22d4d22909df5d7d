"""The plug-in's settings, from `kv_connector_extra_config`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kedge.anchors.config import AnchorConfig
from kedge.errors import ConfigError
from kedge.policies.eviction import StepPolicy, lru, steps_to_execution
from kedge.reuse.contracts import ReusePolicy
from kedge.settings import AnchorSettings, PlannerSettings, TierConfig
from kedge.types import ReuseMode


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """`{"reuse": "translate", "forecast_ttl": 600, "tiers": {…}, "anchors": {…}, "planner": {…}}`, all optional.

    The sections are those of `kedge.toml`, with the same names and the same checks.
    """

    reuse: ReuseMode = ReuseMode.TRANSLATE
    """How far a request leans on KV that others computed, where it does not say itself."""
    forecast_ttl: float = 600.0
    """Seconds for which a forecast is believed."""
    tiers: TierConfig = TierConfig()
    """`host_memory` counts for each rank."""
    anchors: AnchorSettings = AnchorSettings()
    planner: PlannerSettings = PlannerSettings()
    """Of it only `min_translated`: vLLM computes nothing in the middle of a prompt."""
    max_captures: int = 4
    """Prompts whose KV may be kept, beside the pages and on the same device, until the base KV is there that their
    offsets are measured against."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> PluginSettings:
        """Raises `ConfigError` for an unknown key or a bad value."""
        sections = {"tiers": TierConfig, "anchors": AnchorSettings, "planner": PlannerSettings, "reuse": _reuse}
        unknown = extra.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ConfigError("kv_connector_extra_config", sorted(unknown), "there are no such settings")
        read = {name: _section(sections[name], name, value) for name, value in extra.items() if name in sections}
        return cls(**{**extra, **read})

    def __post_init__(self) -> None:
        for name in ("forecast_ttl", "max_captures"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"kv_connector_extra_config.{name}", getattr(self, name), "must be above 0")

    @property
    def policy(self) -> StepPolicy:
        return lru if self.tiers.policy == "lru" else steps_to_execution(self.tiers.virtual_step)

    @property
    def reuse_policy(self) -> ReusePolicy:
        """What vLLM can do: it computes the tokens after a prefix, so nothing is computed again in the middle."""
        return ReusePolicy(0, 0, min_translated=self.planner.min_translated)

    @property
    def anchor_config(self) -> AnchorConfig:
        """As the sections say, but that no single token of a shareable value is computed."""
        return AnchorConfig(**{**self.anchors.stored(), "weak_error": math.inf})

    def host_blocks(self, block_bytes: int) -> int:
        """Blocks of the host tier. Raises `ConfigError` where there is memory for none."""
        blocks = self.tiers.host_memory // block_bytes if self.tiers.host_blocks is None else self.tiers.host_blocks
        if self.tiers.host_blocks is None and self.tiers.host_memory and not blocks:
            raise ConfigError("tiers.host_memory", self.tiers.host_memory, f"a block has {block_bytes} bytes")
        return blocks


def _reuse(value: Any) -> ReuseMode:
    if value not in list(ReuseMode):
        raise ConfigError("reuse", value, f"not one of {', '.join(ReuseMode)}")
    return ReuseMode(value)


def _section(build: Any, name: str, value: Any) -> Any:
    if build is _reuse:
        return _reuse(value)
    if isinstance(value, build):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"kv_connector_extra_config.{name}", value, "is a section, not a value")
    return build(**value)
