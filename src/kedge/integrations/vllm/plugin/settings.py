"""The plug-in's settings, from `kv_connector_extra_config`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from kedge.settings import (
    AnchorSettings,
    DiscoverySettings,
    GuardSettings,
    LearningSettings,
    PlannerSettings,
    QuotaSettings,
    SettingsSection,
    TierSettings,
)
from kedge.settings.sections import DEFAULT_CAPTURES, DEFAULT_LANES
from kedge.types import ReuseMode

OTHERS = "*"
"""Stands in `quotas` for tenants that are not named"""
SCHEDULER = "kedge.integrations.vllm.plugin.scheduler.make_scheduler"
"""vLLM's `scheduler_cls` for lanes and for Kedge's order of waiting requests"""


class PluginSettings(SettingsSection):
    """`{"reuse": "translate", "forecast_ttl": 600, "tiers": {…}, "anchors": {…}, …}`, all optional.

    The sections `tiers`, `anchors`, `planner`, `learning`, `discovery` and `guard` are those of `kedge.toml`.
    """

    section = "kv_connector_extra_config"

    reuse: ReuseMode = ReuseMode.TRANSLATE
    """Reuse mode of requests whose hints have none"""
    forecast_ttl: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a forecast is dropped"""
    tiers: TierSettings = TierSettings()
    """`host_memory` is per rank."""
    anchors: AnchorSettings = AnchorSettings()
    planner: PlannerSettings = PlannerSettings()
    """Without lanes only `min_translated` and `by_cost` count: nothing in the middle of a prompt is computed then."""
    learning: LearningSettings = LearningSettings()
    """`max_captures` takes the place of `max_pending`."""
    discovery: DiscoverySettings = DiscoverySettings()
    guard: GuardSettings = GuardSettings()
    """It is at work in the process of an API server with the middleware; here it says what needs no proof."""
    max_captures: PositiveInt = DEFAULT_CAPTURES
    """As `engine.vllm.max_captures`, which sets it when Kedge starts vLLM."""
    max_lanes: NonNegativeInt = DEFAULT_LANES
    """As `engine.vllm.max_lanes`."""
    state: Path | None = None
    """Folder for what the ranks have learned, as `server.state`; None keeps nothing."""
    snapshot_interval: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Seconds between two snapshots."""
    quotas: dict[str, QuotaSettings] = {}
    """What tenants may hold on each rank, by the tenant; `*` is each tenant that is not named."""

    @property
    def translation_only(self) -> tuple[AnchorSettings, PlannerSettings]:
        """`anchors` and `planner` for an engine that computes nothing in the middle of a prompt, so that a value which
        is learned from makes all behind it dense.
        """
        kept = {"min_translated": self.planner.min_translated, "by_cost": self.planner.by_cost}
        planner = PlannerSettings(recompute_head=0, recompute_short=0, move="never", **kept)
        return self.anchors.model_copy(update={"weak_error": math.inf}), planner
