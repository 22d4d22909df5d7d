"""When KV moves from the host to the device, on demand and before it is needed, and when it is backed up there."""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from vllm.v1.core.kv_cache_utils import BlockHash

from kedge.cache import Copied, Copy
from kedge.cache.copies import Purpose
from kedge.errors import PlanError
from kedge.integrations.vllm.plugin.block_pools import has_end, own_known, own_prefix
from kedge.integrations.vllm.plugin.free_queue import Owner, StepFreeQueue
from kedge.integrations.vllm.plugin.host_tier import HostTier
from kedge.integrations.vllm.plugin.owners import AgentPrompts
from kedge.integrations.vllm.plugin.requests import LiveRequest
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
from kedge.structures.prefixes import first_of


class HostLoads:
    """The policy of loads, and of backups over host blocks that are needed no sooner. Owned by the scheduler."""

    def __init__(
        self,
        tier: HostTier,
        prompts: AgentPrompts,
        settings: TierSettings,
        block_size: int,
        is_trusted: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_trusted` returns whether sessions, and not LRU, rule the device."""
        self.tier, self._prompts = tier, prompts
        self._histories: OrderedDict[Owner, Sequence[BlockHash]] = OrderedDict()
        """Of sessions, oldest first; as many blocks in all as the host has"""
        self._remembered = 0
        """Blocks of the histories"""
        self.settings, self._block_size, self._is_trusted = settings, block_size, is_trusted
        self._wanting: list[LiveRequest] = []
        """Requests that wait for a load which is not ordered yet, in the order in which vLLM came to them"""
        self._has_room = False
        """Whether a copy has ended, a request has arrived or left, or a session has come near, since the last look for
        prefetches"""

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
        counted["host_evictions"] = sum(self.tier.queue.evicted.values())
        return counted

    def look_again(self) -> None:
        """Look for prefetches in this step: requests have changed, or what is on the device."""
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
        live.computes = live.computes or (live.awaited is not None and live.awaited.has_failed)
        if transfer is None and (live.computes or not is_held):
            return False
        if transfer is None:
            self._wanting.append(live)
        elif self._is_impatient(live):
            return False
        else:
            transfer.demanded, live.awaited = True, transfer
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
        """Return the copies of this step: demands first, then prefetches. `idle`: no token is scheduled."""
        self._demand(idle)
        if self._is_due:
            self._has_room = self._prompts.changed = False
            self._load_ahead([one for one in requests if one.may_load and not one.is_admitted])
        return self.tier.take_copies()

    # histories ------------------------------------------------------------------------------------------------

    def on_steps(self, changes: NextRuns) -> None:
        """Take changed steps of sessions. Below 0 is that of a session whose request waits or runs."""
        for session, next_run in changes.items():
            if next_run is None:
                self._forget(session)
            elif (hashes := self._histories.get(session)) and _is_near(next_run[0]):
                self._has_room = self._has_room or not has_end(self.tier.device, hashes)

    def _remember(self, session: Owner, hashes: Sequence[BlockHash]) -> None:
        self._forget(session)
        self._histories[session] = hashes
        self._remembered += len(hashes)
        while self._remembered > self.tier.host.num_gpu_blocks:
            self._forget(next(iter(self._histories)))

    def _forget(self, session: Owner) -> None:
        self._remembered -= len(self._histories.pop(session, ()))

    # backups --------------------------------------------------------------------------------------------------

    def back_up_prompt(self, hashes: Sequence[BlockHash], owner: Owner, step: float) -> None:
        """Order the backup of an agent's fixed prompt, which is needed in `step` steps."""
        own_prefix(self.tier.host, hashes, owner)
        self.tier.back_up(hashes, owner, partial(self._is_no_sooner, step))

    def finished(self, session: SessionKey, hashes: Sequence[BlockHash]) -> None:
        """Take the history that a session has on the device at the end of a turn, the hashes of its blocks with KV, and
        order its backup; what finds no room is backed up with the next turn. O(blocks that the host lacks, or that
        change their owners there, + log n).
        """
        self._remember(session, hashes)
        queue = self.tier.queue
        held, owned = self.tier.prefixes(hashes, session)
        if owned != queue.members_of(session):  # as after a prompt that leaves a part of the history out
            queue.leave(session)
            owned = 0
        if owned < held:
            own_known(self.tier.host, self.tier.groups.needed(hashes[:held], owned).keys, session)
        if queue.has_step(session):
            self.tier.back_up(hashes, session, partial(self._is_no_sooner, queue.step_of(session)), held)

    def _is_no_sooner(self, step: float, victim: StepView) -> bool:
        return distance(victim, self.settings.unlabelled_step) >= step

    # loads ----------------------------------------------------------------------------------------------------

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
                self.tier.counters["loads_that_do_not_pay"] += 1
                continue
            may_evict = self._may_evict(live.session if place else None)
            if not self.tier.load(hashes, Purpose.DEMAND, live.session, may_evict) and not place:
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

    def _load_ahead(self, waiting: Sequence[LiveRequest]) -> None:
        """Load what the next sessions in the queue have on the host, before vLLM looks at them. Then what is needed
        within the window, soonest first, over what is needed strictly later.
        """
        sessions = (one for one in waiting if one.session and not one.is_ahead)
        for live in itertools.islice(sessions, self._slots):
            hashes = self._needed(live)
            if self.cached_blocks(hashes)[1]:
                may_evict = self._may_evict(live.session)
                live.is_ahead = self.tier.load(hashes, Purpose.PREFETCH, live.session, may_evict) is not None
        candidates = sorted(self._candidates(idle=not waiting), key=lambda one: one.order)
        for candidate in candidates[: self._slots]:
            owner, hashes = candidate.node
            may_evict = partial(candidate.may_replace, virtual_step=self.settings.unlabelled_step)
            self.tier.load(hashes, Purpose.PREFETCH, owner, may_evict)

    @property
    def _slots(self) -> int:
        return max(0, PREFETCH_JOBS - self.tier.prefetching)

    def _candidates(self, *, idle: bool) -> Iterator[Candidate[tuple[Owner, Sequence[BlockHash]]]]:
        """Yield what is needed within the window and on the host only: fixed prompts of agents and, while the engine is
        `idle`, as no request waits, histories of sessions. Nobody waits for these loads, so that all of them pay.
        """
        wanted = list[tuple[Owner, Sequence[BlockHash], float, float]]()
        for key, fixed in self._prompts.prompts.items():
            if next_run := self._prompts.steps.get(key):
                wanted.append((key, fixed, next_run.steps, next_run.probability))
        if idle and self._is_trusted():
            queue = self.tier.queue
            steps = ((session, queue.step_of(session)) for session in self._histories if queue.has_step(session))
            wanted += [(session, self._histories[session], step, 1.0) for session, step in steps if _is_near(step)]
        for owner, hashes, step, probability in wanted:
            # Tails are evicted first, so with its last block on the device all of a prompt is.
            if not hashes or not is_within(step, PREFETCH_WINDOW) or has_end(self.tier.device, hashes):
                continue
            first, stop = self.tier.extent(hashes)
            if first < stop:
                yield Candidate((owner, hashes), step, probability, stop - first)

    def on_reports(self, copies: Iterable[Copied], computed: tuple[int, float]) -> None:
        """Take the ends of copies on all ranks, and how many tokens they computed in how many seconds."""
        landed = [self.tier.on_copied(copied) for copied in copies]
        self.tier.cost.compute.observe(*computed)
        # after failures alone nothing has changed: what cannot be copied would be tried again without end
        self._has_room = self._has_room or any(landed)

    def clear(self) -> None:
        """Empty the host tier."""
        self.tier.clear()
        self._histories.clear()
        self._remembered = 0

    def check_integrity(self) -> None:
        """Raise `PlanError` unless the blocks of the histories sum to what is counted and are within the bound."""
        blocks = sum(map(len, self._histories.values()))
        if blocks != self._remembered or blocks > self.tier.host.num_gpu_blocks:
            raise PlanError("histories", blocks, f"{self._remembered} are counted")


def _is_near(step: float) -> bool:
    """Return whether an idle session is needed within the window."""
    return step >= 0 and is_within(step, PREFETCH_WINDOW)
