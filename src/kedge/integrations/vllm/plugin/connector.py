"""Kedge as a KV connector of unmodified vLLM: workflow-aware caching and translation.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KedgeConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": {"host_memory": "8GiB"}}}'

vLLM creates one connector in its scheduler and one in every worker.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.kv_cache_interface import KVCacheConfig

from kedge.integrations.vllm.plugin.feature_checks import block_bytes, cache_groups, find_features
from kedge.integrations.vllm.plugin.metrics import KedgePromMetrics, KedgeStats
from kedge.integrations.vllm.plugin.scheduler_calls import SchedulerCalls
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.integrations.vllm.plugin.worker_calls import WorkerCalls


class KedgeConnector(SchedulerCalls, WorkerCalls, SupportsHMA):
    """Kedge's connector, of which each process uses the half for its role.

    Raises `ConfigError` for a bad `kv_connector_extra_config`.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = self._settings = PluginSettings.model_validate(self._kv_transfer_config.kv_connector_extra_config)
        self._block_bytes = block_bytes(kv_cache_config)
        host_blocks = settings.tiers.host_pool_size(self._block_bytes)
        self._features = find_features(vllm_config, kv_cache_config, host_blocks, settings.max_lanes)
        self._groups = cache_groups(vllm_config, kv_cache_config)
        self._host_blocks = 0 if self._features.host else host_blocks
        if role is KVConnectorRole.SCHEDULER:
            self._open_scheduler(vllm_config, settings)
        else:
            self._open_worker(vllm_config, settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost copy is a later cache miss and nothing more."""
        return False

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._worker.close()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None if self.role is KVConnectorRole.WORKER else self._take_stats()

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
