"""vLLM's calls to the connector in a worker, passed on to `WorkerSide`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.model_executor.models.utils import extract_layer_index

from kedge.engine.common.state.snapshot import EngineState
from kedge.errors import ConfigError, LayoutUnknown, TranslationRefused
from kedge.integrations.vllm.plugin.feature_checks import Features, backends_refusal
from kedge.integrations.vllm.plugin.kv_layers import KVLayer
from kedge.integrations.vllm.plugin.layout_probe import find_block_axes, find_layouts
from kedge.integrations.vllm.plugin.learner import Learner
from kedge.integrations.vllm.plugin.learning_budget import LearningBudget
from kedge.integrations.vllm.plugin.messages import Orders
from kedge.integrations.vllm.plugin.model_identity import rank_folder, rank_identity
from kedge.integrations.vllm.plugin.page_views import pool_views
from kedge.integrations.vllm.plugin.pages import Pages
from kedge.integrations.vllm.plugin.rank_state import RankState
from kedge.integrations.vllm.plugin.rotations import rotation_of
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.integrations.vllm.plugin.worker_side import WorkerSide
from kedge.integrations.vllm.plugin.write_costs import measure_writes
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
        is_synchronous = all(map(_is_on_cpu, kv_caches.values()))
        costs = EngineCosts(by_cost=self._settings.planner.by_cost and is_synchronous)
        if is_synchronous:
            self._worker.measure_passes(costs)
        if self._host_blocks:
            self._open_host_tier(kv_caches)
        if self._features.translation is None:
            self._open_translation(kv_caches, costs)

    def _open_host_tier(self, kv_caches: dict[str, Tensor]) -> None:
        config = self._vllm_config
        known: dict[str, Any] = config.compilation_config.static_forward_context
        try:
            views = pool_views(kv_caches, known, self._kv_cache_config, config.model_config.dtype)
        except LayoutUnknown as refusal:
            logger.warning("kedge: host is off on this rank: %s", refusal)
            return
        self._worker.open_host_tier(views, self._host_blocks)

    @property
    def _num_blocks(self) -> int:
        return self._kv_cache_config.num_blocks

    def _open_translation(self, kv_caches: dict[str, Tensor], costs: EngineCosts) -> None:
        try:
            self._refuse_company()
            pages = self._pages(kv_caches)
            measure_writes(costs, pages)
            learner = Learner(pages, self._settings, self._lanes_refusal(kv_caches), costs)
        except TranslationRefused as refusal:
            logger.warning("kedge: translation is off: %s", refusal)
            self._worker.open_translation(refusal)
            return
        self._worker.open_translation(learner)
        if self._settings.state is not None:
            self._keep_state(self._settings.state, pages, learner)

    def _keep_state(self, folder: Path, pages: Pages, learner: Learner) -> None:
        """Go on from what this rank has learned before. Raises `ConfigError` where the folder cannot be used."""
        try:
            identity = rank_identity(self._vllm_config, pages.empty, self._settings.anchors)
            own = rank_folder(folder, self._vllm_config)
            state = EngineState(own, identity, pages.empty, self._worker.ask, values=True)
        except OSError as error:
            raise ConfigError("state", str(folder), f"cannot be used: {error}") from error
        self._worker.keep_state(
            RankState(state, self._settings.snapshot_interval, lambda: learner.rotation.refusal is None)
        )

    def _refuse_company(self) -> None:
        """Raise `TranslationRefused` beside other connectors (`MultiConnector`): they save every block of a request by
        its tokens, and would give translated KV to requests that must have computed KV.
        """
        if has_kv_transfer_group() and (group := get_kv_transfer_group()) is not self:
            why = "another KV connector would save translated KV as if it had been computed"
            raise TranslationRefused("kv_connector", type(group).__name__, why)

    def _lanes_refusal(self, kv_caches: dict[str, Tensor]) -> str | None:
        """Return the reason why this rank cannot compute tokens in the middle of a prompt, or None."""
        layers: dict[str, Any] = self._vllm_config.compilation_config.static_forward_context
        refusal = self._features.lanes or backends_refusal(layers[name].attn_backend for name in kv_caches)
        if refusal != self._features.lanes:
            logger.warning("kedge: lanes are off: %s", refusal)
        return refusal

    def _pages(self, kv_caches: dict[str, Tensor]) -> Pages:
        """Return the pages of the model's only group, its layers in order. Raises `LayoutUnknown` where they cannot be
        read.
        """
        config = self._vllm_config.model_config
        known: dict[str, Any] = self._vllm_config.compilation_config.static_forward_context
        names = sorted(kv_caches, key=extract_layer_index)
        layers = [KVLayer(known[name], kv_caches[name], config.dtype) for name in names]
        axes = find_block_axes(layers, self._num_blocks, self._block_size)
        layouts = find_layouts(layers, axes, self._num_blocks, self._block_size)
        rotation = rotation_of(config, list(map(extract_layer_index, names)), layers[0].pages.device)
        return Pages(layers, layouts, self._block_size, rotation)

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


def _is_on_cpu(registered: Tensor | Sequence[Tensor]) -> bool:
    parts = [registered] if isinstance(registered, Tensor) else registered
    return all(part.device.type == "cpu" for part in parts)
