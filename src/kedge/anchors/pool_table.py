"""All anchor pools, within their bounds: of bytes, of pools, and of what each tenant may hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kedge.anchors.anchor import AnchorId
from kedge.anchors.estimators.site import SiteOffsets
from kedge.anchors.pool import AnchorPool
from kedge.reuse.contracts import PoolKey, TemplateOwner
from kedge.types import Namespace, TenantId, WorkflowId


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

    def __init__(self, max_pools: int, excess_bytes: Callable[[int], float]) -> None:
        """Create an empty table. `excess_bytes` takes the bytes of all pools, makes room, and returns how many do not
        fit.
        """
        self._max_pools, self._excess_bytes = max_pools, excess_bytes
        self._pools: dict[PoolKey, AnchorPool] = {}
        self._limits: dict[TenantId, TenantLimit] = {}
        self._others = NO_LIMIT
        """The limit of tenants without one of their own"""
        self.over_limit = 0
        """Anchors dropped because their tenant held more than it may."""

    @property
    def pools(self) -> Mapping[PoolKey, AnchorPool]:
        """The pools, least recently used first; read-only."""
        return self._pools

    @property
    def limits(self) -> Mapping[TenantId, TenantLimit]:
        """The limit of each limited tenant; read-only."""
        return self._limits

    def sites(self) -> list[SiteOffsets]:
        """Return the offsets of all pools, by site."""
        return [offsets for pool in self._pools.values() for offsets in pool.sites.values()]

    def key_bytes(self) -> int:
        """Return the bytes of all key vectors."""
        return sum(pool.key_bytes for pool in self._pools.values())

    def nbytes(self) -> int:
        """Return the bytes of all anchors, in both tiers."""
        return sum(pool.nbytes for pool in self._pools.values())

    def touch(self, key: PoolKey, pool: AnchorPool) -> None:
        """Mark a pool as most recently used; add it if it is new."""
        self._pools.pop(key, None)
        self._pools[key] = pool

    def limit(self, tenant: TenantId, anchors: int | None, nbytes: int | None) -> None:
        """Limit what a tenant may hold in all its namespaces together, from now on."""
        self._limits[tenant] = TenantLimit(anchors, nbytes)
        self.bound_tenant(tenant)

    def limit_others(self, anchors: int | None, nbytes: int | None) -> None:
        """Limit what each tenant without a limit of its own may hold, from now on."""
        self._others = TenantLimit(anchors, nbytes)
        self._bound_tenants()

    def bound(self, keep: AnchorId) -> None:
        """Drop pools, then anchors, until everything is within its bounds. The anchor `keep` goes last."""
        while len(self._pools) > self._max_pools:
            del self._pools[next(iter(self._pools))]
        self._fit(lambda: list(self._pools.values()), lambda _: self._excess_bytes(self.nbytes()), keep)

    def bound_tenant(self, tenant: TenantId, keep: AnchorId | None = None) -> None:
        """Drop anchors of a tenant until it is within its limit, and none of others."""

        def own() -> list[AnchorPool]:
            return [pool for key, pool in self._pools.items() if key.namespace.tenant == tenant]

        limit = self._limits.get(tenant, self._others)
        if limit != NO_LIMIT:
            before = sum(len(pool.anchors) for pool in own())
            self._fit(own, limit.excess, keep)
            self.over_limit += before - sum(len(pool.anchors) for pool in own())

    def _bound_tenants(self) -> None:
        for tenant in {key.namespace.tenant for key in self._pools}:
            self.bound_tenant(tenant)

    def replace(self, pools: Mapping[PoolKey, AnchorPool]) -> None:
        """Replace all pools by these, in the order of their last use, within all bounds."""
        self._pools = {key: pool for key, pool in pools.items() if pool.anchors}
        for key, pool in self._pools.items():
            for site, offsets in pool.sites.items():
                offsets.owner = TemplateOwner(key.namespace, site.agent_key)
        self._bound_tenants()
        if self._pools:
            self.bound(keep=max(i for pool in self._pools.values() for i in pool.anchors))

    def clear(self, namespace: Namespace | None) -> None:
        """Forget the pools of a namespace; of all of them if None."""
        self._pools = {key: pool for key, pool in self._pools.items() if namespace not in (None, key.namespace)}

    def stats(self, owns: Callable[[Namespace], bool]) -> Iterator[PoolStats]:
        """Iterate over figures of the pools of the tenants that `owns` picks, least recently used first."""
        return (_pool_stats(key, pool) for key, pool in self._pools.items() if owns(key.namespace))

    def _fit(
        self,
        chosen: Callable[[], list[AnchorPool]],
        excess: Callable[[list[AnchorPool]], float],
        keep: AnchorId | None,
    ) -> None:
        """Trim slack, then drop anchors of the chosen pools, until nothing is in excess."""
        while (pools := chosen()) and (over := excess(pools)) > 0:
            sites = (offsets for pool in pools for offsets in pool.sites.values() if not offsets.on_host)
            tables = [table for offsets in sites for table in offsets.tables]
            if sum(table.slack_bytes for table in tables) >= over:
                max(tables, key=lambda table: table.slack_bytes).trim()
            else:
                self._drop_least_used(pools, keep)

    def _drop_least_used(self, pools: list[AnchorPool], keep: AnchorId | None) -> None:
        """Drop the least used of the anchors that each of these pools would drop next."""
        candidates = ((pool, pool.anchors[pool.victim(keep)]) for pool in pools)
        pool, anchor = min(candidates, key=lambda c: (c[1].id == keep, c[1].hits, c[1].id))
        pool.drop(anchor.id)
        if not pool.anchors:
            self._pools = {key: other for key, other in self._pools.items() if other is not pool}


def _pool_stats(key: PoolKey, pool: AnchorPool) -> PoolStats:
    return PoolStats(
        workflow=key.workflow,
        placeholder=key.placeholder,
        anchors=len(pool.anchors),
        sites=len(pool.sites),
        uses=sum(anchor.hits for anchor in pool.anchors.values()),
        nbytes=pool.nbytes,
    )
