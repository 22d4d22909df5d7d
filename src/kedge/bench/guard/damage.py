"""Damage to the offsets that an engine has stored for one agent. To be called by the engine's thread, between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import product

import torch

from kedge.anchors.anchor import AnchorId
from kedge.anchors.offsets import EightBitTable, OffsetTable
from kedge.anchors.pool import AnchorPool
from kedge.bench.guard.wrong_writes import flip_bytes
from kedge.engine.local.inspection import Inspection
from kedge.errors import PlanError
from kedge.kv.spec import KVSpec
from kedge.reuse.contracts import PlaceholderSite
from kedge.types import AgentId

TIMES_SCALE = 16.0
"""Wrong scales over the right ones"""


def agent_sites(parts: Inspection, agent: AgentId) -> list[tuple[AnchorPool, PlaceholderSite]]:
    """Return the sites of an agent's placeholders, with their pools."""
    pools = parts.learned[0].pools.values()
    return [(pool, site) for pool in pools for site in pool.sites if site.agent_key.split("/")[1] == agent]


def swap_wordings(parts: Inspection, agent: AgentId, stale: Iterable[PlaceholderSite]) -> None:
    """Exchange the offsets of an agent's sites with those at the same places of an earlier wording. What was learned
    of how well offsets predict stays: that they are others goes unnoticed.
    """
    earlier = set(stale)
    pairs = [
        (pool, max(now, key=_held_in(pool)), max(then, key=_held_in(pool)))
        for pool in parts.learned[0].pools.values()
        if (now := [site for held, site in agent_sites(parts, agent) if held is pool and site not in earlier])
        and (then := [site for site in pool.sites if site in earlier])
    ]
    _require("earlier wording", agent, pairs)
    for pool, site, other in pairs:
        ours, theirs = pool.sites[site], pool.sites[other]
        pool.sites[site], pool.sites[other] = theirs, ours
        ours.calibration, theirs.calibration = theirs.calibration, ours.calibration


def _held_in(pool: AnchorPool) -> Callable[[PlaceholderSite], int]:
    """Return how many anchors a site holds: a rare prompt in which a value came from elsewhere has a site of its
    own.
    """
    return lambda site: len(pool.sites[site].holders)


def swap_heads(parts: Inspection, agent: AgentId, spec: KVSpec) -> None:
    """Reverse the order of the heads in an agent's offsets."""
    for table in _tables(parts, agent):
        heads = table.arena.view(len(table.arena), spec.layers - 1, 2, spec.kv_heads, spec.head_dim)
        heads.copy_(heads.flip(3))


def enlarge_scales(parts: Inspection, agent: AgentId) -> None:
    """Make the scales of an agent's 8-bit offsets too large."""
    for table in _tables(parts, agent):
        if not isinstance(table, EightBitTable):
            raise PlanError("offset_bits", 16, "has no scales")
        table.scales.mul_(TIMES_SCALE)


def poison_anchors(parts: Inspection, agent: AgentId, count: int, loudness: float) -> None:
    """Make the offsets of so many anchors random, wherever the agent holds them: those that were used most. Their
    standard deviation is `loudness` times the largest right one.
    """
    sites = [(pool, pool.sites[site]) for pool, site in agent_sites(parts, agent)]
    held = {(pool.anchors[one].hits, one): pool.anchors[one] for pool, offsets in sites for one in offsets.holders}
    _require("anchors", agent, held)
    worst = [anchor for _, anchor in sorted(held.items(), reverse=True)[:count]]
    for (pool, offsets), anchor in product(sites, worst):
        if pool.anchors.get(anchor.id) is anchor and anchor.id in offsets.holders:
            for table in offsets.tables:
                _randomize(table, anchor.id, loudness)


def _randomize(table: OffsetTable, anchor: AnchorId, loudness: float) -> None:
    rows = table.rows_of_anchors([anchor])
    right = table.arena[rows].float()
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(0))
    table.arena[rows] = (noise.to(right.device) * loudness * right.abs().max()).to(table.arena.dtype)


def corrupt_host(parts: Inspection, agent: AgentId) -> None:
    """Flip bytes of the offsets of an agent that lie in host memory."""
    held = [offsets for pool, site in agent_sites(parts, agent) if (offsets := pool.sites[site]).on_host]
    _require("on_host", agent, held)
    for table in (table for offsets in held for table in offsets.tables):
        flip_bytes(table.arena)


def _tables(parts: Inspection, agent: AgentId) -> Iterator[OffsetTable]:
    sites = agent_sites(parts, agent)
    _require("anchors", agent, sites)
    return (table for pool, site in sites for table in pool.sites[site].tables)


def _require(key: str, agent: str, found: Sized) -> None:
    if not found:
        raise PlanError(key, agent, "has nothing that could be damaged: more questions are needed before the fault")
