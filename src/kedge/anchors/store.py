"""The store of all placeholders' anchors: it estimates for the planner and learns from dense prefills."""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from kedge.anchors.anchor import Anchor, AnchorId, KeyReader, PlaceholderSite, PoolKey, Query, SampleView
from kedge.anchors.calibration import Calibration
from kedge.anchors.criteria import GAMMA, MAX_ERROR, Criterion, Entropy, Error
from kedge.anchors.estimators import ESTIMATORS, Estimator, Match, Proposal
from kedge.anchors.pool import AnchorPool
from kedge.anchors.sites import Observation, OffsetEstimate, SiteOffsets, rotated, shared
from kedge.kv.segment import KVSegment
from kedge.settings import AnchorSettings
from kedge.structures.bounded import ENTRIES, BoundedDict
from kedge.types import Namespace, TenantId


@dataclass(frozen=True, slots=True)
class AnchorStats:
    """The figures of what is stored now, and of what happened so far."""

    pools: int
    sites: int
    anchors: int
    nbytes: int
    observed: int
    used: int


class SiteHistory(NamedTuple):
    """How much an agent's place of a placeholder has learned."""

    missing: int
    """Anchors that it lacks for a translation"""
    is_calibrated: bool
    """Whether so many values were observed that it is known how good its estimates are"""
    is_saturated: bool
    """Whether so many were observed that one more hardly changes its estimates"""


def methods(config: AnchorSettings) -> tuple[Estimator, Criterion]:
    """Return the estimator that the settings name, with its criterion."""
    estimator, most = ESTIMATORS[config.estimator](), config.max_error
    if estimator.aligned:
        return estimator, Entropy(GAMMA if most is None else most)
    return estimator, Error(config.min_anchors, MAX_ERROR if most is None else most, config.weak_error)


class AnchorStore:
    """All pools of one model. What exceeds a bound is dropped, least used anchors first."""

    without_offsets = staticmethod(rotated)

    def __init__(self, config: AnchorSettings, remembered: int = 64, max_pools: int = ENTRIES) -> None:
        """Create an empty store, which keeps the matches of so many values, and at most so many pools."""
        self.config = config
        self.reader = KeyReader()
        self._estimator, self._criterion = methods(config)
        self._queries: BoundedDict[Hashable, Query] = BoundedDict(remembered)
        self._proposals: BoundedDict[Hashable, tuple[Proposal, int | None]] = BoundedDict(remembered)
        """Matches of values, each computed once for all agents that read the value"""
        self.pools: BoundedDict[PoolKey, AnchorPool] = BoundedDict(max_pools, owner=attrgetter("namespace.tenant"))
        self.limits: dict[TenantId | None, int | None] = {}
        """Most bytes of each tenant (None: no limit); under the key None, of each tenant without a limit of its own"""
        self._ids = count()
        self._observed = self._used = 0
        self.waited = 0.0
        """Seconds in which a device was waited for to match values, with the pass that it was in"""

    def estimate(
        self, site: PlaceholderSite, sample: SampleView, weak_error: float | None = None, *, leave_out: bool = False
    ) -> OffsetEstimate:
        """Judge a value and blend its offsets. Changes nothing but the cache of matches. `weak_error` replaces that of
        the settings; with `leave_out` the anchor that equals the value is not used.

        The blends are valid until the next `observe` or `clear`.
        """
        if not sample.tokens:
            return OffsetEstimate(False, "the value is empty", learnable=False)
        pool = self.pools.get(sample.pool)
        offsets = pool.sites.get(site) if pool else None
        if pool is None or offsets is None:
            return OffsetEstimate(False, "no anchor of this agent yet", learnable=True)
        ids, criterion = offsets.anchors, self._criterion
        if weak_error is not None and isinstance(criterion, Error):
            criterion = replace(criterion, weak_error=weak_error)
        if leave_out and (own := pool.find(self._query(sample))):
            ids = tuple(one for one in ids if one != own.id)
        tokens = len(sample.tokens)
        lack = self._lacks(pool, ids, tokens)
        if lack := lack or criterion.lacks(tokens, pool.block(ids), offsets.calibration):
            known = pool.find(self._query(sample))
            return OffsetEstimate(False, lack, learnable=known is None or known.id not in offsets.anchors)
        match = self._match(pool, ids, sample)
        verdict = criterion.judge(match, offsets.calibration)
        if not verdict.shareable:
            return OffsetEstimate(False, verdict.reason, learnable=verdict.learnable and match.same is None)
        return shared(sample, offsets, match, verdict)

    def prepare(self, sample: SampleView) -> None:
        """Match a value ahead of time, with the anchors of the site that has most of them."""
        pool = self.pools.get(sample.pool)
        ids = max((offsets.anchors for offsets in pool.sites.values()), key=len, default=()) if pool else ()
        if pool and sample.tokens and not self._lacks(pool, ids, len(sample.tokens)):
            self._match(pool, ids, sample)

    def history(self, site: PlaceholderSite, pool: PoolKey) -> SiteHistory:
        """Return how much a site has learned."""
        offsets = self.pools[pool].sites.get(site) if pool in self.pools else None
        anchors = len(offsets.anchors) if offsets else 0
        observed = max(offsets.calibration.observations, anchors) if offsets else 0
        least = self.config.min_anchors
        return SiteHistory(
            missing=max(0, least - anchors),
            is_calibrated=observed >= 2 * least,
            is_saturated=observed >= max(2 * least, self.config.capacity),
        )

    def _query(self, sample: SampleView) -> Query:
        """Return the key vectors of a value, remembered by the name of its base KV."""
        return self._queries.use((sample.pool, sample.key), lambda: self.reader.read(sample.tokens, sample.base))

    def _lacks(self, pool: AnchorPool, ids: tuple[AnchorId, ...], tokens: int) -> str:
        """Return why these anchors cannot serve a value of `tokens` tokens, or the empty text."""
        if not ids:
            return "no anchor of this agent yet"
        short = self._estimator.aligned and not len(pool.block(ids).long_enough(tokens))
        return "longer than every anchor" if short else ""

    def _match(self, pool: AnchorPool, ids: tuple[AnchorId, ...], sample: SampleView) -> Match:
        """Return the match of a value with these anchors. Called only where `_lacks` returns the empty text."""
        query, block = self._query(sample), pool.block(ids)

        def propose() -> tuple[Proposal, int | None]:
            began = time.monotonic()
            known = pool.find(query)
            self.waited += time.monotonic() - began
            same = ids.index(known.id) if known is not None and known.id in ids else None
            proposal, began = self._estimator.propose(query, block, same), time.monotonic()
            proposal = proposal.on_cpu()
            self.waited += time.monotonic() - began
            return proposal, same

        proposal, same = self._proposals.use((sample.pool, sample.key, ids), propose)
        return Match(query, block, same, proposal, sample.weight)

    def use(self, estimate: OffsetEstimate) -> None:
        """Count a use of the anchors of an estimate, once it is used."""
        if estimate.pool and (pool := self.pools.get(estimate.pool)):
            pool.hit(estimate.used)
            self.pools.move_to_end(estimate.pool)
            self._used += 1

    def observe(
        self,
        site: PlaceholderSite,
        sample: SampleView,
        real_value: KVSegment,
        base_prefix: KVSegment | None = None,
        real_prefix: KVSegment | None = None,
    ) -> None:
        """Learn the offsets of a value and of the prefix segment after it from a dense prefill, atomically.

        A full pool drops no anchor for a value that was shareable anyway (Algorithm 1 makes anchors of others only):
        otherwise an agent that prefills densely for another reason would displace anchors that other agents use. The
        site first estimates the value from its earlier data, which calibrates the criterion. Raises `PlanError`
        where base and real KV differ in tokens, `TranslationRefused` where offsets are not finite.
        """
        if not sample.tokens:
            return
        observed = Observation.measure(sample.base, real_value, base_prefix, real_prefix)
        pool = self.pools.get(sample.pool) or AnchorPool(self.config.capacity)
        offsets = pool.sites.get(site) or SiteOffsets(sample.base, len(observed.prefix))
        query = self._query(sample)
        anchor = pool.find(query) or Anchor(AnchorId(next(self._ids)), query.tokens, query.keys)
        calibration = self._calibrated(pool, offsets, anchor, sample, observed)
        has_room = anchor.id in pool.anchors or len(pool.anchors) < self.config.capacity
        if has_room or not self.estimate(site, sample).shareable:
            pool.add(site, offsets, anchor, observed)
        pool.sites[site].calibration = calibration
        self.pools[sample.pool] = pool
        self._observed += 1
        self._bound(sample.pool.namespace.tenant, anchor.id)
        self._fit(self.config.max_bytes, anchor.id)

    def _calibrated(
        self, pool: AnchorPool, offsets: SiteOffsets, anchor: Anchor, sample: SampleView, observed: Observation
    ) -> Calibration:
        """Return the site's calibration, updated with the error of its estimate from all other anchors."""
        others = tuple(i for i in offsets.anchors if i != anchor.id)
        if self._estimator.aligned or self._lacks(pool, others, len(sample.tokens)):
            return offsets.calibration
        match = self._match(pool, others, sample)
        return offsets.calibration.updated(match.proposal.distance, *offsets.errors(match, observed))

    # bounds ---------------------------------------------------------------------------------------------------

    def limit(self, tenant: TenantId | None, nbytes: int | None) -> None:
        """Limit the bytes that a tenant may hold in all its namespaces, or (None) each without a limit of its own."""
        self.limits[tenant] = nbytes
        self._bound()

    def _bound(self, tenant: TenantId | None = None, keep: AnchorId | None = None) -> None:
        """Drop anchors of a tenant, or of each, until it is within its limit, and none of others."""
        for one in {tenant} if tenant is not None else {key.namespace.tenant for key in self.pools}:
            if (limit := self.limits.get(one, self.limits.get(None))) is not None:
                self._fit(limit, keep, one)

    def _fit(self, most: int, keep: AnchorId | None, tenant: TenantId | None = None) -> None:
        """Until all pools, or those of a tenant, hold at most so many bytes, pack them, then drop the least used of the
        anchors that each would drop next; `keep` goes last.
        """
        while True:
            pools = {key: pool for key, pool in self.pools.items() if tenant in (None, key.namespace.tenant)}
            if sum(pool.nbytes for pool in pools.values()) <= most:
                return
            if any(pool.pack() for pool in pools.values()):
                continue
            candidates = ((key, pool.anchors[pool.victim(keep)]) for key, pool in pools.items())
            key, anchor = min(candidates, key=lambda c: (c[1].id == keep, c[1].hits, c[1].id))
            pools[key].drop(anchor.id)
            if not pools[key].anchors:
                del self.pools[key]

    # all of it ------------------------------------------------------------------------------------------------

    def adopt(self, pools: Mapping[PoolKey, AnchorPool]) -> None:
        """Replace all pools by these, in the order of their last use, within the store's bounds."""
        self.clear()
        self._ids = count(max((i + 1 for pool in pools.values() for i in pool.anchors), default=0))
        for key, pool in pools.items():
            if pool.anchors:
                self.pools[key] = pool
        self._bound()
        self._fit(self.config.max_bytes, max((i for pool in self.pools.values() for i in pool.anchors), default=None))

    def clear(self) -> None:
        """Forget all anchors."""
        for found in (self.pools, self._queries, self._proposals):
            found.clear()

    def stats(self) -> AnchorStats:
        """Return a snapshot of the figures."""
        pools = self.pools.values()
        return AnchorStats(
            pools=len(pools),
            sites=sum(len(pool.sites) for pool in pools),
            anchors=sum(len(pool.anchors) for pool in pools),
            nbytes=sum(pool.nbytes for pool in pools),
            observed=self._observed,
            used=self._used,
        )

    def pool_stats(self, owns: Callable[[Namespace], bool]) -> list[dict[str, object]]:
        """Return figures of the pools of the tenants that `owns` picks, without these, least recently used first."""
        return [
            {
                "workflow": key.workflow,
                "placeholder": key.placeholder,
                "anchors": len(pool.anchors),
                "sites": len(pool.sites),
                "uses": sum(anchor.hits for anchor in pool.anchors.values()),
                "nbytes": pool.nbytes,
            }
            for key, pool in self.pools.items()
            if owns(key.namespace)
        ]

    def check_integrity(self) -> None:
        """Raise `PlanError` if a pool is inconsistent."""
        for pool in self.pools.values():
            pool.check_integrity()
