"""What the quality guard needs of vLLM, in Kedge's engine and in vLLM's own server alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.engine.base import Stream
from kedge.engine.common.state.saving import Snapshots
from kedge.engine.common.state.snapshot import EngineState
from kedge.errors import ConfigError
from kedge.reuse.guard.comparison import TOP
from kedge.types import GenerateRequest, ReuseMode, SamplingParams, Segment

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kedge.reuse.guard.guard import QualityGuard
    from kedge.settings import AnchorSettings


def warm_up(submit: Callable[[GenerateRequest], Stream]) -> None:
    """Draw tokens with log-probabilities, for one request and for two at once: vLLM compiles what these need for one
    row and for several, which takes seconds, and the quality guard asks for them beside any request.
    """
    for prompts in ([(Segment((0,), "p0"),)] * count for count in (1, 2)):
        drawn = [GenerateRequest(one, SamplingParams(max_tokens=1), ReuseMode.OFF, logprobs=TOP) for one in prompts]
        for stream in [submit(one) for one in drawn]:
            stream.result()


def within_top(request: GenerateRequest, most: int) -> GenerateRequest:
    """Return the request with no more log-probabilities than vLLM gives, its `max_logprobs`."""
    if request.logprobs is None or not 0 <= most < request.logprobs:
        return request
    return replace(request, logprobs=most)


def keep_guard(guard: QualityGuard, folder: Path, config: VllmConfig, anchors: AnchorSettings) -> Snapshots:
    """Load what the guard knew before, and begin to save what it learns, until `close`.

    Damaged records and those of another model or of other settings of the anchors are left out, with a line in the
    log. Raises `ConfigError` where the folder cannot be used.
    """
    from kedge.integrations.vllm.plugin.rank_state import guard_identity

    try:
        state = EngineState(folder, guard_identity(config, anchors), guard=guard)
    except OSError as error:
        raise ConfigError("state", str(folder), f"cannot be used: {error}") from error
    kept = Snapshots(folder, state.load, state.save, give_back=state.close)
    kept.load()
    kept.start()
    return kept
