"""vLLM's calls to the connector in a worker, passed on to `WorkerSide`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.utils import extract_layer_index

from kedge.errors import TranslationRefused
from kedge.integrations.vllm.plugin.feature_checks import Features, backends_refusal
from kedge.integrations.vllm.plugin.learner import Learner
from kedge.integrations.vllm.plugin.learning_budget import LearningBudget
from kedge.integrations.vllm.plugin.messages import Orders
from kedge.integrations.vllm.plugin.pages import Layer, Pages, RopeModule
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.integrations.vllm.plugin.worker_side import WorkerSide
from kedge.integrations.vllm.plugin.write_costs import measure_writes
from kedge.kv.rotary import Rotary
from kedge.reuse.costs import EngineCosts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata

logger = logging.getLogger(__name__)


class WorkerCalls(KVConnectorBase_V1):
    """A worker's half of a connector."""

    _features: Features
    _host_blocks: int
    _settings: PluginSettings
    _is_saved = False

    def _open_worker(self, config: VllmConfig, settings: PluginSettings) -> None:
        self._block_size = config.cache_config.block_size
        share = settings.learning.budget if config.parallel_config.world_size == 1 else None
        self._worker = WorkerSide(self._block_size, settings.tiers.throttle, LearningBudget(share))

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        is_synchronous = all(pages.device.type == "cpu" for pages in kv_caches.values())
        costs = EngineCosts(by_cost=self._settings.planner.by_cost and is_synchronous)
        if is_synchronous:
            self._worker.measure_passes(costs)
        if self._host_blocks:
            self._worker.open_host_tier(kv_caches, self._host_blocks)
        if self._features.translation is None:
            self._worker.open_translation(self._learner(kv_caches, costs))

    def _learner(self, kv_caches: dict[str, Tensor], costs: EngineCosts) -> Learner | TranslationRefused:
        try:
            pages = self._pages(kv_caches)
            measure_writes(costs, pages)
            return Learner(pages, self._settings, self._lanes_refusal(kv_caches), costs)
        except TranslationRefused as refusal:
            logger.warning("kedge: translation is off: %s", refusal)
            return refusal

    def _lanes_refusal(self, kv_caches: dict[str, Tensor]) -> str | None:
        """Return the reason why this rank cannot compute tokens in the middle of a prompt, or None."""
        layers: dict[str, Any] = self._vllm_config.compilation_config.static_forward_context
        refusal = self._features.lanes or backends_refusal(layers[name].attn_backend for name in kv_caches)
        if refusal != self._features.lanes:
            logger.warning("kedge: lanes are off: %s", refusal)
        return refusal

    def _pages(self, kv_caches: dict[str, Tensor]) -> Pages:
        """Return the model's pages. Raises `TranslationRefused` where they cannot be read."""
        config = self._vllm_config.model_config
        layers: dict[str, Any] = self._vllm_config.compilation_config.static_forward_context
        names = sorted(kv_caches, key=extract_layer_index)
        text = config.hf_text_config
        longest = text.max_position_embeddings
        rope = get_rope(config.get_head_size(), longest, True, text.rope_parameters, config.dtype)
        table = rope.cos_sin_cache.to(kv_caches[names[0]].device)
        rotary = Rotary(RopeModule(table), min(len(table), config.max_model_len), table.device)
        return Pages([Layer(layers[name], kv_caches[name]) for name in names], self._block_size, rotary)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._is_saved = False
        self._worker.begin_step()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ARG002
        self._worker.before_pass(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: translations are written for all layers before the pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        """Do nothing: KV is read once the pass is over."""

    def wait_for_save(self) -> None:
        self._is_saved = True
        self._worker.after_pass(self._orders())

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if not self._is_saved and not self._orders().scheduled:
            self.wait_for_save()  # vLLM before 0.31 does not call it in a step without a pass
        return self._worker.take_reports()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks()

    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders
