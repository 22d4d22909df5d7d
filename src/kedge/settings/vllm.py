"""The section `[engine.vllm]`."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, PositiveInt

from kedge.settings.section import SettingsSection

DEFAULT_CAPTURES = 8


class VllmSettings(SettingsSection):
    """vLLM as the engine. Every key that is not listed here is an engine argument of vLLM, by its name in Python."""

    model_config = ConfigDict(extra="allow")
    section = "engine.vllm"

    max_captures: PositiveInt = DEFAULT_CAPTURES
    """Prompts whose KV may be kept on the device, beside vLLM's own, until the base KV of their values is there. One
    per agent of a workflow is enough."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The engine arguments of vLLM that were set."""
        return dict(self.model_extra or {})
