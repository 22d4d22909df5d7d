"""Kedge as a KV connector of unmodified vLLM: workflow-aware caching and translation.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KedgeConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": {"host_memory": "8GiB"}}}'

vLLM creates one connector in its scheduler and one in every worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.model_executor.models.utils import extract_layer_index
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from kedge.engine.common.state.snapshot import EngineState
from kedge.errors import ConfigError, LayoutUnknown, TranslationRefused
from kedge.integrations.vllm.entry_point import UTILITY
from kedge.integrations.vllm.plugin.block_layout import KVLayer, find_layouts
from kedge.integrations.vllm.plugin.feature_checks import (
    backends_refusal,
    block_bytes,
    cache_groups,
    find_features,
)
from kedge.integrations.vllm.plugin.host_tier import HostQuotas
from kedge.integrations.vllm.plugin.lanes import PassLimits
from kedge.integrations.vllm.plugin.learner import Learner
from kedge.integrations.vllm.plugin.metrics import KedgePromMetrics, KedgeStats
from kedge.integrations.vllm.plugin.pages import Pages, rotation_of
from kedge.integrations.vllm.plugin.rank_state import identity, rank_folder
from kedge.integrations.vllm.plugin.requests import Orders, Reports
from kedge.integrations.vllm.plugin.scheduler_side import SchedulerSide
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.integrations.vllm.plugin.translations import Translations
from kedge.integrations.vllm.plugin.worker_side import WorkerSide, measure_writes, pool_views
from kedge.reuse.costs import EngineCosts
from kedge.reuse.learning import LearningBudget
from kedge.settings import AnchorSettings

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

logger = logging.getLogger(__name__)


class KedgeConnector(KVConnectorBase_V1, SupportsHMA):
    """Kedge's connector, of which each process uses the half for its role.

    Raises `ConfigError` for a bad `kv_connector_extra_config`.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = self._settings = PluginSettings.model_validate(self._kv_transfer_config.kv_connector_extra_config)
        self._block_bytes = block_bytes(kv_cache_config)
        host_blocks = settings.tiers.host_pool_size(self._block_bytes)
        self._features = find_features(vllm_config, kv_cache_config, host_blocks)
        self._groups = cache_groups(vllm_config, kv_cache_config)
        self._host_blocks = 0 if self._features.host else host_blocks
        block_size, ranks = vllm_config.cache_config.block_size, vllm_config.parallel_config.world_size
        if role is KVConnectorRole.SCHEDULER:
            self._features.log()
            is_ahead = bool(vllm_config.scheduler_config.async_scheduling)
            translations = Translations(self._features.translation, ranks, settings.guard, is_ahead=is_ahead)
            self._scheduler = SchedulerSide(settings, block_size, ranks, translations)
        else:
            budget = LearningBudget(is_timed=ranks == 1)
            self._worker = WorkerSide(block_size, settings.tiers.throttle, budget)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost copy is a later cache miss and nothing more."""
        return False

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._worker.close()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None if self.role is KVConnectorRole.WORKER else self._scheduler.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KedgeStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return KedgePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # in the scheduler, called by Kedge's own --------------------------------------------------------------------

    def join(self, hold_back: Callable[[], None]) -> SchedulerSide:
        """Return the scheduler's half to the calling scheduler, which adds lanes to its steps where anything may be
        translated. `hold_back` ends the admissions of the step under way.
        """
        if self._features.translation is None:
            model, block_size = self._vllm_config.model_config, self._vllm_config.cache_config.block_size
            limits = PassLimits(model.max_model_len, model.get_vocab_size(), block_size)
            self._scheduler.translations.lanes.open(hold_back, limits)
        return self._scheduler

    def ask_at_once(self, request: Request) -> None:
        """Have the next request of an idle engine judged before its step: where the only worker is in this process."""
        worker = get_kv_transfer_group() if has_kv_transfer_group() else None
        is_only = self._vllm_config.parallel_config.world_size == 1
        if is_only and isinstance(worker, KedgeConnector) and worker.role is KVConnectorRole.WORKER:
            self._scheduler.ask_at_once(request, worker._worker.answer)

    # in the scheduler, called by vLLM ---------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._features.translation is None:  # translated blocks are kept out of vLLM's prefix cache
            coordinator: Any = kv_cache_manager.coordinator
            guard, block_ids = self._scheduler.translations.guard, kv_cache_manager.get_block_ids
            coordinator.cache_blocks = guard(coordinator.cache_blocks, block_ids)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduler.translations.held.pool = gpu_block_pool
        if self._features.eviction is None:
            quotas = HostQuotas.of(self._settings.quotas, self._block_bytes, self._host_blocks + 1)
            self._scheduler.bind(gpu_block_pool, self._host_blocks, quotas, self._groups)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_arrival(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:  # noqa: ARG002
        self._scheduler.on_admission(request, tuple(blocks.get_block_ids()[self._groups.main.number]))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.build_orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        reports = connector_output.kv_connector_worker_meta
        if isinstance(reports, Reports):
            self._scheduler.on_reports(reports)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        receipt = self._scheduler.on_finish(request, *self._groups.held_blocks(block_ids))
        return False, None if receipt is None else {"kedge": receipt}

    def has_pending_push_work(self) -> bool:
        return self._scheduler.busy

    def reset_cache(self) -> bool:
        self._scheduler.clear()
        return True

    # in a worker, once: opening its parts -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        costs = EngineCosts(by_cost=self._settings.planner.by_cost)
        self._worker.measure_passes(costs, is_cpu=all(map(_is_on_cpu, kv_caches.values())))
        if self._host_blocks:
            dtype = self._vllm_config.model_config.dtype
            try:
                views = pool_views(kv_caches, self._layers, self._kv_cache_config, dtype)
                self._worker.open_host_tier(views, self._host_blocks)
            except LayoutUnknown as refusal:
                logger.warning("kedge: host is off on this rank: %s", refusal)
        if self._features.translation is None:
            self._open_translation(kv_caches, costs)

    @property
    def _layers(self) -> dict[str, Any]:
        """vLLM's layers by name."""
        return self._vllm_config.compilation_config.static_forward_context

    def _open_translation(self, kv_caches: dict[str, Tensor], costs: EngineCosts) -> None:
        """Let this rank translate and learn, with what it has learned before."""
        try:
            if refusal := backends_refusal(self._layers[name].attn_backend for name in kv_caches):
                raise TranslationRefused("attn_backend", "", refusal)
            pages = self._pages(kv_caches)
            measure_writes(costs, pages)
            anchors = within_free_memory(self._settings.anchors, pages.empty.keys.device)
            settings = self._settings.model_copy(update={"anchors": anchors})
            learner = Learner(pages, settings, costs)
        except TranslationRefused as refused:
            logger.warning("kedge: translation is off: %s", refused)
            self._worker.open_translation(refused)
            return
        self._worker.open_translation(learner, anchors.max_bytes + anchors.max_base_bytes)
        if self._settings.state is not None:
            self._keep_state(self._settings.state, pages)

    def _pages(self, kv_caches: dict[str, Tensor]) -> Pages:
        """Return the pages of the model's only group, its layers in order. Raises `LayoutUnknown` where they cannot be
        read.
        """
        config, num_blocks = self._vllm_config.model_config, self._kv_cache_config.num_blocks
        block_size = self._vllm_config.cache_config.block_size
        names = sorted(kv_caches, key=extract_layer_index)
        layers = [KVLayer(self._layers[name], kv_caches[name], config.dtype) for name in names]
        layouts = find_layouts(layers, num_blocks, block_size)
        rotation = rotation_of(config, list(map(extract_layer_index, names)), layers[0].pages.device)
        return Pages(layers, layouts, block_size, rotation)

    def _keep_state(self, folder: Path, pages: Pages) -> None:
        """Go on from what this rank has learned before. Raises `ConfigError` where the folder cannot be used."""
        try:
            whose = identity(self._vllm_config, self._settings.anchors, pages.empty)
            own = rank_folder(folder, self._vllm_config)
            state = EngineState(own, whose, pages.empty, self._worker.ask, values=True)
        except OSError as error:
            raise ConfigError("state", str(folder), f"cannot be used: {error}") from error
        self._worker.keep_state(state)

    # in a worker, in every step ---------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ARG002
        self._worker.before_pass(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: translations are written for all layers before the pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        """Do nothing: KV is read once the pass is over."""

    def wait_for_save(self) -> None:
        self._worker.after_pass(self._orders())

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_reports()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks()

    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders


def answer(core: EngineCore, what: str, *given: Any) -> Any:
    """Answer a call of vLLM's client to the plug-in in its engine core, between two steps (`hints.ask`): `tell` it
    messages, or ask for its `report` of plain traffic or for the `receipt` of a request that was aborted.
    """
    connectors = (core.scheduler.connector, *getattr(core.scheduler.connector, "_connectors", ()))
    side = next(one for one in connectors if isinstance(one, KedgeConnector))._scheduler
    if what != "tell":
        return getattr(side, what)(*given)
    answers = []
    for hints, salt, tokens in given[0]:
        hasher = None if "segments" in hints else core.request_block_hasher  # that of a fixed prompt
        message = Request("", list(tokens), SamplingParams(), None, cache_salt=salt or None, block_hasher=hasher)
        message.abort_immediately = True
        answers.append(side.take_message(message, hints))
    return answers


setattr(EngineCore, UTILITY, answer)


def within_free_memory(anchors: AnchorSettings, device: torch.device) -> AnchorSettings:
    """Return settings by which anchors and base KV take at most half of what is free on a GPU: vLLM knows nothing of
    them, and the other half is for its passes.
    """
    wanted = anchors.max_bytes + anchors.max_base_bytes
    most = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else wanted
    if wanted <= most:
        return anchors
    logger.warning("kedge: anchors get %d MiB: lower gpu_memory_utilization for all %d", most >> 20, wanted >> 20)
    share = most / wanted
    bounds = {"max_bytes": int(share * anchors.max_bytes), "max_base_bytes": int(share * anchors.max_base_bytes)}
    return anchors.model_copy(update=bounds)


def _is_on_cpu(registered: Tensor | Sequence[Tensor]) -> bool:
    parts = [registered] if isinstance(registered, Tensor) else registered
    return all(part.device.type == "cpu" for part in parts)
