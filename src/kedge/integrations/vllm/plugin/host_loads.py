"""When KV moves from the host to the device: when a request arrives, on demand, and by forecast. And its backups."""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from kedge.cache import Copy
from kedge.cache.copies import Purpose
from kedge.errors import PlanError
from kedge.integrations.vllm.plugin.agent_prompts import AgentPrompts
from kedge.integrations.vllm.plugin.block_pools import has_end, own_known, own_prefix
from kedge.integrations.vllm.plugin.free_queue import Owner, StepFreeQueue
from kedge.integrations.vllm.plugin.host_tier import HostTier
from kedge.integrations.vllm.plugin.messages import CopyResult
from kedge.integrations.vllm.plugin.requests import LiveRequest
from kedge.integrations.vllm.plugin.settings import REMEMBERED
from kedge.policies.eviction import StepView, distance
from kedge.policies.prefetch import (
    COPY_JOBS,
    MAX_WAIT_S,
    PREFETCH_JOBS,
    PREFETCH_WINDOW,
    Candidate,
    is_within,
    may_replace,
)
from kedge.policies.sessions import NextRuns, SessionKey
from kedge.settings import TierSettings
from kedge.structures.bounded import BoundedDict
from kedge.structures.heaps import LazyHeap
from kedge.structures.prefixes import first_of
from kedge.workflow.forecast import AgentKey

SHARE = 2
"""One of so many device blocks may be held by backups."""
MAX_LOADS = 3
"""Loads on demand for one request, whose blocks may be evicted after each; then it computes what it lacks."""


@dataclass(frozen=True, slots=True)
class FinishedHistory:
    """What a session has on the device at the end of a turn."""

    session: SessionKey
    hashes: Sequence[BlockHash]
    """Of its blocks with KV"""
    computed_from: int
    """Index of the first block that the turn computed"""
    left: Sequence[KVCacheBlock] = ()
    """Blocks that were its own before the turn, and are not any more"""


class HostBackups:
    """Orders backups into the host tier, over blocks there that are needed no sooner. Owned by the scheduler."""

    def __init__(self, tier: HostTier, unlabelled_step: float) -> None:
        self._tier, self._unlabelled_step = tier, unlabelled_step
        self._limit = max(1, tier.device.num_gpu_blocks // SHARE)
        self._pending: BoundedDict[Owner, tuple[Sequence[BlockHash], int]] = BoundedDict(REMEMBERED)
        """Histories, and the index from which on they are not done"""

    @property
    def busy(self) -> bool:
        """Whether histories wait for a backup."""
        return bool(self._pending)

    def fixed_prompt(self, hashes: Sequence[BlockHash], owner: Owner, step: float) -> None:
        """Order the backup of an agent's fixed prompt, which is needed in `step` steps."""
        own_prefix(self._tier.host, hashes, owner)
        self._tier.back_up(hashes, owner, partial(self._is_no_sooner, step))

    def history(self, history: FinishedHistory) -> None:
        """Order the backup of a session whose turn has ended.

        O(blocks that the host lacks, or that change their owners there, + log n).
        """
        hashes, owner = history.hashes, history.session
        if history.left:
            self._leave(history.left, owner)
        held, owned = self._tier.prefixes(hashes, owner)
        if owned < held:
            own_known(self._tier.host, self._tier.groups.needed(hashes[:held], owned).keys, owner)
        self._pending[owner] = (hashes, min(held, history.computed_from))
        self.go_on()

    def _leave(self, blocks: Sequence[KVCacheBlock], owner: Owner) -> None:
        """Give up on the host what a session has left behind on the device, where several blocks may hold the same."""
        known = self._tier.host.cached_block_hash_to_block
        found = [known.get_one_block(one) for one in {block.block_hash: None for block in blocks if block.block_hash}]
        self._tier.queue.leave([block for block in found if block is not None and not block.ref_cnt], owner)

    def go_on(self) -> None:
        """Order the next backups, as far as they may hold device blocks. Call this once per step."""
        while self._pending and (room := self._limit - self._tier.backing_up) > 0:
            owner, (hashes, start) = self._pending.popitem(last=False)
            if self._tier.queue.has_step(owner):
                may_evict = partial(self._is_no_sooner, self._tier.queue.step_of(owner))
                done = self._tier.back_up(hashes, owner, may_evict, start, room)
                if done < self._tier.groups.count(len(hashes)):
                    self._pending[owner] = (hashes, done)

    def _is_no_sooner(self, step: float, victim: StepView) -> bool:
        return distance(victim, self._unlabelled_step) >= step


class IdleSessions:
    """Idle sessions within the window whose histories have left the device, soonest first. Owned by the scheduler.

    It hears of steps that change and of blocks that are evicted: O(changed sessions x log n), never O(all sessions).
    """

    def __init__(self, tier: HostTier, settings: TierSettings, is_trusted: Callable[[], bool] = lambda: True) -> None:
        """Begin without sessions. `is_trusted` returns whether sessions, and not LRU, rule the device."""
        self._tier, self._settings, self._is_trusted = tier, settings, is_trusted
        self._most = tier.host.num_gpu_blocks
        self._histories: OrderedDict[Owner, list[BlockHash]] = OrderedDict()
        """Oldest first; as many blocks in all as the host has"""
        self._blocks = 0
        self._near: dict[Owner, float] = {}
        """Steps of idle sessions within the window"""
        self._targets: LazyHeap[Owner] = LazyHeap(lambda session: (self._near[session],), self._is_target)
        self.changed = False
        """Whether a session has become a target since the last look"""

    def __len__(self) -> int:
        """Return the number of blocks whose hashes are kept."""
        return self._blocks

    # what changes ---------------------------------------------------------------------------------------------

    def ended(self, session: Owner, hashes: Sequence[BlockHash]) -> None:
        """Take the history of a session whose turn has ended, which is on the device. O(blocks that it has added)."""
        known = self._histories.pop(session, [])
        self._blocks += len(hashes) - len(known)
        if not known or hashes[len(known) - 1 : len(known)] != known[-1:]:
            known = []
        known.extend(hashes[len(known) :])
        self._histories[session] = known
        while self._blocks > self._most:
            self._drop(next(iter(self._histories)))

    def on_steps(self, changes: NextRuns) -> None:
        """Take changed steps of sessions. A step below 0 is that of a session whose request waits or runs."""
        for session, next_run in changes.items():
            self._near.pop(session, None)
            if next_run is None:
                self._drop(session)
            elif next_run[0] >= 0 and is_within(next_run[0], PREFETCH_WINDOW):
                self._near[session] = next_run[0]
                if self._has_left(session):
                    self._consider(session)

    def on_evicted(self, owners: Iterable[Owner]) -> None:
        """Take the owners of blocks that are leaving the device."""
        for owner in owners:
            self._consider(owner)

    def on_reset(self) -> None:
        """Take that the device is empty. O(sessions within the window)."""
        self.on_evicted(tuple(self._near))

    def clear(self) -> None:
        """Forget all histories: the host is empty."""
        self._histories.clear()
        self._blocks = 0

    def _drop(self, session: Owner) -> None:
        self._blocks -= len(self._histories.pop(session, ()))

    def _consider(self, session: Owner) -> None:
        if self._is_target(session):
            self._targets.push(session)
            self.changed = True

    def _is_target(self, session: Owner) -> bool:
        return session in self._near and session in self._histories

    def _has_left(self, session: Owner) -> bool:
        """Return whether it has a history that is not on the device and not on its way: the end of it goes first."""
        hashes = self._histories.get(session)
        if not hashes or self._tier.loading(hashes[-1]):
            return False
        return not has_end(self._tier.device, hashes)

    # once per step --------------------------------------------------------------------------------------------

    def start(self, slots: int) -> None:
        """Order up to `slots` loads, soonest first. Those without room are tried again in the next look."""
        self.changed = False
        if not self._is_trusted():
            return
        refused: list[Owner] = []
        while slots > len(refused) and (session := self._targets.pop()) is not None:
            hashes = self._histories[session]
            first, stop = self._tier.extent(hashes)
            if not self._has_left(session) or first == stop or not self._tier.load_pays(stop - first):
                continue
            unlabelled = self._settings.unlabelled_step
            may_evict = partial(may_replace, step=self._near[session], virtual_step=unlabelled)
            if self._tier.load(hashes, Purpose.PREFETCH, session, may_evict):
                slots -= 1
            else:
                refused.append(session)
        for session in refused:
            self._targets.push(session)

    def check_integrity(self) -> None:
        """Raise `PlanError` unless the blocks of the histories sum to what is counted and are within the bound."""
        blocks = sum(map(len, self._histories.values()))
        if blocks != self._blocks or blocks > self._most:
            raise PlanError("histories", blocks, f"{self._blocks} are counted, of at most {self._most}")


class HostLoads:
    """The policy of loads. Owned by the scheduler."""

    def __init__(
        self, tier: HostTier, prompts: AgentPrompts, idle: IdleSessions, settings: TierSettings, block_size: int
    ) -> None:
        self.tier, self._prompts, self.idle = tier, prompts, idle
        self.settings, self._block_size = settings, block_size
        self.backups = HostBackups(tier, settings.unlabelled_step)
        self._wanting: list[LiveRequest] = []
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

    def must_wait(self, live: LiveRequest, computed: int) -> bool:
        """Return whether a request waits for a load of its next block, and has not waited for `MAX_WAIT_S` yet.

        The request has KV for its first `computed` tokens.
        """
        request = live.request
        block = computed // self._block_size
        if block >= (request.num_tokens - 1) // self._block_size:
            return False
        transfer, is_held = self.tier.next_load(self._needed(live), block)
        if transfer is None and (live.computes or not is_held):
            return False
        if transfer is None:
            self._wanting.append(live)
        elif self._is_impatient(live):
            return False
        else:
            transfer.demanded = True
        live.loaded = range(live.loaded.start or computed, request.num_prompt_tokens)
        return True

    def _is_impatient(self, live: LiveRequest) -> bool:
        """Return whether a request has waited too long for its load, or for room for one: then it computes."""
        now = time.monotonic()
        live.waiting_since = now if live.waiting_since is None else live.waiting_since
        is_late = now - live.waiting_since > MAX_WAIT_S
        live.computes = live.computes or is_late
        return is_late

    # once per step --------------------------------------------------------------------------------------------

    def copies(self, requests: Iterable[LiveRequest], idle: bool) -> tuple[Copy, ...]:
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
            if all(one.is_admitted or not one.may_load for one in requests):
                self.idle.start(PREFETCH_JOBS - self.tier.prefetching)
        return self.tier.take_copies()

    def finished(self, history: FinishedHistory) -> None:
        """Take the history that a session has on the device at the end of a turn."""
        self.idle.ended(history.session, history.hashes)
        self.backups.history(history)

    def _demand(self, idle: bool) -> None:
        """Order the loads that requests wanted in this step, in the order of service.

        The first one's may evict all that is free, as its computing would; the others only what is needed later, and
        they wait until fewer than `COPY_JOBS` loads are under way.
        """
        wanting, self._wanting = self._wanting, []
        for place, live in enumerate(wanting):
            if place and self.tier.loads >= COPY_JOBS:
                break
            hashes = self._needed(live)
            first, stop = self.tier.extent(hashes)
            if not self.tier.load_pays(stop - first):
                live.computes = True
                self._not_worth_loading += 1
            elif self.tier.load(hashes, Purpose.DEMAND, live.session, self._may_evict(live.session if place else None)):
                live.loads += 1
                live.computes = live.loads == MAX_LOADS
            elif not place:
                live.computes = self._is_impatient(live) or (idle and not self.tier.busy)

    def _needed(self, live: LiveRequest) -> Sequence[BlockHash]:
        """Return the hashes of the blocks that a request does not compute: all but the one with its last token."""
        return first_of(live.request.block_hashes, (live.request.num_tokens - 1) // self._block_size)

    def _may_evict(self, owner: Owner | None) -> Callable[[StepView], bool]:
        """Return what a session's load may evict: what is needed later. A load without an owner may evict all."""
        queue: StepFreeQueue = self.tier.device.free_block_queue
        if owner is None or not queue.has_step(owner):
            return lambda _: True
        return partial(may_replace, step=queue.step_of(owner), virtual_step=self.settings.unlabelled_step)

    def _load_ahead(self, requests: Iterable[LiveRequest]) -> None:
        """Load what the next sessions in the queue have on the host, before vLLM looks at them."""
        slots = PREFETCH_JOBS - self.tier.prefetching
        waiting = (one for one in requests if one.session and not (one.is_admitted or one.is_ahead))
        for live in itertools.islice(waiting, max(0, slots)):
            hashes = self._needed(live)
            first, stop = self.tier.extent(hashes)
            if first < stop and self.tier.load_pays(stop - first):
                may_evict = self._may_evict(live.session)
                live.is_ahead = self.tier.load(hashes, Purpose.PREFETCH, live.session, may_evict) is not None

    def _prefetch(self) -> None:
        """Load the fixed prompts of the agents that run next, soonest first, over what is needed strictly later."""
        settings, candidates = self.settings, list[Candidate[AgentKey]]()
        for key, hashes in self._prompts.prompts.items():
            next_run = self._prompts.steps.get(key)
            if next_run is None or not is_within(next_run.steps, PREFETCH_WINDOW):
                continue
            # Tails are evicted first, so with its last block on the device all of a prompt is.
            if hashes and not has_end(self.tier.device, hashes):
                first, stop = self.tier.extent(hashes)
                candidates.append(Candidate(key, next_run.steps, next_run.probability, stop - first))
        slots = PREFETCH_JOBS - self.tier.prefetching
        for candidate in sorted(candidates, key=lambda one: one.order):
            if slots <= 0:
                break
            hashes = self._prompts.prompts[candidate.node]
            may_evict = partial(candidate.may_replace, virtual_step=settings.unlabelled_step)
            slots -= self.tier.load(hashes, Purpose.PREFETCH, candidate.node, may_evict) is not None

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
