"""Damage to the offsets that an engine has stored for one agent. To be called by the engine's thread, between steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import product

import torch
from torch import Tensor

from kedge.anchors.anchor import AnchorId
from kedge.anchors.estimators.site import SiteOffsets
from kedge.anchors.offsets import OffsetTable
from kedge.anchors.offsets_8bit import EightBitTable
from kedge.anchors.pool import AnchorPool
from kedge.engine.local.inspection import Inspection
from kedge.errors import PlanError
from kedge.kv.spec import KVSpec
from kedge.reuse.contracts import PlaceholderSite
from kedge.types import AgentId

TIMES_SCALE = 16.0
"""Wrong scales over the right ones"""
BLOCK, EVERY = 1 << 16, 64
"""Bytes of a corrupted block, and the distance of flipped bytes in it"""


def agent_sites(parts: Inspection, agent: AgentId) -> list[tuple[AnchorPool, PlaceholderSite]]:
    """Return the sites of an agent's placeholders, with their pools."""
    pools = parts.learned[0].pools.values()
    return [(pool, site) for pool in pools for site in pool.sites if site.agent_key.split("/")[1] == agent]


def swap_wordings(parts: Inspection, agent: AgentId, stale: Iterable[PlaceholderSite]) -> None:
    """Exchange the offsets of an agent's sites with those at the same places of an earlier wording."""
    earlier = set(stale)
    sites = agent_sites(parts, agent)
    pairs = [
        (pool, site, other)
        for pool, site in sites
        if site not in earlier
        for other in earlier & pool.sites.keys()
        if other.index == site.index
    ]
    _require("earlier wording", agent, pairs)
    for pool, site, other in pairs:
        pool.sites[site], pool.sites[other] = pool.sites[other], pool.sites[site]


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


def corrupt_host(parts: Inspection) -> AgentId:
    """Flip bytes of a block of each of the offsets of one agent that lie in host memory. Returns that agent."""
    pools = parts.learned[0].pools.values()
    held = [(site, offsets) for pool in pools for site, offsets in pool.sites.items() if offsets.on_host]
    _require("on_host", "no agent", held)
    agent = AgentId(max(held, key=lambda one: one[1].nbytes)[0].agent_key.split("/")[1])
    for offsets in (offsets for site, offsets in held if site.agent_key.split("/")[1] == agent):
        _flip(offsets)
    return agent


def _flip(offsets: SiteOffsets) -> None:
    for table in offsets.tables:
        raw: Tensor = table.arena.view(torch.uint8).flatten()
        raw[:BLOCK:EVERY] ^= 0xFF


def _tables(parts: Inspection, agent: AgentId) -> Iterator[OffsetTable]:
    sites = agent_sites(parts, agent)
    _require("anchors", agent, sites)
    return (table for pool, site in sites for table in pool.sites[site].tables)


def _require(key: str, agent: str, found: Sized) -> None:
    if not found:
        raise PlanError(key, agent, "has nothing that could be damaged: more questions are needed before the fault")
