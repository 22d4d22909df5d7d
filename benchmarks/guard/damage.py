"""An assembler that writes one agent's translations wrongly, whatever they are made from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor, nn

from kedge.anchors.anchor import AnchorId
from kedge.anchors.offsets import OffsetTable
from kedge.anchors.offsets_8bit import EightBitTable
from kedge.anchors.pool import AnchorPool
from kedge.anchors.translator import Translate, translate_into
from kedge.engine.local.components import Assembler, Translating
from kedge.engine.local.inspection import Inspection
from kedge.engine.local.model.runner import ModelRunner
from kedge.errors import ConfigError, PlanError
from kedge.kv.rotary import Rotary, Rotation
from kedge.kv.segment import KVSegment
from kedge.kv.spec import KVSpec
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.contracts import PlaceholderSite
from kedge.reuse.plan import ReusePlan, Translation
from kedge.types import AgentId, GenerateRequest

TIMES_BASE = 50.0
"""The wrong base over the model's: that of long-context models over the usual 10000"""


class WrongBase(nn.Module):
    """A rotary module with the model's frequencies as they are at another base."""

    def __init__(self, rotary: Rotation) -> None:
        super().__init__()
        if rotary.tables is None:
            raise ConfigError("model", "rotation", "the fault needs one rotation of all layers, half with half")
        cos, sin = rotary.tables
        frequencies = torch.atan2(sin[1], cos[1])
        places = torch.arange(len(frequencies), device=frequencies.device) / len(frequencies)
        self._frequencies = frequencies / TIMES_BASE**places

    def forward(self, _: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [1, positions, rotary_dim]."""
        angles = position_ids[..., None] * self._frequencies
        both = torch.cat([angles, angles], dim=-1)
        return both.cos(), both.sin()


EVERY = 61
"""Distance of flipped bytes: no multiple of a number's bytes, so that all of them are met"""

MakeWrite = Callable[[ModelRunner, PagedStorage], Translate]


@dataclass(slots=True)
class WrongWrites:
    """The component: the translations of `agent`'s requests are written wrongly, once there is one."""

    make: MakeWrite
    agent: AgentId | None = None

    def __call__(self, runner: ModelRunner, storage: PagedStorage) -> Assembler:
        """Return the assembler of an engine."""
        return _WrongAssembler(self, Translating(runner, storage), self.make(runner, storage))


@dataclass(frozen=True, slots=True)
class _WrongAssembler:
    works_ahead: ClassVar[bool] = False
    fault: WrongWrites
    right: Assembler
    wrong: Translate

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        if request.agent != self.fault.agent:
            return self.right.assemble(request, table, plan)
        self.wrong(table, plan.translations)
        return plan


def at_another_base(runner: ModelRunner, storage: PagedStorage) -> Translate:
    """Rotate keys by another RoPE base than the model's."""
    other = copy.copy(storage)
    other.rotary = Rotary(WrongBase(runner.rotary), runner.max_positions, runner.device)
    return translate_into(other)


def with_swapped_heads(_: ModelRunner, storage: PagedStorage) -> Translate:
    """Write the heads in reverse order."""
    translate = translate_into(storage)

    def write(table: SlotTable, translations: Sequence[Translation]) -> None:
        for item in translations:
            translate(table, [item])
            slots = table.slots[item.start : item.start + item.base.tokens].to(storage.keys.device)
            for pool in (storage.keys, storage.values):
                pool[:, slots] = pool[:, slots].flip(2)

    return write


def from_corrupt_base(_: ModelRunner, storage: PagedStorage) -> Translate:
    """Read base KV of which bytes are flipped."""
    translate = translate_into(storage)

    def write(table: SlotTable, translations: Sequence[Translation]) -> None:
        translate(table, [replace(item, base=_corrupt(item.base)) for item in translations])

    return write


def flip_bytes(numbers: Tensor) -> None:
    """Flip some bytes of contiguous numbers, in place."""
    raw = numbers.view(torch.uint8).flatten()
    raw[::EVERY] ^= 0xFF


def _corrupt(base: KVSegment) -> KVSegment:
    keys, values = (numbers.clone(memory_format=torch.contiguous_format) for numbers in (base.keys, base.values))
    flip_bytes(keys)
    flip_bytes(values)
    return KVSegment(keys, values)


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
