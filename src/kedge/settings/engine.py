"""The section `[engine]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from kedge.settings.anchors import AnchorSettings
from kedge.settings.discovery import DiscoverySettings
from kedge.settings.guard import GuardSettings
from kedge.settings.learning import LearningSettings
from kedge.settings.planner import PlannerSettings
from kedge.settings.section import Bytes, SettingsSection
from kedge.settings.tiers import TierSettings
from kedge.settings.vllm import VllmSettings


class EngineSettings(SettingsSection):
    """The model, where it runs and how much memory and work it may take."""

    section = "engine"

    backend: Literal["local", "vllm"] = "local"
    """What runs the model: `local` is the embedded engine, `vllm` is vLLM with Kedge's plug-in."""
    model: Path | None = None
    """Folder of a model as Transformers saves it; None is the bundled one."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """`auto` is the GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is float32 on the CPU and the dtype of the weights on a GPU."""
    block_size: PositiveInt = 16
    """Tokens per block of the device tier."""
    num_blocks: PositiveInt | None = None
    """Blocks of the device tier; None takes as many as `kv_memory` holds."""
    kv_memory: Bytes = 1 << 30
    """Bytes of the device tier, unless `num_blocks` is set."""
    state_memory: Bytes = 256 << 20
    """Bytes of snapshots of the states of linear attention, for models with it; those of running requests are extra."""
    max_batch_tokens: PositiveInt = 2048
    """Tokens of one step, prefill and decode together; a longer prompt is prefilled in chunks."""
    max_running: PositiveInt = 16
    """Requests that run at once; the others wait."""
    max_waiting: PositiveInt = 4096
    """Requests in flight, running or waiting, beyond which another one is refused."""
    cuda_graphs: bool = True
    """Launch passes of up to 256 tokens on a GPU as one CUDA graph, where the model can be captured."""
    anchors: AnchorSettings = AnchorSettings()
    planner: PlannerSettings = PlannerSettings()
    learning: LearningSettings = LearningSettings()
    guard: GuardSettings = GuardSettings()
    tiers: TierSettings = TierSettings()
    discovery: DiscoverySettings = DiscoverySettings()
    vllm: VllmSettings = VllmSettings()
