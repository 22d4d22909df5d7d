"""Building an embedded engine from its settings."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from kedge.anchors.tiered_store import HostBound
from kedge.cache import CacheManager, EvictionPolicy
from kedge.cache.disk import DiskLimits
from kedge.engine.local.components import EngineComponents
from kedge.engine.local.core import EngineCore
from kedge.engine.local.disk.disk_files import DiskFiles
from kedge.engine.local.host_loads import Loading
from kedge.engine.local.measuring import measure
from kedge.engine.local.model import graphs
from kedge.engine.local.model import loading as models
from kedge.engine.local.model.identity import model_digest
from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.runner import ModelRunner
from kedge.errors import ConfigError
from kedge.kv.copy import HostStorage, TorchCopier
from kedge.kv.spec import KVSpec
from kedge.kv.storage import PagedStorage
from kedge.policies.eviction import lru, policy_of, steps_to_execution
from kedge.reuse.costs import EngineCosts
from kedge.reuse.runtime import Runtime, UpcomingSteps
from kedge.settings import EngineSettings, TierSettings

T = TypeVar("T")


def apart(work: Callable[[], T]) -> T:
    """Run `work` on a temporary thread.

    OpenMP keeps a team of workers for every living thread that ever used one. With more workers than cores, GCC's
    runtime lets them sleep between parallel regions, and a pass of a small model takes half as long again. The engine's
    thread is therefore the only one with a team.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result()


def load_runner(path: Path, config: EngineSettings) -> ModelRunner:
    """Load the model that the settings name."""
    device = pick_device(config.device)
    return checked_runner(models.load(path, pick_dtype(config.dtype, device), device))


def pick_device(name: str) -> torch.device:
    """Return the device that the settings name. Raises `ConfigError` where this machine has none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("engine.device", name, "this machine has no CUDA device")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """Return the dtype that the settings name; `auto` is that of the weights on a GPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return getattr(torch, name)


def core(
    runner: ModelRunner,
    config: EngineSettings,
    policy: EvictionPolicy | None = None,
    on_copied: Callable[[], None] = lambda: None,
    components: EngineComponents = EngineComponents(),  # noqa: B008 (it is frozen)
) -> tuple[EngineCore, int]:
    """Return the engine without its thread, and how many tokens its device tier holds.

    `policy` replaces that of the settings. `on_copied` is called, on another thread, when a copy has ended.
    `components` are replaced in experiments only.
    """
    num_blocks = config.num_blocks or _blocks(runner.spec, config)
    storage = PagedStorage(runner.spec, num_blocks, config.block_size, runner.device, runner.rotary)
    has_graphs = config.cuda_graphs and not runner.recurrent
    runner.graphs = graphs.on_gpu(runner.run, storage, runner.max_positions) if has_graphs else None
    if runner.graphs is not None:
        runner.graphs.capture(config.max_running)
    expected = UpcomingSteps()
    anchors = components.anchors(config.anchors, host_bound(config.anchors.host_bytes, config.tiers, expected))
    base_host = host_bound(config.anchors.host_base_bytes, config.tiers, expected)
    bases = components.bases(config.anchors.max_base_bytes, base_host)
    costs = EngineCosts(by_cost=config.planner.by_cost)
    runtime = Runtime(anchors, bases, config.planner, runner.refusal, expected, costs)
    capacity = num_blocks * config.block_size
    block_bytes = runner.spec.bytes_per_token * config.block_size
    host_blocks = config.tiers.host_pool_size(block_bytes)
    host = HostStorage(storage, host_blocks)
    copier = TorchCopier(storage, host, config.tiers.throttle, on_copied) if host_blocks else None
    policy = policy or policy_of(config.tiers)
    files = disk_files(runner, config, host, copier, on_copied)
    parts = policy, config.tiers, copier, block_bytes, files, storage.copy_beginning
    cache = CacheManager(num_blocks, config.block_size, *parts)
    carriers = tuple(one for one in (copier, files) if one is not None)
    loading = Loading(cache, config.tiers, has_host=copier is not None)
    assembler = components.assembler(runner, storage)
    built = EngineCore(runner, cache, storage, runtime, loading, carriers, assembler, costs, config, capacity)
    if config.planner.by_cost:
        measure(costs, runner, storage, capacity)
    return built, capacity


def disk_files(
    runner: ModelRunner,
    config: EngineSettings,
    host: HostStorage,
    copier: TorchCopier | None,
    on_done: Callable[[], None],
) -> DiskFiles | None:
    """Return the files behind the host tier, if there are to be any. Raises `ConfigError`."""
    path = config.tiers.disk_path
    if path is None or copier is None:
        return None
    identity = model_digest(runner).hexdigest()
    try:
        DiskLimits.of(config.tiers, runner.spec.bytes_per_token * config.block_size)
        return DiskFiles(path, identity, host, config.block_size, copier.seals, on_done)
    except BaseException:
        copier.close()
        raise


def _blocks(spec: KVSpec, config: EngineSettings) -> int:
    blocks = config.kv_memory // (spec.bytes_per_token * config.block_size)
    if blocks < 1:
        raise ConfigError("engine.kv_memory", config.kv_memory, "holds not a single block of this model's KV")
    return blocks


def host_bound(nbytes: int, tiers: TierSettings, expected: UpcomingSteps) -> HostBound:
    """Return the host memory for anchors or base KV, under the same policy and forecast as the blocks."""
    policy = lru if tiers.policy == "lru" else steps_to_execution(tiers.virtual_step)
    return HostBound(nbytes, policy, expected.steps, tiers.prefetch_window, tiers.virtual_step)
