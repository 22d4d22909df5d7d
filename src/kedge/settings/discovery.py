"""The section `[engine.discovery]`."""

from __future__ import annotations

from enum import StrEnum

from kedge.settings.section import SettingsSection


class DiscoveryMode(StrEnum):
    """How far what was found out about plain requests is used."""

    OFF = "off"
    OBSERVE = "observe"
    EXACT = "exact"
    TRANSLATE = "translate"


class DiscoverySettings(SettingsSection):
    """What Kedge finds out by itself about requests whose clients say nothing."""

    section = "engine.discovery"

    mode: DiscoveryMode = DiscoveryMode.OBSERVE
    """`observe` changes nothing and reports what would be saved; `exact` uses what was found for caching; `translate`
    also translates the text that agents share. With `off` nothing is looked for."""
