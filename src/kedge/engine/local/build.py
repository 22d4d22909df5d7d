"""Building an embedded engine from its settings. The costs of passes and translations are measured in slots that are
not in use yet.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from kedge.anchors.base_store import BaseStore
from kedge.anchors.offsets import empty_table, no_offsets
from kedge.anchors.store import AnchorStore
from kedge.anchors.translator import Translate, Translation, translate_into
from kedge.cache import CacheManager
from kedge.discovery import PlainRequests
from kedge.engine.common.model_folder import model_path, pick_device, pick_dtype, read_config
from kedge.engine.local.learning import Learning
from kedge.engine.local.model import graphs
from kedge.engine.local.model import loading as models
from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.preassembly import PromptPreassembler, Write
from kedge.engine.local.scheduler import Scheduler
from kedge.engine.local.sentinels import Sentinels
from kedge.engine.local.sequence import BaseJob, PreparedPrompt, RequestSequence, Sequence, Work, flatten
from kedge.engine.local.sessions import SessionCaching
from kedge.errors import ConfigError
from kedge.kv.copy import PoolCopier, host_pools
from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.models import default_model
from kedge.policies.eviction import EvictionPolicy, policy_of
from kedge.reuse.costs import LONGEST, REPEATS, EngineCosts
from kedge.reuse.runtime import Runtime
from kedge.settings import EngineSettings, ThrottledTiers
from kedge.settings.sections import blocks_in
from kedge.types import Namespace, Tokens

T = TypeVar("T")
logger = logging.getLogger(__name__)
LONG_ON_GPU = 1024
"""Tokens of the longest pass that is measured on a GPU, where some hundred take hardly longer than one"""
MANY = 4
"""Sequences of the pass with several"""
SLOW = 0.25
"""Seconds of a one-token pass from which longer ones are not measured: the model is too slow on this machine."""


def on_scratch_thread(work: Callable[[], T]) -> T:
    """Run `work` on a temporary thread.

    OpenMP keeps a team of workers for every living thread that ever used one. With more workers than cores, GCC's
    runtime lets them sleep between parallel regions, and a pass of a small model takes half as long again. The engine's
    thread is therefore the only one with a team.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result()


def load_runner(model: str | Path | None, config: EngineSettings) -> tuple[ModelRunner, Path]:
    """Load a model in the dtype and on the device that the settings name. Return it, and its folder."""
    device = pick_device(config.device)
    path = model_path(model, config.dtype, config.device)
    # The bundled toy is too small to gain by 16 bits, and is there to be compared with.
    stored = None if path == default_model() else getattr(read_config(path), "dtype", None)
    dtype = pick_dtype(config.dtype, device, stored)
    runner = checked_runner(models.load(path, dtype, device))
    logger.info("%s computes in %s on %s", path, str(runner.spec.dtype).removeprefix("torch."), device)
    return runner, path


def _allocated(key: str, size: int | str, allocate: Callable[[], T]) -> T:
    """Return what `allocate` makes. Raises `ConfigError` naming a setting where there is no memory for it."""
    try:
        return allocate()
    except (RuntimeError, TypeError) as error:  # PyTorch's own, and that of sizes beyond 64 bits
        raise ConfigError(key, size, f"cannot be allocated: {str(error).splitlines()[0]}") from error


class EngineParts:
    """The parts of an embedded engine without its thread, built from a model and settings, and figures of them as plain
    data. For the engine's owner thread only.
    """

    learning: Learning
    scheduler: Scheduler
    """These two end requests or free their blocks. The core makes them, once it has the register of requests."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineSettings,
        policy: EvictionPolicy | None = None,
        on_copied: Callable[[], None] = lambda: None,
    ) -> None:
        """Build the parts. `policy` replaces that of the settings. `on_copied` is called, on another thread, when a
        copy has ended.
        """
        self.runner, self.config = runner, config
        size, tiers = config.block_size, config.tiers
        block_bytes = runner.spec.bytes_per_token * size
        num_blocks = blocks_in(config.kv_memory, block_bytes)
        if num_blocks < 1:
            raise ConfigError("engine.kv_memory", config.kv_memory, f"too small: a block has {block_bytes} bytes")
        self.capacity = num_blocks * size
        """Tokens of the device tier"""
        self.longest = min(runner.max_positions, self.capacity)
        """Tokens of the longest prompt that can be computed"""
        paged = partial(PagedStorage, runner.spec, num_blocks, size, runner.device, runner.rotary)
        self.storage = storage = _allocated("engine.kv_memory", config.kv_memory, paged)
        runner.graphs = graphs.on_gpu(runner.run, storage, runner.max_positions) if config.cuda_graphs else None
        if runner.graphs is not None:
            runner.graphs.capture(config.max_running)

        self.anchors = AnchorStore(config.anchors)
        self.bases = BaseStore(config.anchors.max_base_bytes, runner.spec.bytes_per_token)
        self.costs = EngineCosts(by_cost=config.planner.by_cost)
        self.runtime = Runtime(self.anchors, self.bases, config.planner, runner.refusal, self.costs)

        self.copier = copier = self._host_copier(block_bytes, on_copied)
        self.cache = cache = CacheManager(
            num_blocks, size, policy or policy_of(tiers), tiers, copier, block_bytes, storage.copy_beginning
        )
        self.loading = {"waited": 0, "stall_s": 0.0}
        """How many requests waited for KV from the host, and for how many seconds in all, while others ran"""
        translate = translate_into(storage)
        self.write: Write = lambda _, table, parts: translate(table, parts)
        """Writes translations into a request's slots. Experiments replace it"""
        self.sessions = SessionCaching(cache, is_on=tiers.policy == "sessions")
        self.plain = PlainRequests(config.discovery)
        self.jobs: deque[BaseJob] = deque()
        self.ahead: deque[PreparedPrompt] = deque()
        self.running: list[RequestSequence] = []
        """The queues of the scheduler: base prefills, prepared prompts with tokens to compute, admitted requests"""
        self.sentinels = Sentinels(storage)
        self.preassembly = PromptPreassembler(
            cache,
            self.runtime,
            lambda *given: self.write(*given),
            self.costs,
            self.sentinels,
            self.longest,
            self.ahead,
        )
        if config.planner.by_cost:
            measure(self.costs, runner, storage, self.capacity)

    def _host_copier(self, block_bytes: int, on_copied: Callable[[], None]) -> PoolCopier | None:
        """Return the copier of a host tier, None where there is none."""
        tiers = self.config.tiers
        if not (blocks := tiers.host_pool_size(block_bytes)):
            return None
        size, throttle = self.config.block_size, ThrottledTiers(**dict(tiers)).throttle

        def copier() -> PoolCopier:
            return PoolCopier(host_pools(self.storage, blocks), size, throttle, on_copied)

        return _allocated("engine.tiers.host_memory", tiers.host_memory, copier)

    def stats(self) -> dict[str, object]:
        """Return figures of the queue, the cache, waiting for loads, learning, and the anchors."""
        queues = self.scheduler
        waiting = len(queues.preempted) + len(queues.loading) + len(queues.waiting)
        return {
            "dtype": str(self.runner.spec.dtype).removeprefix("torch."),
            "scheduler": {"running": len(self.running), "waiting": waiting},
            "learning": self.learning.stats(),
            "cache": asdict(self.cache.stats()),
            "loading": dict(self.loading),
            "preassembly": self.preassembly.stats(),
            "discovery": self.plain.stats(),
            "anchors": asdict(self.anchors.stats()),
            "base_kv": asdict(self.bases.stats()),
        }

    def tenant_stats(
        self, owns: Callable[[Namespace], bool], prompts: Iterable[tuple[Namespace, Tokens]]
    ) -> dict[str, object]:
        """Return the anchor pools of some tenants, how many tokens of the given prompts are in each tier, and what was
        found in their plain requests.
        """
        found = (self.cache.status(namespace, tokens) for namespace, tokens in prompts)
        cached = [{"device": one.device_tokens, "host": one.host_tokens} for one in found]
        pools = self.anchors.pool_stats(owns)
        return {"prompts": cached, "pools": pools, "traffic": self.plain.report(owns)}


def measure(costs: EngineCosts, runner: ModelRunner, storage: PagedStorage, capacity: int) -> None:
    """Run a few passes and write a few segments; `capacity` is the tokens of the storage, none of them in use."""
    longest = min(LONG_ON_GPU if storage.keys.is_cuda else LONGEST, capacity, runner.max_positions)
    run = partial(_run, runner, storage)
    run(1, 1)  # the first use of anything takes longer
    alone = _seconds(partial(run, 1, 1))
    for tokens, sequences in ((1, 1), (longest, 1), (min(MANY, longest), min(MANY, longest))):
        if alone < SLOW or tokens == 1:
            for _ in range(REPEATS):
                costs.observe_pass(tokens, sequences, _seconds(partial(run, tokens, sequences)))
    write = partial(_write, storage, translate_into(storage))
    write(1)  # builds the kernel
    for tokens in (1, longest):
        for _ in range(REPEATS):
            costs.observe_translation(1, tokens, _seconds(partial(write, tokens)))
    costs.settle()


def _seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _run(runner: ModelRunner, storage: PagedStorage, tokens: int, sequences: int) -> None:
    """Run a pass over `tokens` tokens, shared by so many sequences, and wait for its result."""
    share = tokens // sequences
    work = [Work(Sequence.at([0] * share, at * share), list(range(share))) for at in range(sequences)]
    runner.forward(flatten(work, storage))[0, 0].item()


def _write(storage: PagedStorage, translate: Translate, tokens: int) -> None:
    """Move so many tokens of base KV to other slots."""
    spec = storage.spec
    shape = (spec.layers, tokens, spec.kv_heads, spec.head_dim)
    zeros = torch.zeros(shape, dtype=spec.dtype, device=storage.keys.device)
    base = KVSegment(zeros, zeros)
    table = empty_table(base)
    translate(SlotTable(torch.arange(tokens)), [Translation(0, base, no_offsets(tokens), table)])
    if storage.keys.is_cuda:
        torch.cuda.synchronize(storage.keys.device)
