"""When KV moves between device and host: backups of fixed prompts, loads on demand, and prefetches by forecast."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from kedge.cache import Copy
from kedge.cache.copies import Purpose
from kedge.integrations.vllm.plugin.agent_prompts import AgentPrompts
from kedge.integrations.vllm.plugin.block_pools import cached_block, own_prefix
from kedge.integrations.vllm.plugin.host_tier import HostTier
from kedge.integrations.vllm.plugin.messages import CopyResult
from kedge.integrations.vllm.plugin.tracked_request import TrackedRequest
from kedge.policies.eviction import distance
from kedge.policies.prefetch import Candidate, is_within
from kedge.settings import TierSettings
from kedge.workflow.forecast import AgentKey


class HostLoads:
    """The policy of the host tier. Owned by the scheduler."""

    def __init__(self, tier: HostTier, prompts: AgentPrompts, settings: TierSettings, block_size: int) -> None:
        self.tier, self._prompts, self.settings, self._block_size = tier, prompts, settings, block_size
        self._has_room = False
        """Whether a copy has ended since the last look for prefetches"""
        self._not_worth_loading = 0

    @property
    def busy(self) -> bool:
        """Whether a copy is under way, or prefetches are to be looked for."""
        return self.tier.busy or self._is_due

    @property
    def _is_due(self) -> bool:
        return self._has_room or self._prompts.changed

    def counters(self) -> Counter[str]:
        """Return what was counted since the start."""
        counted = Counter(self.tier.counters)
        counted["loads_that_do_not_pay"] = self._not_worth_loading
        counted["host_evictions"] = sum(self.tier.queue.evicted.values())
        return counted

    def back_up(self, key: AgentKey) -> None:
        """Order the offload of an agent's fixed prompt, over host blocks that are needed no sooner."""
        step, virtual = self._prompts.steps[key].steps, self.settings.unlabelled_step
        hashes = self._prompts.prompts[key]
        own_prefix(self.tier.host, hashes, key)
        self.tier.back_up(hashes, key, lambda victim: distance(victim, virtual) >= step)

    def must_wait(self, tracked: TrackedRequest, computed: int) -> bool:
        """Return whether a request waits for a load of its next block, and has not waited for `max_wait` yet.

        The request has KV for its first `computed` tokens.
        """
        request = tracked.request
        block = computed // self._block_size
        if block >= (request.num_tokens - 1) // self._block_size:
            return False
        block_hash = request.block_hashes[block]
        transfer = self.tier.loading(block_hash)
        if transfer is None and (tracked.load_ordered or not self.tier.holds(block_hash)):
            tracked.wanted_from = None
            return False
        if transfer:
            transfer.demanded = True
        else:
            tracked.wanted_from = block
        return self._has_patience(tracked, computed)

    def _has_patience(self, tracked: TrackedRequest, computed: int) -> bool:
        now = time.monotonic()
        tracked.waiting_since = now if tracked.waiting_since is None else tracked.waiting_since
        if now - tracked.waiting_since <= self.settings.max_wait:
            tracked.host = range(tracked.host.start or computed, tracked.request.num_prompt_tokens)
            return True
        tracked.wanted_from, tracked.load_ordered = None, True
        return False

    # once per step --------------------------------------------------------------------------------------------

    def copies(self, requests: Iterable[TrackedRequest], idle: bool) -> tuple[Copy, ...]:
        """Return the copies of this step: demands first, then prefetches. `idle`: no token is scheduled."""
        self._demand(requests, idle)
        if self._is_due:
            self._has_room = self._prompts.changed = False
            self._prefetch()
        return self.tier.take_copies()

    def _demand(self, requests: Iterable[TrackedRequest], idle: bool) -> None:
        """Order the loads that waiting requests want. Without room for one, an idle engine lets its request compute."""
        for tracked in [one for one in requests if one.wanted_from is not None]:
            request = tracked.request
            hashes = request.block_hashes[: (request.num_tokens - 1) // self._block_size]
            _, wanted = self.tier.missing(hashes)
            if not self.tier.load_pays(len(wanted)):
                tracked.load_ordered, tracked.wanted_from = True, None
                self._not_worth_loading += 1
                continue
            transfer = self.tier.load(hashes, Purpose.DEMAND, None, lambda _: True)
            if transfer or (idle and not self.tier.busy):
                tracked.load_ordered, tracked.wanted_from = True, None

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
            if hashes and cached_block(self.tier.device, hashes[-1]) is None:
                size = len(self.tier.missing(hashes)[1])
                yield Candidate(key, next_run.steps, next_run.probability, size)

    def on_reports(self, copies: Mapping[int, CopyResult], computed: tuple[int, float]) -> None:
        """Take the workers' results of copies, and how many tokens they computed in how many seconds."""
        for copy_id, result in copies.items():
            self.tier.on_copied(copy_id, result)
        self.tier.cost.compute.observe(*computed)
        self._has_room = self._has_room or bool(copies)

    def clear(self) -> bool:
        """Empty the host tier. Returns False, having changed nothing, while a copy is under way."""
        return self.tier.clear()
