"""The anchors of one placeholder, with each agent's observations of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import torch

from kedge.anchors.anchor import Anchor, AnchorId, KeyBlock, Query
from kedge.anchors.offsets import OffsetTable
from kedge.anchors.sites import Observation, SiteOffsets
from kedge.errors import PlanError
from kedge.kv.segment import KVSegment
from kedge.reuse.contracts import PlaceholderSite, PoolKey
from kedge.structures.bounded import BoundedDict
from kedge.types import Namespace, TenantId, WorkflowId

MAX_POOLS, MAX_SITES = 256, 64
"""Pools at once, and sites of one: bounds for safety; the least recently used goes first"""
WINDOW = 5
"""A full pool drops the least used of this many anchors added earliest."""


class AnchorPool:
    """The anchors of one placeholder, at most `capacity`, with at most `max_sites` sites. `blocks` key blocks are
    cached; agents that saw the same values share one.
    """

    def __init__(self, capacity: int, max_sites: int = MAX_SITES, blocks: int = 4) -> None:
        self.anchors: dict[AnchorId, Anchor] = {}
        """In the order in which they were added"""
        self.sites: dict[PlaceholderSite, SiteOffsets] = {}
        """Least recently observed first"""
        self._capacity, self._max_sites = capacity, max_sites
        self._blocks: BoundedDict[tuple[AnchorId, ...], KeyBlock] = BoundedDict(blocks)

    def find(self, query: Query) -> Anchor | None:
        """Return the anchor that equals this value, or None."""
        return next((a for a in self.anchors.values() if a.is_value(query)), None)

    def block(self, ids: tuple[AnchorId, ...]) -> KeyBlock:
        """Return the key vectors of these anchors."""
        return self._blocks.use(ids, lambda: KeyBlock([self.anchors[i] for i in ids]))

    def site(self, site: PlaceholderSite, base: KVSegment, prefix_tokens: int) -> SiteOffsets:
        """Return the offsets of `site`, or empty ones that join the pool with the first `add`."""
        return self.sites.get(site) or SiteOffsets(base, prefix_tokens)

    def add(self, site: PlaceholderSite, offsets: SiteOffsets, anchor: Anchor, observed: Observation) -> None:
        """Add an observation of `site` for an anchor, new or known; on an error nothing has changed.

        A site that knows the anchor keeps its old observation. A full pool then drops an anchor.
        """
        if anchor.id not in offsets.holders:
            offsets.put(anchor.id, observed)
        self.anchors.setdefault(anchor.id, anchor)
        self.sites.pop(site, None)
        self.sites[site] = offsets
        self._bound(keep=anchor.id)

    def adopt(self, anchors: Iterable[Anchor], sites: Mapping[PlaceholderSite, SiteOffsets]) -> None:
        """Take over anchors and sites of another pool of this placeholder, in its order, and drop what exceeds the
        bounds.
        """
        self.anchors.update((anchor.id, anchor) for anchor in anchors)
        self.sites.update(sites)
        self._bound()

    def _bound(self, keep: AnchorId | None = None) -> None:
        while len(self.anchors) > self._capacity:
            self.drop(self.victim(keep))
        while len(self.sites) > self._max_sites:
            del self.sites[next(iter(self.sites))]
            held = {anchor for offsets in self.sites.values() for anchor in offsets.holders}
            for anchor in self.anchors.keys() - held:
                self.drop(anchor)

    @property
    def full(self) -> bool:
        """Whether another anchor displaces one."""
        return len(self.anchors) >= self._capacity

    def victim(self, keep: AnchorId | None = None) -> AnchorId:
        """Return the least used of the earliest anchors, the earlier of equals; `keep` only if there is no other."""
        others = (a for a in self.anchors.values() if a.id != keep)
        window = list(islice(others, WINDOW)) or list(self.anchors.values())
        return min(window, key=lambda a: (a.hits, a.id)).id

    def drop(self, anchor: AnchorId) -> None:
        """Forget an anchor and all offsets of it."""
        for offsets in self.sites.values():
            offsets.drop(anchor)
        del self.anchors[anchor]
        self._blocks.clear()

    def hit(self, anchors: Iterable[AnchorId]) -> None:
        """Count one use of these anchors; ignores those that were dropped in the meantime."""
        for anchor in anchors:
            if anchor in self.anchors:
                self.anchors[anchor].hits += 1

    @property
    def tables(self) -> list[OffsetTable]:
        """The tables of all sites."""
        return [table for offsets in self.sites.values() for table in offsets.tables]

    @property
    def nbytes(self) -> int:
        """Return the bytes of offsets, of key vectors, and of the blocks made of these."""
        keys = sum(a.nbytes for a in self.anchors.values()) + sum(b.nbytes for b in self._blocks.values())
        return keys + sum(offsets.nbytes for offsets in self.sites.values())

    def check_integrity(self) -> None:
        """Raise `PlanError` where the pool is too large, or its sites hold other anchors than it does."""
        if len(self.anchors) > self._capacity or len(self.sites) > self._max_sites:
            raise PlanError("pool", (len(self.anchors), len(self.sites)), "more anchors or sites than allowed")
        held = {anchor for offsets in self.sites.values() for anchor in offsets.holders}
        if held != set(self.anchors):
            raise PlanError("anchors", sorted(self.anchors), f"sites hold {sorted(held)}")
        for offsets in self.sites.values():
            offsets.check_integrity()
        for anchor in self.anchors.values():
            if len(anchor.keys) != anchor.length or not torch.isfinite(anchor.keys).all():
                raise PlanError("anchor", anchor.id, "its key vectors do not fit its tokens")


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """The most anchors and bytes that a tenant may hold; None is no limit."""

    anchors: int | None
    nbytes: int | None

    def excess(self, pools: list[AnchorPool]) -> float:
        """Return the bytes beyond the limit: infinite where there are too many anchors, 0 where it is kept."""
        if self.anchors is not None and sum(len(pool.anchors) for pool in pools) > self.anchors:
            return math.inf
        return 0 if self.nbytes is None else max(0, sum(pool.nbytes for pool in pools) - self.nbytes)


NO_LIMIT = TenantLimit(None, None)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """One placeholder's pool as it is now."""

    workflow: WorkflowId
    placeholder: str
    anchors: int
    sites: int
    uses: int
    """Number of uses of its present anchors."""
    nbytes: int


class PoolTable:
    """All pools by key, least recently used first. What exceeds a bound is dropped, least used anchors first."""

    def __init__(self, max_bytes: int, max_pools: int = MAX_POOLS) -> None:
        self._max_bytes, self._max_pools = max_bytes, max_pools
        self.pools: dict[PoolKey, AnchorPool] = {}
        self.limits: dict[TenantId, TenantLimit] = {}
        self._others = NO_LIMIT
        """The limit of tenants without one of their own"""
        self.over_limit = 0
        """Anchors dropped because their tenant held more than it may."""

    def nbytes(self) -> int:
        """Return the bytes of all anchors."""
        return sum(pool.nbytes for pool in self.pools.values())

    def touch(self, key: PoolKey, pool: AnchorPool) -> None:
        """Mark a pool as most recently used; add it if it is new."""
        self.pools.pop(key, None)
        self.pools[key] = pool

    def limit(self, tenant: TenantId, anchors: int | None, nbytes: int | None) -> None:
        """Limit what a tenant may hold in all its namespaces together, from now on."""
        self.limits[tenant] = TenantLimit(anchors, nbytes)
        self.bound_tenant(tenant)

    def limit_others(self, anchors: int | None, nbytes: int | None) -> None:
        """Limit what each tenant without a limit of its own may hold, from now on."""
        self._others = TenantLimit(anchors, nbytes)
        self._bound_tenants()

    def bound(self, keep: AnchorId) -> None:
        """Drop pools, then anchors, until everything is within its bounds. The anchor `keep` goes last."""
        while len(self.pools) > self._max_pools:
            del self.pools[next(iter(self.pools))]
        self._fit(lambda: list(self.pools.values()), lambda _: self.nbytes() - self._max_bytes, keep)

    def bound_tenant(self, tenant: TenantId, keep: AnchorId | None = None) -> None:
        """Drop anchors of a tenant until it is within its limit, and none of others."""

        def own() -> list[AnchorPool]:
            return [pool for key, pool in self.pools.items() if key.namespace.tenant == tenant]

        limit = self.limits.get(tenant, self._others)
        if limit != NO_LIMIT:
            before = sum(len(pool.anchors) for pool in own())
            self._fit(own, limit.excess, keep)
            self.over_limit += before - sum(len(pool.anchors) for pool in own())

    def _bound_tenants(self) -> None:
        for tenant in {key.namespace.tenant for key in self.pools}:
            self.bound_tenant(tenant)

    def replace(self, pools: Mapping[PoolKey, AnchorPool]) -> None:
        """Replace all pools by these, in the order of their last use, within all bounds."""
        self.pools = {key: pool for key, pool in pools.items() if pool.anchors}
        self._bound_tenants()
        if self.pools:
            self.bound(keep=max(i for pool in self.pools.values() for i in pool.anchors))

    def clear(self, namespace: Namespace | None) -> None:
        """Forget the pools of a namespace; of all of them if None."""
        self.pools = {key: pool for key, pool in self.pools.items() if namespace not in (None, key.namespace)}

    def stats(self, owns: Callable[[Namespace], bool]) -> Iterator[PoolStats]:
        """Iterate over figures of the pools of the tenants that `owns` picks, least recently used first."""
        for key, pool in self.pools.items():
            if owns(key.namespace):
                uses = sum(anchor.hits for anchor in pool.anchors.values())
                counts = len(pool.anchors), len(pool.sites), uses
                yield PoolStats(key.workflow, key.placeholder, *counts, pool.nbytes)

    def _fit(
        self,
        chosen: Callable[[], list[AnchorPool]],
        excess: Callable[[list[AnchorPool]], float],
        keep: AnchorId | None,
    ) -> None:
        """Until nothing is in excess, trim slack, then drop the least used of the anchors that each chosen pool would
        drop next.
        """
        while (pools := chosen()) and (over := excess(pools)) > 0:
            tables = [table for pool in pools for table in pool.tables]
            if sum(table.slack_bytes for table in tables) >= over:
                max(tables, key=lambda table: table.slack_bytes).trim()
            else:
                candidates = ((pool, pool.anchors[pool.victim(keep)]) for pool in pools)
                pool, anchor = min(candidates, key=lambda c: (c[1].id == keep, c[1].hits, c[1].id))
                pool.drop(anchor.id)
                if not pool.anchors:
                    self.pools = {key: other for key, other in self.pools.items() if other is not pool}
