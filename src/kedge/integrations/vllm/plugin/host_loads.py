"""When KV moves from the host to the device, on demand and before it is needed, and when it is backed up there."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash

from kedge.cache import Copied, Copy, Direction
from kedge.cache.copies import Purpose
from kedge.cache.owners import Owner, Prefetcher
from kedge.errors import PlanError
from kedge.integrations.vllm.plugin.block_pools import has_end, own_known, own_prefix
from kedge.integrations.vllm.plugin.host_tier import HostTier
from kedge.integrations.vllm.plugin.owners import AgentPrompts
from kedge.integrations.vllm.plugin.requests import LiveRequest
from kedge.policies.eviction import StepView, distance
from kedge.policies.prefetch import COPY_JOBS, MAX_WAIT_S, is_awaited
from kedge.policies.sessions import SessionKey
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
        self._histories: dict[Owner, Sequence[BlockHash]] = {}
        """Of sessions, oldest first; as many blocks in all as the host has"""
        self._remembered = 0
        """Blocks of the histories"""
        self.settings, self._block_size, self._is_trusted = settings, block_size, is_trusted
        tier.owners.followers.append(self._follow)
        self.prefetcher = Prefetcher(tier.owners, self._lacking, self._prefetch, settings.unlabelled_step)
        self._wanting: list[LiveRequest] = []
        """Requests that wait for a load which is not ordered yet, in the order in which vLLM came to them"""

    @property
    def busy(self) -> bool:
        """Whether a copy is under way, or prefetches are to be looked for."""
        return self.tier.busy or self.prefetcher.due

    def counters(self) -> Counter[str]:
        """Return what was counted since the start."""
        return self.tier.counters + Counter(host_evictions=self.tier.queue.evicted.total())

    def look_again(self) -> None:
        """Look for prefetches in this step: requests have changed, or what is on the device."""
        self.prefetcher.due = True

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
        live.loaded = range(min([computed, *live.loaded[:1]]), request.num_prompt_tokens)
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
        if self.prefetcher.due:
            self._load_ahead([one for one in requests if one.may_load and not one.is_admitted])
        return self.tier.take_copies()

    # histories ------------------------------------------------------------------------------------------------

    def _follow(self, owner: Owner, _: float | None, step: float | None) -> None:
        if step is None:
            self._forget(owner)

    def _remember(self, session: Owner, hashes: Sequence[BlockHash]) -> None:
        self._forget(session)
        self._histories[session] = hashes
        self._remembered += len(hashes)
        while self._remembered > self.tier.host.num_gpu_blocks:
            self._forget(next(iter(self._histories)))

    def _forget(self, session: Owner) -> None:
        self._remembered -= len(self._histories.pop(session, ()))

    # backups --------------------------------------------------------------------------------------------------

    def back_up_prompt(self, hashes: Sequence[BlockHash], owner: Owner) -> None:
        """Order the backup of the fixed prompt of an agent that has a step."""
        own_prefix(self.tier.host, hashes, owner)
        self._back_up(hashes, owner)

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
        self._back_up(hashes, session, held)

    def _back_up(self, hashes: Sequence[BlockHash], owner: Owner, start: int = 0) -> None:
        """Order the backup of what `owner` needs, from `start` on, over what is needed no sooner."""
        if (step := self.tier.owners.step(owner)) is not None:
            far = self.settings.unlabelled_step
            self.tier.back_up(hashes, owner, lambda victim: distance(victim, far) >= step, start)

    # loads ----------------------------------------------------------------------------------------------------

    def _demand(self, idle: bool) -> None:
        """Order the loads that requests wanted in this step, in the order of service.

        The first one's may evict all that is free, as its computing would; the others only what is needed later, and
        they wait until fewer than `COPY_JOBS` loads are under way.
        """
        wanting, self._wanting = self._wanting, []
        for place, live in enumerate(wanting):
            if place and len(self.tier.transfers.pending(Direction.LOAD)) >= COPY_JOBS:
                break
            hashes = self._needed(live)
            first, stop = self.tier.extent(hashes)
            if not self.tier.load_pays(stop - first):
                live.computes = True
                self.tier.counters["loads_that_do_not_pay"] += 1
                continue
            may_evict = self.prefetcher.may_evict(live.session if place else None)
            if not self.tier.load(hashes, Purpose.DEMAND, live.session, may_evict) and not place:
                live.computes = self._is_impatient(live) or (idle and not self.tier.busy)

    def _needed(self, live: LiveRequest) -> Sequence[BlockHash]:
        """Return the hashes of the blocks that a request does not compute: all but the one with its last token."""
        return first_of(live.request.block_hashes, (live.request.num_tokens - 1) // self._block_size)

    def _load_ahead(self, waiting: Sequence[LiveRequest]) -> None:
        """Load what the next sessions in the queue have on the host, before vLLM looks at them. Then what is needed
        within the window: fixed prompts of agents and, while no request waits, histories of sessions.
        """
        sessions = (one for one in waiting if one.session and not one.is_ahead)
        for live in itertools.islice(sessions, self.prefetcher.left(self.tier.transfers.pending())):
            hashes = self._needed(live)
            if self.cached_blocks(hashes)[1]:
                may_evict = self.prefetcher.may_evict(live.session)
                live.is_ahead = self.tier.load(hashes, Purpose.PREFETCH, live.session, may_evict) is not None
        among = self._prompts.prompts if waiting or not self._is_trusted() else None
        self.prefetcher.start(self.tier.transfers.pending(), among)

    def _needs(self, owner: Any) -> Sequence[BlockHash]:
        """Return what an owner needs: a fixed prompt, or the history of a session none of whose requests waits."""
        is_idle = not is_awaited(self.tier.owners.step(owner))
        return self._prompts.prompts.get(owner) or (self._histories.get(owner) if is_idle else None) or ()

    def _lacking(self, owner: Owner) -> int:
        """Return how many blocks a prefetch would load. Nobody waits for it, so that it pays."""
        hashes = self._needs(owner)
        if has_end(self.tier.device, hashes):  # tails are evicted first, so that all of it is there
            return 0
        first, stop = self.tier.extent(hashes)
        return stop - first

    def _prefetch(self, owner: Owner, may_evict: Callable[[StepView], bool]) -> None:
        self.tier.load(self._needs(owner), Purpose.PREFETCH, owner, may_evict)

    def on_reports(self, copies: Iterable[Copied], computed: tuple[int, float]) -> None:
        """Take the ends of copies on all ranks, and how many tokens they computed in how many seconds."""
        landed = [self.tier.on_copied(copied) for copied in copies]
        self.tier.transfers.cost.computed(*computed)
        self.prefetcher.due |= any(landed)

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
