"""The half of the connector in vLLM's scheduler: the order of eviction, loads before they are needed, and who waits for
them.

All calls come from the thread of vLLM's engine core. `get_num_new_matched_tokens` is called in every step for every
waiting request, and its result is dropped if the request is not admitted, so it changes no block: loads are ordered in
`build_connector_meta`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from kedge.cache.owners import Owners
from kedge.discovery import PlainRequests, Served
from kedge.hints.actions import ActionOutcome
from kedge.hints.without_prompt import RUN_ENDED, took_forecast
from kedge.integrations.vllm.plugin.block_pools import ONE_GROUP, CacheGroups, cached_prefix, replace_queue
from kedge.integrations.vllm.plugin.free_queue import StepFreeQueue
from kedge.integrations.vllm.plugin.hints import namespace_of, read_hints, without_hints
from kedge.integrations.vllm.plugin.host_loads import HostLoads
from kedge.integrations.vllm.plugin.host_tier import HostQuotas, HostTier
from kedge.integrations.vllm.plugin.metrics import REPORT_SECONDS, KedgeStats
from kedge.integrations.vllm.plugin.owners import UNANSWERED, AgentPrompts, SessionHistories
from kedge.integrations.vllm.plugin.requests import LiveRequest, Orders, Reports, receipt_to_dict
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.integrations.vllm.plugin.translations import Translations, answer_of
from kedge.policies.eviction import policy_of
from kedge.reuse.costs import MAX_PENDING
from kedge.structures.bounded import BoundedDict
from kedge.types import RequestId, ReuseMode, RunKey

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput


class SchedulerSide:
    """Requests, from their arrival to their receipts, with the methods that vLLM calls by its own names. Parts that are
    off were never bound.
    """

    def __init__(
        self,
        settings: PluginSettings,
        block_size: int,
        ranks: int,
        translations: Translations,
        groups: CacheGroups = ONE_GROUP,
    ) -> None:
        self._settings, self._block_size, self._ranks, self._groups = settings, block_size, ranks, groups
        self._policy = policy_of(settings.tiers)
        self.translations = translations
        self.owners = Owners()
        self.sessions = SessionHistories(self.owners)
        self.prompts = AgentPrompts(
            self.owners, block_size, settings.forecast_ttl, lambda changes: self.sessions.ledger.on_forecast(changes)
        )
        self.plain = PlainRequests(settings.discovery)
        self.queue: StepFreeQueue | None = None
        self.loads: HostLoads | None = None
        self.requests = translations.requests
        self._pool: BlockPool | None = None
        self._counts = Counter(ignored_hints=0, translated_tokens=0)
        self._reported, self._report_due = Counter[str](), -math.inf
        """What was counted up to the last report, and when the next one is due"""
        self._aborted: BoundedDict[str, dict[str, Any]] = BoundedDict(MAX_PENDING)
        """The receipts of requests that were aborted, by vLLM's ids: no output carries them"""

    def bind(self, pool: BlockPool, host_blocks: int, quotas: HostQuotas | None = None) -> None:
        """Take over the order of vLLM's free blocks, and put a host tier with `quotas` behind them if it has blocks."""
        self._pool = pool
        pool.reset_prefix_cache = partial(self._reset_device, pool.reset_prefix_cache)
        self.queue = replace_queue(pool, self._policy, self._groups, self.owners)
        pools = [pool]
        if host_blocks:
            tier = HostTier(pool, host_blocks, self._policy, self._ranks, quotas)
            self.loads = HostLoads(
                tier, self.prompts, self._settings.tiers, self._block_size, lambda: self.sessions.ledger.guard.trusted
            )
            pools.append(tier.host)
        self.prompts.bind(*pools)
        if self._settings.tiers.policy == "sessions":
            self.sessions.bind(*pools)

    # requests -------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Read a new request's hints, if it has any, add what is found out about it, and find the session that it
        continues.
        """
        live = self.requests[request.request_id] = LiveRequest(request)
        tokens, reuse = request.prompt_token_ids or (), self._settings.reuse
        read = partial(read_hints, request.request_id, tokens, request.cache_salt, reuse=reuse)
        hinted = read(request.kv_transfer_params)
        # the KV of embeddings, images and adapters does not follow from the tokens alone
        is_text = request.prompt_embeds is None and not request.mm_features and request.lora_request is None
        if is_text:
            given = hinted or read({"kedge": {}})
            assert given is not None
            if (found := self.plain.arrived(given.request)) is not given.request:
                hinted = replace(given, request=found)
        if hinted is not None:
            live.hinted = hinted
            request.sampling_params = without_hints(request.sampling_params)
            self._counts["ignored_hints"] += hinted.ignored
            if hinted.request.reuse is ReuseMode.OFF:
                request.skip_reading_prefix_cache = True
            if hinted.steps is not None:
                self.prompts.forecast(hinted, hinted.steps)
            self.translations.on_arrival(live)
        mode = hinted.request.reuse if hinted else reuse
        if mode is ReuseMode.OFF:
            return
        self.sessions.arrive(live)
        live.may_load = live.hinted is not None or live.turn is not None
        if self.loads:
            self.loads.look_again()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens after the computed ones need no computing by the request itself, since they are
        translated or computed in lanes; None: the request has to wait. Never are they loaded while it waits for them.

        Blocks that are loaded from the host land in the prefix cache, where vLLM finds them.
        """
        live = self.requests[request.request_id]
        if live.may_load and self.loads and self.loads.must_wait(live, num_computed_tokens):
            return None, False
        live.device = num_computed_tokens
        if live.hinted is None or live.asked.reuse is ReuseMode.OFF:
            return 0, False
        return self.translations.match(live, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:  # noqa: ARG002
        """Take the blocks of an admitted request, into which its translated KV is written."""
        live = self.requests[request.request_id]
        live.is_admitted = True
        if live.hinted:
            self.translations.on_admission(live, tuple(blocks.get_block_ids()[self._groups.main.number]))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Do as with the only one of several groups."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Give the blocks that a request leaves behind, by group, to its agent and its session, and let vLLM free them.

        Returns its receipt for its client, None for one without hints.
        """
        main, others = self._groups.held_blocks(block_ids)
        live = self.requests.pop(request.request_id)
        if self.loads:
            self.loads.look_again()
        hinted = live.hinted
        may_label = hinted is not None and hinted.request.agent and hinted.request.reuse is not ReuseMode.OFF
        if hinted and may_label and (key := self.prompts.label(hinted, request, main, others)):
            self.sessions.ledger.own(key, self.prompts.prompts[key])
            if self.loads:
                self.loads.back_up_prompt(self.prompts.prompts[key], key)
        history = self.sessions.finish(live, main, others)
        if history and self.loads:
            self.loads.finished(*history)
        receipt, served = None, Served(live.device, 0)
        if hinted is not None:
            self.translations.on_finish(live, main)
            if hinted.request.turn.is_last:
                self._end_run(hinted.request.run_key)
            found = live.receipt()
            served = Served.of(found)
            self._counts["translated_tokens"] += found.translated
            receipt = {"kedge": receipt_to_dict(found, hinted.actions)}
            if request.status is RequestStatus.FINISHED_ABORTED:
                self._aborted[request.request_id] = receipt["kedge"]
        if hinted is None or hinted.request.is_plain:
            answer = () if request.status in UNANSWERED else answer_of(request)
            self.plain.ended(namespace_of(request.cache_salt), RequestId(request.request_id), answer, served)
        return False, receipt

    # between requests -----------------------------------------------------------------------------------------

    def take_message(self, message: Request, hints: Mapping[str, Any]) -> list[dict[str, str]]:
        """Take hints without a request: a fixed prompt, one that is expected, a forecast, or what a client says of its
        sessions and runs. Returns what becomes of it.
        """
        tokens, params = message.prompt_token_ids or (), {"kedge": hints}
        hinted = read_hints(message.request_id, tokens, message.cache_salt, params, self._settings.reuse)
        assert hinted is not None
        self._counts["ignored_hints"] += hinted.ignored
        request, outcomes = hinted.request, list[ActionOutcome]()
        if any(one.is_placeholder for one in request.segments):
            self.translations.expect(request)
        elif message.block_hashes and request.agent and request.reuse is not ReuseMode.OFF:
            self.prompts.label(hinted, message, [])
        if hinted.steps is not None:
            outcomes.append(took_forecast(self.prompts.forecast(hinted, hinted.steps)))
        if hinted.ends_run:
            self._end_run(request.run_key)
            outcomes.append(RUN_ENDED)
        outcomes += self.sessions.advise(request.namespace, request.turn)
        return [one.to_dict() for one in outcomes]

    def report(self) -> Mapping[str, Any]:
        """Return what was found in plain traffic."""
        return self.plain.report()

    def translation_refusal(self) -> str | None:
        """Return the reason why nothing is translated, or None."""
        return self.translations.refusal

    def receipt(self, name: str) -> Mapping[str, Any] | None:
        """Return the receipt of one of the last requests that were aborted, by its client's name for it: vLLM's has a
        hyphen and a random suffix behind that.
        """
        names = (one for one in reversed(self._aborted) if name in (one, one.rpartition("-")[0]))
        return self._aborted.get(next(names, ""))

    def _end_run(self, run: RunKey) -> None:
        self.prompts.end_run(run)
        self.translations.end_run(run)

    def on_order(self, requests: Sequence[Request]) -> None:
        """Take the order of service of the requests that wait, where they do not fit all at once."""
        self.sessions.waiting(self.requests[one.request_id] for one in requests)

    def cached_blocks(self, hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """Return how many leading blocks of a prompt are on the device, and how many after them are worth loading from
        the host. O(log n) look-ups. (0, 0) before `bind`.
        """
        if self.loads:
            return self.loads.cached_blocks(hashes)
        return (cached_prefix(self._pool, hashes), 0) if self._pool else (0, 0)

    # once per step --------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        """Return the orders to the workers for this step."""
        output, orders = scheduler_output, self.translations.take_orders(scheduler_output)
        self.prompts.expect(self.plain.forecasts)
        self.prompts.expire()
        self.sessions.advance()
        for live in filter(None, map(self.requests.get, output.preempted_req_ids or ())):  # one may have been aborted
            self.sessions.preempted(live)
            live.is_admitted, live.is_ahead = False, True  # it waits again; nothing is loaded ahead of its turn
        if self.loads:
            orders.copies = self.loads.copies(self.requests.values(), idle=not output.total_num_scheduled_tokens)
        return orders

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' reports of a step, if there are any."""
        reports = connector_output.kv_connector_worker_meta
        if isinstance(reports, Reports):
            if self.loads:
                self.loads.on_reports(reports.copies, reports.computed)
            self.translations.on_reports(reports)

    def has_pending_push_work(self) -> bool:
        """Whether the engine has to go on stepping, even without requests."""
        return self.translations.busy or (self.loads is not None and self.loads.busy)

    # emptying the caches --------------------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Forget fixed prompts and what was learned, and empty the host tier: the model's weights may have changed."""
        if self.loads:
            self.loads.clear()
        self.prompts.clear()
        self.translations.forget()
        return True

    def _reset_device(self, reset: Callable[[], bool]) -> bool:
        """Empty vLLM's prefix cache by its own `reset`, which fails while any block is held. What copies and captures
        hold is given up, unless a request holds a block as well.
        """
        assert self._pool and self.queue
        copying = self.loads.tier.held_on_device() if self.loads else ()
        ours = Counter((*self.translations.held.block_ids, *copying))
        free = self._pool.get_num_free_blocks()
        free += sum(self._pool.blocks[one].ref_cnt == times for one, times in ours.items())
        if free != self._pool.num_gpu_blocks - 1:  # vLLM keeps one block for itself
            return reset()
        self.translations.give_up_captures()
        with self.loads.tier.without_copies() if self.loads else nullcontext():
            done = reset()
            self.queue.forget_blocks()
        if self.loads:
            self.loads.look_again()
        return done

    def take_stats(self) -> KedgeStats | None:
        """Return what was counted since the last report: once a second while requests run, and in every step once the
        last has ended, since an idle engine takes no more steps.
        """
        if self.requests and time.monotonic() < self._report_due:
            return None
        self._report_due, before = time.monotonic() + REPORT_SECONDS, self._reported
        self._reported = Counter(self.totals())
        return KedgeStats(data=dict(found)) if (found := self._reported - before) else None

    def totals(self) -> dict[str, int]:
        """Return everything that was counted since the start, by the names of `metrics.COUNTERS`."""
        found = self.prompts.counters()
        found.update({**self.translations.lanes.prefills.counts, **self._counts})
        if self.queue:
            for name, count in self.queue.evicted.items():
                found[f"evictions_{name}"] += count
        if self.loads:
            found.update(self.loads.counters())
        return dict(found)
