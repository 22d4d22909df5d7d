"""Prefetches of idle sessions: histories that are needed soon, loaded over what is needed strictly later."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from vllm.v1.core.kv_cache_utils import BlockHash

from kedge.cache.copies import Purpose
from kedge.errors import PlanError
from kedge.integrations.vllm.plugin.block_pools import has_end
from kedge.integrations.vllm.plugin.host_tier import HostTier
from kedge.integrations.vllm.plugin.owner_sets import Owner
from kedge.policies.prefetch import is_within, may_replace
from kedge.policies.sessions import NextRuns
from kedge.settings import TierSettings
from kedge.structures.heaps import LazyHeap


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
            elif next_run[0] >= 0 and is_within(next_run[0], self._settings.prefetch_window):
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
            if not self._is_worth_loading(session):
                continue
            if self._load(session):
                slots -= 1
            else:
                refused.append(session)
        for session in refused:
            self._targets.push(session)

    def _is_worth_loading(self, session: Owner) -> bool:
        if not self._has_left(session):
            return False
        first, stop = self._tier.extent(self._histories[session])
        return first < stop and self._tier.load_pays(stop - first)

    def _load(self, session: Owner) -> bool:
        settings = self._settings
        may_evict = partial(may_replace, step=self._near[session], virtual_step=settings.unlabelled_step)
        hashes = self._histories[session]
        return self._tier.load(hashes, Purpose.PREFETCH, session, may_evict, settings.decode_reserve) is not None

    def check_integrity(self) -> None:
        """Raise `PlanError` unless the blocks of the histories sum to what is counted and are within the bound."""
        blocks = sum(map(len, self._histories.values()))
        if blocks != self._blocks or blocks > self._most:
            raise PlanError("histories", blocks, f"{self._blocks} are counted, of at most {self._most}")
