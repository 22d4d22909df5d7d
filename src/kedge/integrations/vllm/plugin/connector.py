"""Kedge as a KV connector of unmodified vLLM: workflow-aware caching and translation.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KedgeConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": {"host_memory": "8GiB"}}}'

vLLM creates one connector in its scheduler and one in every worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.model_executor.models.utils import extract_layer_index
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from kedge.errors import TranslationRefused
from kedge.integrations.vllm.entry_point import UTILITY
from kedge.integrations.vllm.plugin.block_layout import KVLayer, find_layouts
from kedge.integrations.vllm.plugin.feature_checks import backends_refusal, block_bytes, cache_groups, find_features
from kedge.integrations.vllm.plugin.host_tier import HostQuotas
from kedge.integrations.vllm.plugin.lanes import PassLimits
from kedge.integrations.vllm.plugin.learner import Learner
from kedge.integrations.vllm.plugin.metrics import KedgePromMetrics, KedgeStats
from kedge.integrations.vllm.plugin.pages import Pages, rotation_of
from kedge.integrations.vllm.plugin.rank_state import open_state, rank_folder
from kedge.integrations.vllm.plugin.requests import Orders
from kedge.integrations.vllm.plugin.scheduler_side import SchedulerSide
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.integrations.vllm.plugin.translations import Translations
from kedge.integrations.vllm.plugin.worker_side import PassEvents, WorkerSide, measure_writes, pool_views
from kedge.reuse.costs import EngineCosts
from kedge.reuse.learning import LearningBudget
from kedge.settings import AnchorSettings

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager

logger = logging.getLogger(__name__)


class KedgeConnector(SchedulerSide, WorkerSide, KVConnectorBase_V1, SupportsHMA):
    """Kedge's connector. It is both halves, of which only that of its role is set up and called.

    Raises `ConfigError` for a bad `kv_connector_extra_config`.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        settings = self._settings = PluginSettings.model_validate(self._kv_transfer_config.kv_connector_extra_config)
        self._block_bytes = block_bytes(kv_cache_config)
        host_blocks = settings.tiers.host_pool_size(self._block_bytes)
        self._features = find_features(vllm_config, kv_cache_config, host_blocks)
        self._host_blocks = 0 if self._features.host else host_blocks
        block_size, ranks = vllm_config.cache_config.block_size, vllm_config.parallel_config.world_size
        if role is KVConnectorRole.SCHEDULER:
            self._features.log()
            is_ahead = bool(vllm_config.scheduler_config.async_scheduling)
            translations = Translations(self._features.translation, ranks, settings.guard, is_ahead=is_ahead)
            groups = cache_groups(vllm_config, kv_cache_config)
            SchedulerSide.__init__(self, settings, block_size, ranks, translations, groups)
        else:
            budget, costs = LearningBudget(is_timed=ranks == 1), EngineCosts(by_cost=settings.planner.by_cost)
            WorkerSide.__init__(self, block_size, settings.tiers.throttle, budget, costs)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost copy is a later cache miss and nothing more."""
        return False

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self.close()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None if self.role is KVConnectorRole.WORKER else self.take_stats()

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

    # in the scheduler -------------------------------------------------------------------------------------------

    def open_lanes(self, hold_back: Callable[[], None]) -> None:
        """Add lanes to the steps of the calling scheduler, where anything may be translated. `hold_back` ends the
        admissions of the step under way.
        """
        if self._features.translation is None:
            model, block_size = self._vllm_config.model_config, self._vllm_config.cache_config.block_size
            limits = PassLimits(model.max_model_len, model.get_vocab_size(), block_size)
            self.translations.lanes.open(hold_back, limits)

    def judge_at_once(self, request: Request) -> None:
        """Have a waiting request judged before the step in which it may start: where the only worker is in this
        process.
        """
        worker, live = _worker_here(), self.requests[request.request_id]
        if not (worker and self._ranks == 1 and self.translations.may_ask_at_once(live)):
            return
        device, host = self.cached_blocks(request.block_hashes[: (request.num_tokens - 1) // self._block_size])
        if not host:  # what is worth loading comes first
            query = self.translations.query(live, device * self._block_size, delays=False)
            self.translations.take(live, worker.answer(query))

    def reset_cache(self) -> bool:
        """Empty all caches. vLLM may be about to sleep, which takes the pages away: an engine in a process of its own
        waits for copies before, any other one here.
        """
        if (worker := _worker_here()) and worker._copier:
            worker._copier.finish()
        return super().reset_cache()

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._features.translation is None:  # translated blocks are kept out of vLLM's prefix cache
            self.translations.guard(kv_cache_manager.coordinator, kv_cache_manager.get_block_ids)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.translations.held.pool = gpu_block_pool
        if self._features.eviction is None:
            quotas = HostQuotas.of(self._settings.quotas, self._block_bytes, self._host_blocks + 1)
            self.bind(gpu_block_pool, self._host_blocks, quotas)

    # in a worker, once: opening its parts -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        if any(one.device.type != "cpu" for one in kv_caches.values()):
            self._passes = PassEvents()
        if self._host_blocks:
            views = pool_views(kv_caches.values(), self._kv_cache_config.num_blocks)
            self.open_host_tier(views, self._host_blocks)
        if self._features.translation is None:
            self._open_translation(kv_caches)

    @property
    def _layers(self) -> dict[str, Any]:
        """vLLM's layers by name."""
        return self._vllm_config.compilation_config.static_forward_context

    def _open_translation(self, kv_caches: dict[str, Tensor]) -> None:
        """Let this rank translate and learn, with what it has learned before. Raises `ConfigError` where the folder for
        that cannot be used.
        """
        try:
            if refusal := backends_refusal(self._layers[name].attn_backend for name in kv_caches):
                raise TranslationRefused("attn_backend", "", refusal)
            pages = self._pages(kv_caches)
            measure_writes(self._costs, pages)
            # vLLM compiles what ranks the guard's log-probabilities, and would end without a C++ compiler
            torch._dynamo.config.suppress_errors |= pages.empty.keys.device.type == "cpu"
            anchors = within_free_memory(self._settings.anchors, pages.empty.keys.device)
            settings = self._settings.model_copy(update={"anchors": anchors})
            self._learner = Learner(pages, settings, self._costs)
            if self._passes:
                self._budget.settle = self._learner.settle
        except TranslationRefused as refused:
            logger.warning("kedge: translation is off: %s", refused)
            self._refusal = refused.why
            return
        self._room = anchors.max_bytes + 2 * anchors.max_base_bytes
        if self._settings.state is not None:
            folder, own = rank_folder(self._settings.state, self._vllm_config), self._settings.anchors
            self.keep_state(open_state(folder, self._vllm_config, own, pages.empty, self.ask))

    def _pages(self, kv_caches: dict[str, Tensor]) -> Pages:
        """Return the pages of the model's only group, its layers in order. Raises `LayoutUnknown` where they cannot be
        read.
        """
        config, num_blocks = self._vllm_config.model_config, self._kv_cache_config.num_blocks
        block_size = self._vllm_config.cache_config.block_size
        names = sorted(kv_caches, key=extract_layer_index)
        layers = [KVLayer(self._layers[name], kv_caches[name], config.dtype, num_blocks) for name in names]
        layouts = find_layouts(layers, block_size)
        rotation = rotation_of(config, list(map(extract_layer_index, names)), layers[0].pages.device)
        return Pages(layers, layouts, block_size, rotation)

    # in a worker, in every step ---------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Orders)
        self._orders = connector_metadata
        self.begin_step()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ARG002
        self.before_pass(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: translations are written for all layers before the pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        """Do nothing: KV is read once the pass is over."""

    def wait_for_save(self) -> None:
        self.after_pass(self._orders)


def _worker_here() -> KedgeConnector | None:
    """Return the worker's half in this process, if it has one."""
    worker = get_kv_transfer_group() if has_kv_transfer_group() else None
    return worker if isinstance(worker, KedgeConnector) else None


def answer(core: EngineCore, what: str, *given: Any) -> Any:
    """Answer a call of vLLM's client to the plug-in in its engine core, between two steps (`hints.ask`): `tell` it
    messages, or ask for its `report` of plain traffic, for the `receipt` of a request that was aborted, or for its
    `translation_refusal`.
    """
    connectors = (core.scheduler.connector, *getattr(core.scheduler.connector, "_connectors", ()))
    side = next(one for one in connectors if isinstance(one, KedgeConnector))
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
    """Return settings by which anchors, base KV and captured prompts, which take as much as base KV, take at most half
    of what is free on a GPU: vLLM knows nothing of them, and the other half is for its passes.
    """
    wanted = anchors.max_bytes + 2 * anchors.max_base_bytes
    most = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else wanted
    if wanted <= most:
        return anchors
    logger.warning("kedge: anchors get %d MiB: lower gpu_memory_utilization for all %d", most >> 20, wanted >> 20)
    share = most / wanted
    bounds = {"max_bytes": int(share * anchors.max_bytes), "max_base_bytes": int(share * anchors.max_base_bytes)}
    return anchors.model_copy(update=bounds)
