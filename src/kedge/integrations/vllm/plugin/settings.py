"""The plug-in's settings, from `kv_connector_extra_config`."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from kedge.settings import (
    AnchorSettings,
    DiscoverySettings,
    GuardSettings,
    PlannerConstants,
    QuotaSettings,
    SettingsSection,
    ThrottledTiers,
)
from kedge.types import ReuseMode

OTHERS = "*"
"""Stands in `quotas` for tenants that are not named"""
SCHEDULER = "kedge.integrations.vllm.plugin.scheduler.make_scheduler"
"""vLLM's `scheduler_cls` for lanes and for Kedge's order of waiting requests"""


class PluginSettings(SettingsSection):
    """`{"reuse": "translate", "forecast_ttl": 600, "tiers": {…}, "anchors": {…}, …}`, all optional.

    The sections `tiers`, `anchors`, `planner`, `discovery` and `guard` are those of `kedge.toml`.
    """

    section = "kv_connector_extra_config"

    reuse: ReuseMode = ReuseMode.TRANSLATE
    """Reuse mode of requests whose hints have none"""
    forecast_ttl: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a forecast is dropped"""
    tiers: ThrottledTiers = ThrottledTiers()
    """`host_memory` is per rank."""
    anchors: AnchorSettings = AnchorSettings()
    planner: PlannerConstants = PlannerConstants()
    discovery: DiscoverySettings = DiscoverySettings()
    guard: GuardSettings = GuardSettings()
    """It is at work in the process of an API server with the middleware; here it says what needs no proof."""
    state: Path | None = None
    """Folder for what the ranks have learned, as `server.state`; None keeps nothing."""
    quotas: dict[str, QuotaSettings] = {}
    """What tenants may hold on each rank, by the tenant; `*` is each tenant that is not named."""
