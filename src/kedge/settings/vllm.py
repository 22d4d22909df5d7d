"""The section `[engine.vllm]`."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, NonNegativeInt, PositiveInt

from kedge.settings.section import SettingsSection

DEFAULT_CAPTURES = 8
DEFAULT_LANES = 32


class VllmSettings(SettingsSection):
    """vLLM as the engine. Every key that is not listed here is an engine argument of vLLM, by its name in Python."""

    model_config = ConfigDict(extra="allow")
    section = "engine.vllm"

    max_captures: PositiveInt = DEFAULT_CAPTURES
    """Prompts whose KV may be kept on the device, beside vLLM's own, until the base KV of their values is there. One
    per agent of a workflow is enough."""

    max_lanes: NonNegativeInt = DEFAULT_LANES
    """Places of a prompt, beside its end, that are computed in one pass; each takes a row of the batch. Of more, the
    nearest are joined; with 0 a prompt is translated only up to the first token that has to be computed."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The engine arguments of vLLM that were set."""
        return dict(self.model_extra or {})
