"""The anchors of all placeholders: what the runtime asks and tells. One owner thread, no locks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from kedge.anchors.anchor import Anchor, AnchorId
from kedge.anchors.calibration import Calibration
from kedge.anchors.criteria.shareability import Verdict
from kedge.anchors.estimators.blending import Match
from kedge.anchors.estimators.site import Observation, SlotOffsets
from kedge.anchors.matching import Matcher
from kedge.anchors.offsets import Blend, OffsetTable
from kedge.anchors.pool import AnchorPool
from kedge.anchors.registry import make_criterion, make_slot
from kedge.anchors.residence import NO_HOST, HostBound, Residence, ResidenceStats
from kedge.kv.segment import KVSegment
from kedge.reuse.contracts import PoolKey, SampleView, Slot, TemplateOwner
from kedge.settings import AnchorSettings
from kedge.types import TenantId, WorkflowId, tenant_of

__all__ = ["AnchorStats", "AnchorStore", "Estimate", "SampleView", "Slot"]

_USED = 0.5
"""Anchors count as used that together carry this share of a value's offsets, the heaviest first"""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Whether a value is shareable in a slot and, if so, the blends of its offsets."""

    shareable: bool
    reason: str
    """Why it is not shareable, or empty"""
    learnable: bool
    """Whether a dense prefill would teach the pool something about this value"""
    phi: Blend | None = None
    """Over rows of `phi_table`, one per token of the value"""
    prefix: Blend | None = None
    """Over rows of `prefix_table`, one per token of the prefix segment after the value"""
    weak: Tensor | None = None
    """bool [tokens], on the CPU: tokens of the value that should be computed all the same"""
    weak_prefix: Tensor | None = None
    """The same of the prefix segment after the value"""
    phi_table: OffsetTable | None = None
    prefix_table: OffsetTable | None = None
    pool: PoolKey | None = None
    used: tuple[AnchorId, ...] = ()

    def weak_positions(self) -> list[int]:
        """Tokens of the value that should be computed all the same, ascending."""
        return _places(self.weak)

    def weak_prefix_positions(self) -> list[int]:
        """The same of the prefix segment after the value."""
        return _places(self.weak_prefix)


def _places(marked: Tensor | None) -> list[int]:
    return [] if marked is None else marked.nonzero().flatten().tolist()


@dataclass(frozen=True, slots=True)
class AnchorStats:
    """What is stored now, and what happened so far."""

    pools: int
    slots: int
    anchors: int
    nbytes: int
    observed: int
    used: int
    over_limit: int
    """Anchors dropped because their tenant had more than it may"""
    tiers: ResidenceStats
    """Offsets by where they are; key vectors are always on the device."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """At most so many anchors and bytes; None is no limit."""

    anchors: int | None
    nbytes: int | None

    def excess(self, pools: list[AnchorPool]) -> float:
        """Bytes too many, infinitely many where there are too many anchors; 0 where it holds."""
        if self.anchors is not None and sum(len(pool.anchors) for pool in pools) > self.anchors:
            return math.inf
        return 0 if self.nbytes is None else max(0, sum(pool.nbytes for pool in pools) - self.nbytes)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """One placeholder's pool as it is now."""

    workflow: WorkflowId
    placeholder: str
    anchors: int
    slots: int
    uses: int
    """How often its anchors were leaned on, those that have been dropped apart"""
    nbytes: int


class AnchorStore:
    """All pools of one model. Raises `ConfigError` for an unknown estimator or criterion.

    What does not fit the device moves to the host, slot by slot, and only what fits neither is forgotten.
    """

    def __init__(self, config: AnchorSettings, host: HostBound = NO_HOST) -> None:
        self._config = config
        self._matcher = Matcher(config)
        self._criterion = make_criterion(config)
        self._make_slot = make_slot(config)
        self._pools: dict[PoolKey, AnchorPool] = {}  # least recently used first
        self._ids = count()
        self._observed = self._used = self._over_limit = 0
        self._limits: dict[TenantId, _Limit] = {}
        self._residence = Residence(config.max_bytes, host, self._slots, self._key_bytes)

    def begin(self) -> None:
        """A plan begins: what the estimates before it lean on may be moved again."""
        for offsets in self._slots():
            offsets.pinned = False

    def estimate(self, slot: Slot, sample: SampleView) -> Estimate:
        """Judges a value and blends its offsets. Changes nothing but the memory of matches.

        The blends are good until the next `observe`, `begin`, `fetch` or `clear`.
        """
        if not sample.tokens:
            return Estimate(False, "the value is empty", learnable=False)
        pool = self._pools.get(sample.pool)
        offsets = pool.slots.get(slot) if pool else None
        if pool is None or offsets is None:
            return Estimate(False, "no anchor of this agent yet", learnable=True)
        if not self._residence.demand(offsets):
            return Estimate(False, "its offsets find no room on the device", learnable=False)
        offsets.pinned = True
        return self._judge(pool, offsets, sample)

    def prepare(self, sample: SampleView) -> None:
        """Matches a value that is going to be asked for with the anchors of the slot that has most, ahead of time."""
        pool = self._pools.get(sample.pool)
        ids = max((tuple(offsets.holders) for offsets in pool.slots.values()), key=len, default=()) if pool else ()
        if pool and sample.tokens and not self._matcher.lacks(pool, ids, len(sample.tokens)):
            self._matcher.match(pool, ids, sample)

    def is_saturated(self, slot: Slot, pool: PoolKey) -> bool:
        """Return whether a slot has observed so many values that one more hardly changes its estimates."""
        offsets = self._pools[pool].slots.get(slot) if pool in self._pools else None
        observations = offsets.calibration.observations if offsets else 0
        wanted = max(self._config.capacity, 2 * self._config.min_anchors)
        return offsets is not None and max(observations, len(offsets.holders)) >= wanted

    def _judge(self, pool: AnchorPool, offsets: SlotOffsets, sample: SampleView) -> Estimate:
        ids = tuple(offsets.holders)
        if lack := self._lacks(pool, ids, len(sample.tokens), offsets.calibration):
            known = pool.find(self._matcher.query(sample))
            return Estimate(False, lack, learnable=known is None or known.id not in offsets.holders)
        match = self._matcher.match(pool, ids, sample)
        verdict = self._criterion.judge(match, offsets.calibration)
        if not verdict.shareable:
            return Estimate(False, verdict.reason, learnable=verdict.learnable and match.same is None)
        return _shared(sample, offsets, match, verdict)

    def _lacks(self, pool: AnchorPool, ids: tuple[AnchorId, ...], tokens: int, calibration: Calibration) -> str:
        lack = self._matcher.lacks(pool, ids, tokens)
        return lack or self._criterion.lacks(tokens, pool.block(ids), calibration)

    def use(self, estimate: Estimate) -> None:
        """Counts the anchors that an estimate leans on, once it is used."""
        pool = self._pools.get(estimate.pool) if estimate.pool else None
        if pool and estimate.pool:
            pool.hit(estimate.used)
            self._touch(estimate.pool, pool)
            self._used += 1

    def observe(
        self,
        slot: Slot,
        sample: SampleView,
        real_phi: KVSegment,
        base_prefix: KVSegment | None = None,
        real_prefix: KVSegment | None = None,
    ) -> None:
        """Learns the offsets of a value and of the prefix segment after it from a dense prefill; all of it or nothing.

        A full pool drops no anchor for a value that was shareable anyway (Algorithm 1 makes anchors of others only):
        else an agent that prefills densely for another reason would push out what the other agents live on.
        The slot first estimates the value from what it had, which calibrates the criterion `error`.
        Raises `PlanError` where base and real KV differ in tokens, `TranslationRefused` where offsets are not finite.
        """
        if not sample.tokens:
            return
        self.begin()
        observed = Observation.measure(sample.base, real_phi, base_prefix, real_prefix)
        pool = self._pools.get(sample.pool) or self.empty_pool()
        offsets = pool.slot(slot, sample.base, len(observed.prefix))
        offsets.owner = TemplateOwner(sample.pool[0], slot.agent_key)
        if not self._residence.demand(offsets):
            return
        anchor = self._anchor(pool, sample)
        calibration = self._calibrated(pool, offsets, anchor, sample, observed)
        if anchor.id in pool.anchors or not pool.full or not self._is_shareable(pool, slot, sample):
            pool.add(slot, offsets, anchor, observed)
        pool.calibrate(slot, calibration)
        self._touch(sample.pool, pool)
        self._observed += 1
        self._bound_tenant(tenant_of(sample.pool[0]), anchor.id)
        self._bound(anchor.id)

    def _is_shareable(self, pool: AnchorPool, slot: Slot, sample: SampleView) -> bool:
        """Whether `slot`, as far as it has observed anything, would share a value."""
        offsets = pool.slots.get(slot)
        return offsets is not None and self._judge(pool, offsets, sample).shareable

    def _anchor(self, pool: AnchorPool, sample: SampleView) -> Anchor:
        """The anchor that is this value already, or a new one."""
        query = self._matcher.query(sample)
        return pool.find(query) or Anchor(AnchorId(next(self._ids)), query.tokens, query.keys)

    def _calibrated(
        self, pool: AnchorPool, offsets: SlotOffsets, anchor: Anchor, sample: SampleView, observed: Observation
    ) -> Calibration:
        """The slot's calibration with the error of its estimate from all other anchors."""
        others = tuple(i for i in offsets.holders if i != anchor.id)
        if not self._criterion.calibrates or self._matcher.lacks(pool, others, len(sample.tokens)):
            return offsets.calibration
        if len(others) < len(offsets.holders) and not offsets.leaves_out:
            return offsets.calibration
        match = self._matcher.match(pool, others, sample)
        error, after = offsets.error(match, sample.base, observed), offsets.prefix_error(match, observed)
        return offsets.calibration.updated(match.proposal.distance, sample.tokens, error, after)

    def _touch(self, key: PoolKey, pool: AnchorPool) -> None:
        self._pools.pop(key, None)
        self._pools[key] = pool

    def limit(self, tenant: TenantId, anchors: int | None = None, nbytes: int | None = None) -> None:
        """What a tenant may hold in all its namespaces together, from now on: so many anchors, so many bytes."""
        self._limits[tenant] = _Limit(anchors, nbytes)
        self._bound_tenant(tenant)

    def _bound(self, keep: AnchorId) -> None:
        """Drops pools, then anchors, until everything is within its bounds. The anchor `keep` goes last."""
        while len(self._pools) > self._config.max_pools:
            del self._pools[next(iter(self._pools))]
        self._fit(lambda: list(self._pools.values()), lambda _: self._residence.settle(self.nbytes()), keep)

    def _bound_tenant(self, tenant: TenantId, keep: AnchorId | None = None) -> None:
        """Drops anchors of a tenant until it is within its limit; nobody else's go for it."""

        def own() -> list[AnchorPool]:
            return [pool for key, pool in self._pools.items() if tenant_of(key[0]) == tenant]

        if limit := self._limits.get(tenant):
            before = sum(len(pool.anchors) for pool in own())
            self._fit(own, limit.excess, keep)
            self._over_limit += before - sum(len(pool.anchors) for pool in own())

    def _fit(
        self,
        chosen: Callable[[], list[AnchorPool]],
        excess: Callable[[list[AnchorPool]], float],
        keep: AnchorId | None,
    ) -> None:
        """Gives back slack, then drops anchors of the chosen pools, until nothing is in excess."""
        while (pools := chosen()) and (over := excess(pools)) > 0:
            slots = (offsets for pool in pools for offsets in pool.slots.values() if not offsets.on_host)
            tables = [table for offsets in slots for table in offsets.tables]
            if sum(table.slack_bytes for table in tables) >= over:
                max(tables, key=lambda table: table.slack_bytes).trim()
            else:
                self._drop_least_used(pools, keep)

    def _drop_least_used(self, pools: list[AnchorPool], keep: AnchorId | None) -> None:
        """Of the anchors that each of these pools would drop next, the least used."""
        candidates = ((pool, pool.anchors[pool.victim(keep)]) for pool in pools)
        pool, anchor = min(candidates, key=lambda c: (c[1].id == keep, c[1].hits, c[1].id))
        pool.drop(anchor.id)
        if not pool.anchors:
            self._pools = {key: other for key, other in self._pools.items() if other is not pool}

    def _slots(self) -> list[SlotOffsets]:
        return [offsets for pool in self._pools.values() for offsets in pool.slots.values()]

    def _key_bytes(self) -> int:
        return sum(pool.key_bytes for pool in self._pools.values())

    def nbytes(self) -> int:
        """Memory of all anchors, in both tiers."""
        return sum(pool.nbytes for pool in self._pools.values())

    @property
    def pools(self) -> Mapping[PoolKey, AnchorPool]:
        """All pools, least recently used first. To be read only."""
        return self._pools

    @property
    def offset_bits(self) -> int:
        """Of every number of an offset that is kept."""
        return self._config.offset_bits

    def key_width(self, base: KVSegment) -> int:
        """Return how many numbers an anchor's key vectors have for base KV of this shape."""
        return self._matcher.key_width(base)

    def empty_pool(self) -> AnchorPool:
        """A pool with this store's bounds that is not part of it."""
        return AnchorPool(self._config.capacity, self._config.max_slots, self._make_slot)

    def adopt(self, pools: Mapping[PoolKey, AnchorPool]) -> None:
        """Holds these pools and no others from now on, within its bounds. They are in order of their last use."""
        self.clear()
        self._pools = {key: pool for key, pool in pools.items() if pool.anchors}
        for key, pool in self._pools.items():
            for slot, offsets in pool.slots.items():
                offsets.owner = TemplateOwner(key[0], slot.agent_key)
        self._ids = count(max((i + 1 for pool in self._pools.values() for i in pool.anchors), default=0))
        for tenant in self._limits:
            self._bound_tenant(tenant)
        if self._pools:
            self._bound(keep=max(i for pool in self._pools.values() for i in pool.anchors))

    def clear(self, tenant: TenantId | None = None) -> None:
        """Forgets the anchors of a tenant; of all tenants if None."""
        self._pools = {k: pool for k, pool in self._pools.items() if tenant is not None and k[0] != tenant}
        self._matcher.clear()

    @property
    def due(self) -> bool:
        """Whether `fetch` may have something to do."""
        return self._residence.due

    def notice(self) -> None:
        """The forecast has changed."""
        self._residence.notice()

    def fetch(self) -> bool:
        """Brings the offsets of one slot, whose agent runs soon, from the host; False where none is worth it.

        As with `begin`, what has been estimated before must have been written.
        """
        self.begin()
        return self._residence.fetch()

    def stats(self) -> AnchorStats:
        pools = self._pools.values()
        return AnchorStats(
            pools=len(pools),
            slots=sum(len(pool.slots) for pool in pools),
            anchors=sum(len(pool.anchors) for pool in pools),
            nbytes=self.nbytes(),
            observed=self._observed,
            used=self._used,
            over_limit=self._over_limit,
            tiers=self._residence.stats(),
        )

    def pool_stats(self, owns: Callable[[TenantId], bool]) -> list[PoolStats]:
        """The pools of the tenants that `owns` picks, least recently used first."""
        return [_pool_stats(key, pool) for key, pool in self._pools.items() if owns(key.tenant)]

    def check_integrity(self) -> None:
        """Raises `PlanError` where a pool is unsound, or one of the tiers is fuller than it may be."""
        self._residence.check_integrity()
        for pool in self._pools.values():
            pool.check_integrity()


def _pool_stats(key: PoolKey, pool: AnchorPool) -> PoolStats:
    return PoolStats(
        workflow=key.workflow,
        placeholder=key.placeholder,
        anchors=len(pool.anchors),
        slots=len(pool.slots),
        uses=sum(anchor.hits for anchor in pool.anchors.values()),
        nbytes=pool.nbytes,
    )


def _shared(sample: SampleView, offsets: SlotOffsets, match: Match, verdict: Verdict) -> Estimate:
    phi, prefix = offsets.phi_offsets(match, sample.base), offsets.prefix_offsets(match)
    return Estimate(
        shareable=True,
        reason="",
        learnable=match.same is None,
        phi=phi.blend,
        prefix=prefix.blend,
        weak=verdict.weak,
        weak_prefix=verdict.weak_prefix,
        phi_table=phi.table,
        prefix_table=prefix.table,
        pool=sample.pool,
        used=_leading(match.block.ids, match.proposal.mass),
    )


def _leading(ids: tuple[AnchorId, ...], mass: Tensor) -> tuple[AnchorId, ...]:
    """The fewest anchors that carry a share of `_USED` of the mass."""
    heaviest = torch.argsort(mass, descending=True, stable=True)
    before = mass[heaviest].cumsum(0) - mass[heaviest]
    return tuple(ids[i] for i in heaviest[before < _USED].tolist())
