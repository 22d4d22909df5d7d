"""When KV moves from the host to the device: when a request arrives, on demand, and by forecast. And its backups."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from vllm.v1.core.kv_cache_utils import BlockHash

from kedge.cache import Copy
from kedge.cache.copies import Purpose
from kedge.integrations.vllm.plugin.agent_prompts import AgentPrompts
from kedge.integrations.vllm.plugin.backups import FinishedHistory, HostBackups
from kedge.integrations.vllm.plugin.block_pools import has_end
from kedge.integrations.vllm.plugin.free_queue import StepFreeQueue
from kedge.integrations.vllm.plugin.host_tier import HostTier
from kedge.integrations.vllm.plugin.idle_sessions import IdleSessions
from kedge.integrations.vllm.plugin.messages import CopyResult
from kedge.integrations.vllm.plugin.owner_sets import Owner
from kedge.integrations.vllm.plugin.tracked_request import RequestLoad
from kedge.policies.eviction import StepView
from kedge.policies.prefetch import Candidate, is_within, may_replace
from kedge.settings import TierSettings
from kedge.structures.prefixes import first_of
from kedge.workflow.forecast import AgentKey

MAX_LOADS = 3
"""Loads on demand for one request, whose blocks may be evicted after each; then it computes what it lacks."""


class HostLoads:
    """The policy of loads. Owned by the scheduler."""

    def __init__(
        self, tier: HostTier, prompts: AgentPrompts, idle: IdleSessions, settings: TierSettings, block_size: int
    ) -> None:
        self.tier, self._prompts, self.idle = tier, prompts, idle
        self.settings, self._block_size = settings, block_size
        self.backups = HostBackups(tier, settings.unlabelled_step)
        self._wanting: list[RequestLoad] = []
        """Requests that wait for a load which is not ordered yet, in the order in which vLLM came to them"""
        self._has_room = False
        """Whether a copy has ended, or a request has arrived or left, since the last look for prefetches"""
        self._not_worth_loading = 0

    @property
    def busy(self) -> bool:
        """Whether a copy is under way, or prefetches are to be looked for."""
        return self.tier.busy or self._is_due or self.backups.busy

    @property
    def _is_due(self) -> bool:
        return self._has_room or self._prompts.changed or self.idle.changed

    def counters(self) -> Counter[str]:
        """Return what was counted since the start."""
        counted = Counter(self.tier.counters)
        counted["loads_that_do_not_pay"] = self._not_worth_loading
        counted["host_evictions"] = sum(self.tier.queue.evicted.values())
        return counted

    def look_again(self) -> None:
        """Look for prefetches in this step: requests have changed."""
        self._has_room = True

    def cached_blocks(self, hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """Return how many leading blocks of a prompt are on the device, or are being loaded, and how many after them
        are worth loading from the host.
        """
        first, stop = self.tier.extent(hashes)
        return first, stop - first if self.tier.load_pays(stop - first) else 0

    def must_wait(self, load: RequestLoad, computed: int) -> bool:
        """Return whether a request waits for a load of its next block, and has not waited for `max_wait` yet.

        The request has KV for its first `computed` tokens.
        """
        request = load.request
        block = computed // self._block_size
        if block >= (request.num_tokens - 1) // self._block_size:
            return False
        transfer, is_held = self.tier.next_load(self._needed(load), block)
        if transfer is None and (load.computes or not is_held):
            return False
        if transfer is None:
            self._wanting.append(load)
        elif self._is_impatient(load):
            return False
        else:
            transfer.demanded = True
        load.tokens = range(load.tokens.start or computed, request.num_prompt_tokens)
        return True

    def _is_impatient(self, load: RequestLoad) -> bool:
        """Return whether a request has waited too long for its load, or for room for one: then it computes."""
        now = time.monotonic()
        load.waiting_since = now if load.waiting_since is None else load.waiting_since
        is_late = now - load.waiting_since > self.settings.max_wait
        load.computes = load.computes or is_late
        return is_late

    # once per step --------------------------------------------------------------------------------------------

    def copies(self, requests: Iterable[RequestLoad], idle: bool) -> tuple[Copy, ...]:
        """Return the copies of this step: demands first, then prefetches, those of idle sessions only while no request
        waits. `idle`: no token is scheduled.
        """
        self.backups.go_on()
        self._demand(idle)
        if self._is_due:
            self._has_room = self._prompts.changed = self.idle.changed = False
            requests = tuple(requests)
            self._load_ahead(requests)
            self._prefetch()
            if all(one.is_admitted for one in requests):
                self.idle.start(self.settings.prefetch_jobs - self.tier.prefetching)
        return self.tier.take_copies()

    def finished(self, history: FinishedHistory) -> None:
        """Take the history that a session has on the device at the end of a turn."""
        self.idle.ended(history.session, history.hashes)
        self.backups.history(history)

    def preempted(self, load: RequestLoad) -> None:
        """Take that a request waits again; nothing is loaded ahead of its turn."""
        load.is_admitted, load.is_ahead = False, True

    def _demand(self, idle: bool) -> None:
        """Order the loads that requests wanted in this step, in the order of service.

        The first one's may evict all that is free, as its computing would; the others only what is needed later, and
        they wait until fewer than `copy_jobs` loads are under way.
        """
        wanting, self._wanting = self._wanting, []
        for place, load in enumerate(wanting):
            if place and self.tier.loads >= self.settings.copy_jobs:
                break
            hashes = self._needed(load)
            first, stop = self.tier.extent(hashes)
            if not self.tier.load_pays(stop - first):
                load.computes = True
                self._not_worth_loading += 1
            elif self.tier.load(hashes, Purpose.DEMAND, load.owner, self._may_evict(load.owner if place else None)):
                load.orders += 1
                load.computes = load.orders == MAX_LOADS
            elif not place:
                load.computes = self._is_impatient(load) or (idle and not self.tier.busy)

    def _needed(self, load: RequestLoad) -> Sequence[BlockHash]:
        """Return the hashes of the blocks that a request does not compute: all but the one with its last token."""
        return first_of(load.request.block_hashes, (load.request.num_tokens - 1) // self._block_size)

    def _may_evict(self, owner: Owner | None) -> Callable[[StepView], bool]:
        """Return what a session's load may evict: what is needed later. A load without an owner may evict all."""
        queue: StepFreeQueue = self.tier.device.free_block_queue
        if owner is None or not queue.has_step(owner):
            return lambda _: True
        return partial(may_replace, step=queue.step_of(owner), virtual_step=self.settings.unlabelled_step)

    def _load_ahead(self, requests: Iterable[RequestLoad]) -> None:
        """Load what the next sessions in the queue have on the host, before vLLM looks at them."""
        slots = self.settings.prefetch_jobs - self.tier.prefetching
        waiting = (one for one in requests if one.owner is not None and not (one.is_admitted or one.is_ahead))
        for load in itertools.islice(waiting, max(0, slots)):
            hashes = self._needed(load)
            first, stop = self.tier.extent(hashes)
            if first < stop and self.tier.load_pays(stop - first):
                may_evict = self._may_evict(load.owner)
                load.is_ahead = self.tier.load(hashes, Purpose.PREFETCH, load.owner, may_evict) is not None

    def _prefetch(self) -> None:
        """Load the fixed prompts of the agents that run next, soonest first, over what is needed strictly later."""
        settings = self.settings
        slots = settings.prefetch_jobs - self.tier.prefetching
        for candidate in sorted(self._candidates(), key=lambda one: one.order):
            if slots <= 0:
                break
            transfer = self.tier.load(
                self._prompts.prompts[candidate.node],
                Purpose.PREFETCH,
                candidate.node,
                partial(candidate.may_replace, virtual_step=settings.unlabelled_step),
                settings.decode_reserve,
            )
            slots -= transfer is not None

    def _candidates(self) -> Iterator[Candidate[AgentKey]]:
        for key, hashes in self._prompts.prompts.items():
            next_run = self._prompts.steps.get(key)
            if next_run is None or not is_within(next_run.steps, self.settings.prefetch_window):
                continue
            # Tails are evicted first, so with its last block on the device all of a prompt is.
            if hashes and not has_end(self.tier.device, hashes):
                first, stop = self.tier.extent(hashes)
                yield Candidate(key, next_run.steps, next_run.probability, stop - first)

    def on_reports(self, copies: Mapping[int, CopyResult], computed: tuple[int, float]) -> None:
        """Take the workers' results of copies, and how many tokens they computed in how many seconds."""
        for copy_id, result in copies.items():
            self.tier.on_copied(copy_id, result)
        self.tier.cost.compute.observe(*computed)
        self._has_room = self._has_room or bool(copies)

    def clear(self) -> None:
        """Empty the host tier."""
        self.tier.clear()
        self.idle.clear()
