"""Puts the parts of an embedded engine together from its settings."""

from __future__ import annotations

from pathlib import Path

import torch

import kedge.models.nano
from kedge.anchors.base_store import BaseStore
from kedge.anchors.config import AnchorConfig
from kedge.anchors.store import AnchorStore
from kedge.cache import CacheManager
from kedge.config import EngineConfig
from kedge.engine.local import model as models
from kedge.engine.local.core import EngineCore
from kedge.engine.local.model import ModelRunner
from kedge.errors import ConfigError
from kedge.kv.spec import KVSpec
from kedge.kv.storage import PagedStorage
from kedge.runtime.interfaces import ReusePolicy
from kedge.runtime.runtime import Runtime


def model_path(model: str | Path | None) -> Path:
    """The folder of a model; None is the one that comes with the package."""
    return Path(model) if model is not None else Path(kedge.models.nano.__path__[0])


def load_runner(path: Path, config: EngineConfig) -> ModelRunner:
    """Loads a model as the settings ask for."""
    device = pick_device(config.device)
    return ModelRunner(models.load(path, pick_dtype(config.dtype, device), device))


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("engine.device", name, "this machine has no CUDA device")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return getattr(torch, name)


def core(runner: ModelRunner, config: EngineConfig) -> tuple[EngineCore, int]:
    """The engine without its thread, and how many tokens its device tier holds."""
    num_blocks = config.num_blocks or _blocks(runner.spec, config)
    storage = PagedStorage(runner.spec, num_blocks, config.block_size, runner.device, runner.rotary)
    anchors = AnchorStore(AnchorConfig(**config.anchors.model_dump(exclude={"max_base_bytes"})))
    bases = BaseStore(config.anchors.max_base_bytes)
    runtime = Runtime(anchors, bases, ReusePolicy(**config.planner.model_dump()), runner.refusal)
    capacity = num_blocks * config.block_size
    built = EngineCore(
        runner,
        CacheManager(num_blocks, config.block_size),
        storage,
        runtime,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        capacity=capacity,
    )
    return built, capacity


def _blocks(spec: KVSpec, config: EngineConfig) -> int:
    blocks = config.kv_memory // (spec.bytes_per_token * config.block_size)
    if blocks < 1:
        raise ConfigError("engine.kv_memory", config.kv_memory, "holds not a single block of this model's KV")
    return blocks
