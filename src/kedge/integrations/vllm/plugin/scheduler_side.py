"""The scheduler's half of the plug-in: whose blocks go first, what is loaded before it is asked for, who waits.

All calls come from the thread of vLLM's engine core. `matched` is asked in every step for every waiting request, and
what it found is forgotten where the request is not admitted, so it changes no block: loads are ordered in `build`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from kedge.cache import Copy
from kedge.cache.copies import Purpose
from kedge.engine.local.fixed_prompts import FixedLengths
from kedge.integrations.vllm.plugin.free_queue import StepFreeQueue
from kedge.integrations.vllm.plugin.hints import Call, read_call
from kedge.integrations.vllm.plugin.host_tier import HostTier, cached, label, replace_queue
from kedge.integrations.vllm.plugin.messages import Orders, Reports
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.integrations.vllm.plugin.translations import Translations
from kedge.policies.eviction import distance, policy_of
from kedge.policies.prefetch import Candidate, is_within
from kedge.reuse.plan import spans_of
from kedge.types import Namespace, Receipt, ReuseMode, Source
from kedge.workflow.forecast import AgentKey, Changes, ForecastBoard
from kedge.workflow.steps import NextRun

Template = tuple[Namespace, str, str, str]
"""(tenant, client, workflow, agent): whose fixed prompt is the same in every run."""
Hashes = tuple[BlockHash, ...]
MOST_TEMPLATES = 4096
"""Agents whose fixed prompts are remembered from one run to the next; who called longest ago goes first."""


@dataclass(eq=False, slots=True)
class Served:
    """A request with hints, from its arrival to its end."""

    call: Call
    request: Request
    device: int = 0
    """Leading tokens that are on the device"""
    translated: int = 0
    """Tokens after them that vLLM was told are there"""
    host: range = range(0)
    """Those of the device's that the request waited for"""
    asked: float | None = None
    """When it first had to wait for KV from the host"""
    wants: int | None = None
    """The block from which on it wants a load"""
    loaded: bool = False
    """A load of its own has been ordered; it gets no second one"""


class SchedulerSide:
    """Eviction, host tier, prefetch and admission. What of it is switched off was never bound."""

    def __init__(self, settings: PluginSettings, block_size: int, ranks: int, translations: Translations) -> None:
        self._settings, self._block_size, self._ranks = settings, block_size, ranks
        self._policy = policy_of(settings.tiers)
        self.translations = translations
        self._board = ForecastBoard(settings.forecast_ttl)
        self._lengths = FixedLengths()
        self._served: dict[str, Served] = {}
        self._steps: dict[AgentKey, NextRun] = {}
        self._prompts: dict[AgentKey, Hashes] = {}
        self._templates: dict[Template, Hashes] = {}
        self._template_of: dict[AgentKey, Template] = {}
        self._pool: BlockPool | None = None
        self._hash_map: object = None
        """The pool's map of hashes as it was last seen: vLLM makes a new one when it empties its prefix cache"""
        self._queue: StepFreeQueue | None = None
        self._host: HostTier | None = None
        self._due = False
        """Whether something has changed since the last look for what to prefetch."""
        self.counters: Counter[str] = Counter()
        self._untold: dict[str, dict[str, Any]] = {}

    def bind(self, pool: BlockPool, host_blocks: int) -> None:
        """Takes over the order of vLLM's free blocks, and puts a host tier behind them where it has blocks."""
        self._pool, self._hash_map = pool, pool.cached_block_hash_to_block
        self._queue = replace_queue(pool, self._policy)
        if host_blocks:
            self._host = HostTier(pool, host_blocks, self._policy, self._ranks)

    # requests -------------------------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Reads a new request's hints. Only those with hints are looked at again."""
        tokens = tuple(request.prompt_token_ids or ())
        call = read_call(
            request.request_id, tokens, request.cache_salt, request.kv_transfer_params, self._settings.reuse
        )
        if call is None:
            return
        self.counters["ignored_hints"] += call.ignored
        self._served[request.request_id] = Served(call, request)
        if call.request.reuse is ReuseMode.OFF:
            request.skip_reading_prefix_cache = True
        if call.steps is not None:
            self._forecast(call, call.steps)
        self.translations.arrived(call, request)

    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """How many tokens after the first `computed` are there, or None: not yet. Never asynchronously: what comes from
        the host lands in the prefix cache, where vLLM finds it.
        """
        served = self._served.get(request.request_id)
        if served is None or served.call.request.reuse is ReuseMode.OFF:
            return 0, False
        if self._waits(served, computed):
            return None, False
        served.device = computed
        return self.translations.matched(request, computed), False

    def allocated(self, request: Request, blocks: tuple[int, ...], external: int) -> None:
        """The request is admitted with these blocks; `external` tokens will be translated."""
        if served := self._served.get(request.request_id):
            served.wants = None
            served.translated = external
            self.translations.allocated(request, blocks, external)

    def finished(self, request: Request, block_ids: list[int]) -> dict[str, Any] | None:
        """Labels what the request leaves behind; returns its receipt."""
        served = self._served.pop(request.request_id, None)
        if served is None:
            return None
        call = served.call
        if call.request.agent and call.request.reuse is not ReuseMode.OFF:
            self._label(call, request, block_ids)
        self.translations.finished(call, request, block_ids)
        if call.final:
            self._apply(self._board.done(call.run, time.monotonic()))
            self.translations.end_run(call.run)
        receipt = self._receipt(served)
        if request.status is RequestStatus.FINISHED_ABORTED and not request.abort_immediately:
            self._untold[request.request_id] = receipt
        return receipt

    def take_untold(self) -> dict[str, dict[str, Any]]:
        """Receipts of requests that were ended from outside since the last call: vLLM's answers to those have none."""
        untold, self._untold = self._untold, {}
        return untold

    def _receipt(self, served: Served) -> dict[str, Any]:
        request = served.request
        total = request.num_prompt_tokens
        device, there = min(served.device, total), min(served.device + served.translated, total)
        sources = [Source.HOST if i in served.host else Source.DEVICE for i in range(device)]
        sources += [Source.TRANSLATED] * (there - device) + [Source.COMPUTED] * (total - there)
        notes = self.translations.notes(request.request_id)
        receipt = Receipt(served.call.request.request_id, served.call.request.reuse, spans_of(sources), notes.misses)
        self.counters["translated_tokens"] += receipt.translated
        return {
            "mode": receipt.mode.value,
            "tokens": {source.value: receipt.tokens(source) for source in Source},
            "misses": [{"segment": miss.segment, "reason": miss.reason} for miss in receipt.misses],
            "base": [list(tokens) for tokens in notes.needs],
        }

    # fixed prompts and forecasts --------------------------------------------------------------------------------

    def _label(self, call: Call, request: Request, block_ids: list[int]) -> None:
        """The request holds its blocks: those of the fixed prompt become its agent's, the others follow it."""
        length = self._lengths.of(call.request)
        if not length or self._queue is None:
            return
        fixed = length // self._block_size
        template: Template = (*call.run[:2], call.request.workflow, call.request.agent)
        hashes = tuple(request.block_hashes[:fixed])
        self._remember(template, hashes)
        if request.abort_immediately:
            return  # a message: the forecast that follows it adopts the prompt
        if not self._queue.knows(call.key):
            self.counters["ignored_labels"] += 1
            return
        self._prompts[call.key], self._template_of[call.key] = hashes, template
        self._queue.own(block_ids[:fixed], call.key)
        self._queue.follow(block_ids[fixed:])
        if self._host:
            self._back_up(call.key)
            self._due = True

    def _remember(self, template: Template, hashes: Hashes) -> None:
        self._templates.pop(template, None)
        self._templates[template] = hashes
        if len(self._templates) > MOST_TEMPLATES:
            del self._templates[next(iter(self._templates))]

    def _back_up(self, key: AgentKey) -> None:
        """Copies a fixed prompt to the host, over what is needed no sooner."""
        assert self._host is not None
        step, virtual = self._steps[key].steps, self._settings.tiers.virtual_step
        label(self._host.pool, self._prompts[key], key)
        self._host.store(self._prompts[key], key, lambda victim: distance(victim, virtual) >= step)

    def _forecast(self, call: Call, steps: Mapping[Any, NextRun]) -> None:
        """Without a number of its own, a forecast is newer than the one before it."""
        known = self._board.forecast(call.run)
        newer = known.seq + 1 if known else 0
        seq = newer if call.seq is None else call.seq
        changes = self._board.update(call.run, seq, steps, time.monotonic())
        for key in changes:
            template = (*call.run[:2], call.request.workflow, key.agent)
            if key[:3] == call.run and key not in self._template_of:
                self._template_of[key] = template
        self._apply(changes)

    def _apply(self, changes: Changes) -> None:
        for key, next_run in changes.items():
            if next_run is None:
                self._steps.pop(key, None)
                self._prompts.pop(key, None)
                self._template_of.pop(key, None)
            else:
                self._steps[key] = next_run
        if self._queue is None:
            return
        self._queue.on_forecast(changes)
        if self._host:
            self._host.queue.on_forecast(changes)
        for key in changes:
            if key in self._steps and key not in self._prompts:
                self._adopt(key)
        self._due = self._host is not None

    def _adopt(self, key: AgentKey) -> None:
        """An agent that has not called in this run has the fixed prompt that it had in other ones."""
        template = self._template_of.get(key)
        hashes = self._templates.get(template) if template else None
        if hashes is None or self._pool is None:
            return
        self._prompts[key] = hashes
        label(self._pool, hashes, key)
        if self._host:
            label(self._host.pool, hashes, key)

    # the host tier ------------------------------------------------------------------------------------------------

    def _waits(self, served: Served, computed: int) -> bool:
        """Whether the next block is on its way from the host, or could be, and the request has not waited enough."""
        host, request = self._host, served.request
        block = computed // self._block_size
        if host is None or block >= (request.num_tokens - 1) // self._block_size:
            return False
        block_hash = request.block_hashes[block]
        job = host.loading(block_hash)
        if job is None and (served.loaded or not host.holds(block_hash)):
            served.wants = None
            return False
        if job:
            job.demanded = True
        else:
            served.wants = block
        now = time.monotonic()
        served.asked = now if served.asked is None else served.asked
        if now - served.asked <= self._settings.tiers.max_wait:
            served.host = range(served.host.start or computed, request.num_prompt_tokens)
            return True
        served.wants, served.loaded = None, True
        return False

    def _demand(self, idle: bool) -> None:
        """Orders what waiting requests want. With nothing else to do, one for which there is no room computes."""
        assert self._host is not None
        for served in [one for one in self._served.values() if one.wants is not None]:
            assert served.wants is not None
            request = served.request
            hashes = request.block_hashes[: (request.num_tokens - 1) // self._block_size]
            _, wanted = self._host.missing(hashes)
            if not self._host.pays(len(wanted)):
                served.loaded, served.wants = True, None
                self.counters["loads_that_do_not_pay"] += 1
                continue
            job = self._host.load(hashes, Purpose.DEMAND, None, lambda _: True)
            if job or (idle and not self._host.busy):
                served.loaded, served.wants = True, None

    def _prefetch(self) -> None:
        """Loads the fixed prompts of who runs next, soonest first, over what is needed strictly later."""
        assert self._host is not None
        tiers = self._settings.tiers
        slots = tiers.prefetch_jobs - self._host.prefetching
        for candidate in sorted(self._candidates(), key=lambda one: one.order):
            if slots <= 0:
                break
            job = self._host.load(
                self._prompts[candidate.node],
                Purpose.PREFETCH,
                candidate.node,
                partial(candidate.may_replace, virtual_step=tiers.virtual_step),
                tiers.decode_reserve,
            )
            slots -= job is not None

    def _candidates(self) -> Iterator[Candidate[AgentKey]]:
        assert self._host is not None and self._pool is not None
        for key, hashes in self._prompts.items():
            next_run = self._steps.get(key)
            if next_run is None or not is_within(next_run.steps, self._settings.tiers.prefetch_window):
                continue
            if hashes and cached(self._pool, hashes[-1]) is None:  # tails go first: with its end it is all there
                size = len(self._host.missing(hashes)[1])
                yield Candidate(key, next_run.steps, next_run.probability, size)

    # once per step --------------------------------------------------------------------------------------------------

    def build(self, output: SchedulerOutput) -> Orders:
        """What the workers are to do in this step."""
        self._notice_reset()
        orders = self.translations.orders(output)
        orders.scheduled = output.total_num_scheduled_tokens
        orders.copies = self._copies(idle=not output.total_num_scheduled_tokens)
        return orders

    def _notice_reset(self) -> None:
        if self._pool and self._queue and self._pool.cached_block_hash_to_block is not self._hash_map:
            self._hash_map = self._pool.cached_block_hash_to_block
            self._queue.forget_blocks()

    def _copies(self, idle: bool) -> tuple[Copy, ...]:
        if self._host is None:
            return ()
        self._apply_expired()
        self._demand(idle)
        if self._due:
            self._due = False
            self._prefetch()
        return self._host.take_orders()

    def _apply_expired(self) -> None:
        if changes := self._board.expire(time.monotonic()):
            self._apply(changes)

    def reported(self, reports: Reports) -> None:
        """Takes what the workers say of a step."""
        if self._host:
            for copy_id, ended in reports.copies.items():
                self._host.reported(copy_id, ended)
            self._host.cost.compute.observe(*reports.computed)
            self._due = self._due or bool(reports.copies)
        self.translations.reported(reports)

    @property
    def busy(self) -> bool:
        """Whether the engine has to go on stepping, though no request may be left."""
        return self._due or self.translations.busy or (self._host is not None and self._host.busy)

    def clear(self) -> bool:
        """Forgets fixed prompts and the host tier; False while a copy is under way."""
        if self._host and not self._host.clear():
            return False
        self._prompts.clear()
        self._templates.clear()
        return True

    def totals(self) -> dict[str, int]:
        """Everything that was counted since the start."""
        found = Counter(self.counters)
        if self._queue:
            found.update({f"evictions_{name}": count for name, count in _by_kind(self._queue).items()})
        if self._host:
            found.update(self._host.counters)
            found["host_evictions"] = sum(self._host.queue.evicted.values())
        found["ignored_forecasts"] = sum(self._board.ignored.values())
        return dict(found)


def _by_kind(queue: StepFreeQueue) -> Counter[str]:
    """Evicted device blocks: of varying suffixes, of nobody, of agents."""
    kinds: Counter[str] = Counter()
    for name, count in queue.evicted.items():
        kinds[name if name in ("varying", "unlabelled") else "labelled"] += count
    return kinds
