"""vLLM's calls to the connector in its scheduler, passed on to `SchedulerSide`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kedge.integrations.vllm.plugin.base_jobs import PassLimits
from kedge.integrations.vllm.plugin.cache_groups import CacheGroups
from kedge.integrations.vllm.plugin.count_reports import CountReports
from kedge.integrations.vllm.plugin.feature_checks import Features, tails_refusal
from kedge.integrations.vllm.plugin.host_quotas import HostQuotas
from kedge.integrations.vllm.plugin.lane_grants import LaneGrants
from kedge.integrations.vllm.plugin.messages import Reports
from kedge.integrations.vllm.plugin.metrics import ADVICE, NEEDS, RECEIPTS, REPORT, KedgeStats
from kedge.integrations.vllm.plugin.scheduler_side import SchedulerSide
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.integrations.vllm.plugin.translations import Translations
from kedge.policies.sessions import SessionKey

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class SchedulerCalls(KVConnectorBase_V1):
    """The scheduler's half of a connector."""

    _features: Features
    _block_bytes: int
    _groups: CacheGroups
    _host_blocks: int
    _settings: PluginSettings

    def _open_scheduler(self, config: VllmConfig, settings: PluginSettings) -> None:
        self._features.log()
        ranks = config.parallel_config.world_size
        translations = Translations(self._features.translation, ranks)
        self._scheduler = SchedulerSide(settings, config.cache_config.block_size, ranks, translations)
        self._counts = CountReports(self._scheduler.totals)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.guard_cache(kv_cache_manager)

    def guard_cache(self, kv_cache_manager: KVCacheManager) -> None:
        """Keep translated blocks out of vLLM's prefix cache.

        Kedge's scheduler calls this where vLLM binds no manager.
        """
        if self._features.translation is None:
            coordinator: Any = kv_cache_manager.coordinator
            guard, block_ids = self._scheduler.translations.guard, kv_cache_manager.get_block_ids
            coordinator.cache_blocks = guard(coordinator.cache_blocks, block_ids)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduler.translations.bind(gpu_block_pool)
        if self._features.eviction is None:
            quotas = HostQuotas.of(self._settings.quotas, self._block_bytes, self._host_blocks + 1)
            self._scheduler.bind(gpu_block_pool, self._host_blocks, quotas, self._groups)

    # called by Kedge's scheduler ------------------------------------------------------------------------------

    def session_of(self, request: Request) -> SessionKey | None:
        """Return the session that was found when a request arrived, None where there was none."""
        return self._scheduler.sessions.session_of(request)

    @property
    def returning(self) -> float:
        """The share of requests that sessions come back with."""
        return self._scheduler.sessions.ledger.steps.tracker.returning

    def cached_blocks(self, hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """Return how many leading blocks of a prompt are on the device, and how many after them can be loaded."""
        return self._scheduler.cached_blocks(hashes)

    def on_order(self, requests: Sequence[Request]) -> None:
        """Take the order of service of the requests that wait, where they do not fit all at once."""
        self._scheduler.upkeep.catch_up()
        self._scheduler.sessions.waiting(requests)

    def open_upkeep(self) -> None:
        """Let what no decision needs yet be put off until `keep_up`, which the calling scheduler promises to call in
        every pass. Loads from the host decide by it in the same step.
        """
        if not self._host_blocks:
            self._scheduler.upkeep.open()

    def keep_up(self) -> None:
        """Do what was put off, while the workers compute."""
        if self._scheduler.upkeep.is_open:
            self._scheduler.upkeep.run()

    def open_lanes(self, hold_back: Callable[[], None]) -> LaneGrants | None:
        """Let requests have lanes, which the calling scheduler adds to its steps. Returns None where they must not.

        `hold_back` ends the admissions of the step under way.
        """
        if self._features.lanes is not None:
            return None
        lanes = self._scheduler.translations.lanes
        lanes.open(self._settings.max_lanes, hold_back)
        config = self._vllm_config
        if tails_refusal(config, self._settings.max_lanes) is None:
            model, learning = config.model_config, self._settings.learning
            limits = PassLimits(model.max_model_len, model.get_vocab_size(), config.cache_config.block_size)
            lanes.tails.open(*limits)
            lanes.bases.open(limits, learning.max_base_prefills)
            lanes.base_share = learning.budget
        return lanes

    # called by vLLM -------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._counts.began()
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
        self._counts.ended()
        receipt = self._scheduler.on_finish(request, *self._groups.held_blocks(block_ids))
        return False, None if receipt is None else {"kedge": receipt}

    def has_pending_push_work(self) -> bool:
        return self._scheduler.busy

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.take_events()

    def reset_cache(self) -> bool:
        self._scheduler.clear()
        return True

    def _take_stats(self) -> KVConnectorStats | None:
        """Return what was counted since the last call, with receipts and base prefills that no output carries."""
        data: dict[str, Any] = dict(self._counts.take())
        if unsent := self._scheduler.take_unsent_receipts():
            data[RECEIPTS] = unsent
        if needed := self._scheduler.translations.take_needed():
            data[NEEDS] = needed
        if answers := self._scheduler.advice.answers():
            data[ADVICE] = answers
        if report := self._scheduler.reports.take():
            data[REPORT] = report
        return KedgeStats(data=data) if data else None
