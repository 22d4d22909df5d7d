"""The section `[engine.learning]`."""

from __future__ import annotations

from pydantic import PositiveInt

from kedge.settings.section import SettingsSection, Share


class LearningSettings(SettingsSection):
    """How much the engine learns while it is busy."""

    section = "engine.learning"

    budget: Share = 0.5
    """Share of each pass that base prefills and learning may take while requests wait for their first token."""
    max_pending: PositiveInt = 64
    """Finished requests whose KV may be kept until it is learned from; beyond it the oldest is dropped."""
    max_base_prefills: PositiveInt = 64
    """Base prefills that may be queued; beyond it the oldest is dropped."""
