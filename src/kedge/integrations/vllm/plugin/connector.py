"""Kedge as a KV connector of unmodified vLLM: workflow-aware caching and translation, in one class.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KedgeConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kedge.integrations.vllm.plugin.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": {"host_memory": "8GiB"}}}'

vLLM makes one of these in its scheduler and one in every worker. This class only passes vLLM's calls on.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import KVCacheConfig

from kedge.errors import TranslationRefused
from kedge.integrations.vllm.plugin import feature_checks as compat
from kedge.integrations.vllm.plugin.learner import Learner
from kedge.integrations.vllm.plugin.messages import Orders, Reports
from kedge.integrations.vllm.plugin.metrics import NEEDS, RECEIPTS, KedgePromMetrics, KedgeStats
from kedge.integrations.vllm.plugin.pages import Layer, Pages, RopeModule
from kedge.integrations.vllm.plugin.scheduler_side import SchedulerSide
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.integrations.vllm.plugin.translations import Translations
from kedge.integrations.vllm.plugin.worker_side import WorkerSide
from kedge.kv.rotary import Rotary

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class KedgeConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. Raises `ConfigError` for a bad `kv_connector_extra_config`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        settings = self._settings = PluginSettings.model_validate(extra)
        host_blocks = settings.tiers.host_pool_size(compat.block_bytes(kv_cache_config))
        self._features = compat.features(vllm_config, kv_cache_config, host_blocks)
        self._host_blocks = 0 if self._features.host else host_blocks
        self._block_size = vllm_config.cache_config.block_size
        self._reported: Counter[str] = Counter()
        if role is KVConnectorRole.SCHEDULER:
            self._features.log()
            ranks = vllm_config.parallel_config.world_size
            translations = Translations(self._features.translation, ranks)
            self._scheduler = SchedulerSide(settings, self._block_size, ranks, translations)
        else:
            self._worker = WorkerSide(self._block_size, settings.tiers.throttle)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost copy is a later cache miss and nothing more."""
        return False

    # the scheduler ------------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._features.translation is None:
            coordinator: Any = kv_cache_manager.coordinator
            coordinator.cache_blocks = self._scheduler.translations.guarded(coordinator.cache_blocks)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduler.translations.bind(gpu_block_pool)
        if self._features.eviction is None:
            self._scheduler.bind(gpu_block_pool, self._host_blocks)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, tuple(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        reports = connector_output.kv_connector_worker_meta
        if isinstance(reports, Reports):
            self._scheduler.reported(reports)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        receipt = self._scheduler.finished(request, block_ids)
        return False, None if receipt is None else {"kedge": receipt}

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        return self._scheduler.busy

    def reset_cache(self) -> bool:
        return self._scheduler.clear()

    # the workers ----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        if self._host_blocks:
            self._worker.open_host(kv_caches, self._host_blocks)
        if self._features.translation is None:
            self._worker.open_translation(self._learner(kv_caches))

    def _learner(self, kv_caches: dict[str, Tensor]) -> Learner | TranslationRefused:
        try:
            return Learner(self._pages(kv_caches), self._settings)
        except TranslationRefused as refusal:
            logger.warning("kedge: translation is off: %s", refusal)
            return refusal

    def _pages(self, kv_caches: dict[str, Tensor]) -> Pages:
        """Raises `TranslationRefused` where this model's pages cannot be read."""
        config = self._vllm_config.model_config
        known: dict[str, Any] = self._vllm_config.compilation_config.static_forward_context
        names = sorted(kv_caches, key=extract_layer_index)
        text = config.hf_text_config
        longest = text.max_position_embeddings
        rope = get_rope(config.get_head_size(), longest, True, text.rope_parameters, config.dtype)
        table = rope.cos_sin_cache.to(kv_caches[names[0]].device)
        rotary = Rotary(RopeModule(table), min(len(table), config.max_model_len), table.device)
        return Pages([Layer(known[name], kv_caches[name]) for name in names], self._block_size, rotary)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.before()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ARG002
        self._worker.load(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Whole requests are written before the pass: there is nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        """KV is read once a pass is over."""

    def wait_for_save(self) -> None:
        self._worker.save(self._orders())

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_reports()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks()

    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._worker.close()

    # both -------------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.role is KVConnectorRole.WORKER:
            return None
        totals = Counter(self._scheduler.totals())
        news, self._reported = totals - self._reported, totals
        data: dict[str, Any] = dict(news)
        if untold := self._scheduler.take_untold():
            data[RECEIPTS] = untold
        if needed := self._scheduler.translations.take_needed():
            data[NEEDS] = needed
        return KedgeStats(data=data) if data else None

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
