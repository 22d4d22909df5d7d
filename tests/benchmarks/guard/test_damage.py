"""Damage is what its name says: other numbers in one agent's stored offsets, and sound tables all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch
from torch import Tensor

from benchmarks.guard import faults as damage
from benchmarks.guard.faults import (
    GuardBenchSettings,
    GuardLane,
    StaleAnchors,
    flip_bytes,
    guard_task,
    last_agent,
)
from kedge.anchors.anchor import PlaceholderSite
from kedge.anchors.calibration import Calibration
from kedge.anchors.sites import SiteOffsets
from kedge.bench.shapes import Loaded, load_model
from kedge.engine.local.build import EngineParts
from kedge.errors import PlanError
from kedge.settings import EngineSettings
from kedge.types import AgentId

FINAL, MATH = AgentId("final"), guard_task("math")
QUESTIONS = 5


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_model(None, EngineSettings())


@pytest.fixture
def lane(loaded: Loaded) -> Iterator[GuardLane]:
    """A team that has answered some questions."""
    with GuardLane(loaded, MATH.flow, GuardBenchSettings().engine()) as built:
        built.warm(list(islice(MATH.texts(0), QUESTIONS)))
        yield built


def stored(parts: EngineParts, agent: str | None = None) -> dict[object, Tensor]:
    """The offsets of one agent's sites, or of all, without the arenas' free rows."""
    pools = parts.learned[0].pools
    return {
        (key, site, number): table.arena[table.rows_of_anchors(offsets.holders)].clone()
        for key, pool in pools.items()
        for site, offsets in pool.sites.items()
        if agent is None or f"/{agent}/" in site.agent_key
        for number, table in enumerate(offsets.tables)
    }


def changed_by(lane: GuardLane, do: Callable[[EngineParts], object]) -> tuple[set[object], set[object]]:
    """The tables that differ after a damage, and those of the last agent."""
    before, own = lane.engine.query(stored), lane.engine.query(partial(stored, agent=FINAL))
    lane.engine.query(do)
    after = lane.engine.query(stored)
    lane.engine.query(lambda parts: parts.learned[0].check_integrity())
    return {key for key, rows in before.items() if not torch.equal(rows, after[key])}, set(own)


def test_heads_are_swapped_in_all_tables_of_the_agent_and_back(lane: GuardLane) -> None:
    swap = partial(damage.swap_heads, agent=FINAL, spec=lane.engine.kv_spec)
    before = lane.engine.query(stored)
    changed, own = changed_by(lane, swap)
    assert changed == own
    lane.engine.query(swap)
    assert all(torch.equal(rows, before[key]) for key, rows in lane.engine.query(stored).items())


@pytest.mark.parametrize("count", [1, 3])
def test_so_many_anchors_are_poisoned(lane: GuardLane, count: int) -> None:
    before = lane.engine.query(stored)
    changed, own = changed_by(lane, partial(damage.poison_anchors, agent=FINAL, count=count, loudness=3.0))
    assert changed <= own and 0 < len(changed) <= 2 * count, "the tables of so many sites at most"
    after = lane.engine.query(stored)
    poisoned = 0
    for key in changed:
        rows = (before[key] != after[key]).any(1).nonzero().flatten()
        poisoned += 1 + int((rows.diff() > 1).sum())
        largest = before[key].abs().max()
        assert len(rows) < len(before[key]) and after[key][rows].abs().max() > 2 * largest > 0
    assert poisoned <= 2 * count


def test_faults_meet_offsets_that_are_not_zero(lane: GuardLane) -> None:
    """Offsets of values that are moved without anchors are: whatever is done to these changes nothing."""
    found = lane.engine.query(partial(stored, agent=FINAL)).values()
    assert all(rows.any() for rows in found)


def test_what_is_not_there_cannot_be_damaged(lane: GuardLane) -> None:
    with pytest.raises(PlanError, match="nobody"):
        lane.engine.query(partial(damage.poison_anchors, agent=AgentId("nobody"), count=1, loudness=3.0))


def test_flipped_bytes_are_of_all_parts_of_a_number() -> None:
    numbers = torch.ones(4096, dtype=torch.float16)
    flip_bytes(numbers)
    wrong = numbers[numbers != 1]
    assert (wrong.abs() > 1.5).any() and ((wrong > 0.9) & (wrong < 1.5)).any(), "exponents and mantissas"


@pytest.fixture
def reworded(loaded: Loaded) -> Iterator[tuple[GuardLane, StaleAnchors]]:
    """A team whose last agent had another role before."""
    fault, questions = StaleAnchors(), list(islice(MATH.texts(0), QUESTIONS))
    with GuardLane(loaded, MATH.flow, GuardBenchSettings().engine()) as lane:
        fault.before(lane, questions)
        lane.warm(questions)
        yield lane, fault


Known = dict[tuple[object, PlaceholderSite], tuple[SiteOffsets, Calibration]]


def sites_of(parts: EngineParts) -> Known:
    """The offsets and calibrations of the last agent's sites in each pool."""
    found = damage.agent_sites(parts, FINAL)
    return {(id(pool), site): (pool.sites[site], pool.sites[site].calibration) for pool, site in found}


def test_an_earlier_wordings_offsets_take_the_place_of_the_later_ones(
    reworded: tuple[GuardLane, StaleAnchors],
) -> None:
    lane, fault = reworded
    before: Known = lane.engine.query(sites_of)
    assert fault.inject(lane) == last_agent(lane.flow) == FINAL
    after: Known = lane.engine.query(sites_of)
    moved = [key for key in before if before[key][0] is not after[key][0]]
    assert moved and len(moved) % 2 == 0, "they are exchanged in pairs"
    assert all(before[key][1] is after[key][1] for key in before), "that they are others goes unnoticed"
    lane.engine.query(lambda parts: parts.learned[0].check_integrity())


def test_a_rare_prompts_own_site_takes_no_part_in_it(reworded: tuple[GuardLane, StaleAnchors]) -> None:
    """With one, the sites were exchanged twice, and the agent was left with its few anchors."""
    lane, fault = reworded

    def add_rare(parts: EngineParts) -> None:
        for pool, site in damage.agent_sites(parts, FINAL):
            if site in fault._stale:
                rare = replace(site, agent_key=f"{site.agent_key}-rare")
                pool.sites[rare] = copy(pool.sites[site])
                pool.sites[rare].holders = []
                fault._stale.append(rare)

    lane.engine.query(add_rare)
    fault.inject(lane)
    after: Known = lane.engine.query(sites_of)
    assert all(offsets.holders for (_, site), (offsets, _) in after.items() if not site.agent_key.endswith("-rare"))
