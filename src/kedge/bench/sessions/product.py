"""Kedge's own cache as the open loop drives it: what it is told, and whether it has a host tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kedge.bench.sessions.composing import Arrival
from kedge.bench.sessions.replay import CacheReplay, FixedPromptHints, ReplayHooks
from kedge.bench.workflow.cache import NoCopier
from kedge.cache import CacheManager
from kedge.policies.eviction import policy_of
from kedge.settings import TierSettings


@dataclass(frozen=True)
class ProductCase:
    """What Kedge is told of requests besides their tokens, and the size of its host tier."""

    tells_ids: bool = False
    tells_next: bool = False
    """Whether the time of a session's next request is told when it has been answered."""
    tells_fixed: bool = False
    """Whether fixed prompts are labelled as documented for agents."""
    host_times: int = 0
    """Blocks of the host tier over those of the device."""


PRODUCT_CASES = {
    "kedge": ProductCase(),
    "kedge_ids": ProductCase(tells_ids=True),
    "kedge_perfect": ProductCase(tells_ids=True, tells_next=True),
    "kedge_host3": ProductCase(host_times=3),
    "kedge_fixed": ProductCase(tells_fixed=True),
}


def product_replay(case: ProductCase, capacity: int) -> CacheReplay:
    """Return an empty cache of `capacity` device blocks that is told what the case says."""
    tiers = TierSettings(host_blocks=case.host_times * capacity)
    cache = CacheManager(capacity, 1, policy_of(tiers), tiers, NoCopier())
    hooks: list[ReplayHooks] = [FixedPromptHints(cache)] if case.tells_fixed else []
    return CacheReplay(cache, hooks)


def product_hit_rate(case: ProductCase, arrivals: Sequence[Arrival], capacity: int) -> float:
    """Return the hit rate of Kedge's cache, in either tier."""
    return product_replay(case, capacity).hit_rate(arrivals)
