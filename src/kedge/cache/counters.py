"""What the cache did since its start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from kedge.cache.copies import Outcome, Purpose
from kedge.cache.node import DEVICE, Transfer
from kedge.cache.radix_tree import Removed


def _no_transfers() -> dict[str, dict[str, int]]:
    return {purpose.value: {outcome.value: 0 for outcome in Outcome} for purpose in Purpose}


@dataclass(slots=True)
class CacheStats:
    """Counts since the start, and blocks by owner as of `snapshot`."""

    hits: int = 0
    """Admissions that were allowed to reuse and found something."""
    misses: int = 0
    """Admissions that were allowed to reuse and found nothing."""
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    """Those of the hit tokens whose load a request had to wait for."""
    prefetched_hit_tokens: int = 0
    """Those of the hit tokens that a prefetch had brought in time."""
    copied_hit_tokens: int = 0
    """Those of the hit tokens that were copied from a block that goes on differently."""
    missed_tokens: int = 0
    evictions: int = 0
    """Blocks evicted from the device."""
    host_evictions: int = 0
    blocks_loaded: int = 0
    blocks_offloaded: int = 0
    bytes_loaded: int = 0
    bytes_offloaded: int = 0
    transfers: Mapping[str, dict[str, int]] = field(default_factory=_no_transfers)
    """How many ended how, by `Purpose` and `Outcome`; a prefetch that landed ends with its first hit or eviction."""
    failed_copies: int = 0
    skipped_backups: int = 0
    """For want of host blocks."""
    denied_loads: int = 0
    """Loads that found no room on the device at the time."""
    free_blocks: int = 0
    cached_blocks: int = 0
    leased_blocks: int = 0
    loading_blocks: int = 0
    """Device blocks that a transfer is writing, or is going to."""
    host_free_blocks: int = 0
    host_cached_blocks: int = 0
    offloading_blocks: int = 0
    """Host blocks that a transfer is writing, or is going to."""

    def lookup(self, exact: int, missed: int, copied: int) -> None:
        """Count an admission that was allowed to reuse: it found `exact` tokens, of which some were `copied`, and
        missed the others.
        """
        self.copied_hit_tokens += copied
        self.hits += exact > 0
        self.misses += exact == 0
        self.hit_tokens += exact
        self.missed_tokens += missed

    def evicted(self, removed: Iterable[Removed]) -> None:
        """Count evicted blocks by tier."""
        for one in removed:
            if one.tier is DEVICE:
                self.evictions += len(one.blocks)
            else:
                self.host_evictions += len(one.blocks)

    def ended(self, transfer: Transfer, outcome: Outcome) -> None:
        """Record a transfer's outcome; the first one stands."""
        if transfer.outcome is None:
            transfer.outcome = outcome
            self.transfers[transfer.purpose.value][outcome.value] += 1

    def snapshot(self, **now: Any) -> CacheStats:
        """Return a copy of the counts, with these figures of now."""
        return replace(deepcopy(self), **now)
