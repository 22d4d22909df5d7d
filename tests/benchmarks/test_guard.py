"""`kedge bench guard`: damage is what its name says, what counts as off, and the whole in the small."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.guard import (
    QUIET,
    TOKENS,
    GuardBenchSettings,
    GuardLane,
    MakeWrite,
    Served,
    at_another_base,
    from_corrupt_base,
    poison_anchors,
    swap_heads,
    with_swapped_heads,
    write_wrongly,
)
from kedge.anchors.offsets import empty_table, no_offsets
from kedge.anchors.translator import Translation, translate_into
from kedge.bench.shapes import Loaded, load_model
from kedge.engine.local.build import EngineParts
from kedge.engine.local.model.runner import ModelRunner
from kedge.errors import PlanError
from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.settings import EngineSettings
from kedge.types import GenerateRequest
from kedge.workloads.miniature import MATH, questions
from tests.cli.commands import measured

FINAL, QUESTIONS = "final", 5
START, WRITTEN = 5, 12


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_model(None, EngineSettings())


@pytest.fixture(scope="module")
def runner(loaded: Loaded) -> ModelRunner:
    return loaded[0]


@pytest.fixture
def lane(loaded: Loaded) -> Iterator[GuardLane]:
    """A team that has answered some questions, whose values are moved by anchors alone."""
    config = GuardBenchSettings().engine().model_copy(update={"planner": {"by_cost": False, "move": "never"}})
    with GuardLane(loaded, MATH.workflow(), EngineSettings.model_validate(config.model_dump())) as built:
        built.warm([one.text for one in islice(questions(0), QUESTIONS)])
        yield built


def stored(parts: EngineParts, agent: str | None = None) -> dict[object, Tensor]:
    """The offsets of one agent's sites, or of all, without the arenas' free rows."""
    pools = parts.anchors.pools
    return {
        (key, site, number): table.arena[table.rows_of_anchors(offsets.anchors)].clone()
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
    lane.engine.query(lambda parts: parts.anchors.check_integrity())
    return {key for key, rows in before.items() if not torch.equal(rows, after[key])}, set(own)


def test_heads_are_swapped_in_all_tables_of_the_agent_and_back(lane: GuardLane) -> None:
    swap = partial(swap_heads, agent=FINAL)
    before = lane.engine.query(stored)
    assert all(rows.any() for rows in lane.engine.query(partial(stored, agent=FINAL)).values()), "offsets to be damaged"
    changed, own = changed_by(lane, swap)
    assert changed == own
    lane.engine.query(swap)
    assert all(torch.equal(rows, before[key]) for key, rows in lane.engine.query(stored).items())


def test_anchors_of_the_agent_alone_are_poisoned(lane: GuardLane) -> None:
    changed, own = changed_by(lane, partial(poison_anchors, agent=FINAL, count=3))
    assert changed <= own and 0 < len(changed) <= 2 * 3, "the tables of so many sites at most"
    with pytest.raises(PlanError, match="nobody"):
        lane.engine.query(partial(poison_anchors, agent="nobody"))


def written(runner: ModelRunner, make: MakeWrite, agent: str) -> tuple[KVSegment, KVSegment]:
    """Base KV, and what is there after its translation for an agent where those of `final` are wrong."""
    storage = PagedStorage(runner.spec, 4, 16, runner.device, runner.rotary)
    table = SlotTable.of([2, 0], storage.block_size)
    made = torch.Generator().manual_seed(0)
    shape = (runner.spec.layers, WRITTEN, runner.spec.kv_heads, runner.spec.head_dim)
    base = KVSegment(torch.randn(shape, generator=made), torch.randn(shape, generator=made))
    kept = KVSegment(base.keys.clone(), base.values.clone())
    none = empty_table(base)
    parts: Any = SimpleNamespace(runner=runner, storage=storage, write=lambda _, *it: translate_into(storage)(*it))
    write_wrongly(parts, make, "final")
    request = GenerateRequest((), agent=agent)
    parts.write(request, table, [Translation(START, base, no_offsets(base.tokens), none)])
    assert torch.equal(base.keys, kept.keys) and torch.equal(base.values, kept.values), "others read it as well"
    slots = table.slots[START : START + WRITTEN]
    return base, KVSegment(storage.keys[:, slots], storage.values[:, slots])


def unrotated(runner: ModelRunner, keys: Tensor) -> Tensor:
    return runner.rotary.unrotate(keys, slice(START, START + WRITTEN))


def is_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("make", [at_another_base, with_swapped_heads, from_corrupt_base])
def test_other_agents_translations_are_right(runner: ModelRunner, make: MakeWrite) -> None:
    base, there = written(runner, make, "critic")
    assert torch.equal(there.values, base.values) and is_close(unrotated(runner, there.keys), base.keys)


def test_an_agents_translations_are_wrong_as_the_name_says(runner: ModelRunner) -> None:
    base, swapped = written(runner, with_swapped_heads, "final")
    assert torch.equal(swapped.values, base.values.flip(2)) and not torch.equal(swapped.values, base.values)
    assert is_close(unrotated(runner, swapped.keys), base.keys.flip(2))
    base, turned = written(runner, at_another_base, "final")
    assert torch.equal(turned.values, base.values)
    assert (unrotated(runner, turned.keys) - base.keys).abs().max() > 0.1
    base, corrupt = written(runner, from_corrupt_base, "final")
    wrong = (corrupt.values != base.values).float().mean()
    assert 0 < wrong < 0.1 and (corrupt.values - base.values).abs().max() > 1


def calls(*translated: int) -> list[Any]:
    return [SimpleNamespace(is_translated=bool(one)) for one in translated]


@pytest.mark.parametrize(
    ("before", "after", "is_off", "off_after"),
    [
        ((0, 5), [0] * QUIET, False, 0),
        ((5,), [5, 0, 5, *[0] * QUIET], False, 3),
        ((5,), [5, *[0] * (QUIET - 1)], False, None),
        ((0, 0), [0] * QUIET, False, None),
        ((5,), [5, 0], True, 2),
    ],
)
def test_an_agent_is_off_once_nothing_is_translated_for_long_if_it_ever_was(
    before: tuple[int, ...], after: list[int], is_off: bool, off_after: int | None
) -> None:
    assert Served(calls(*before), calls(*after), is_off=is_off).off_after() == off_after


def test_answers_are_short_and_no_question_comes_before_and_after_a_fault() -> None:
    settings = GuardBenchSettings()
    assert {agent.max_tokens for agent in settings.flow().agents} == {TOKENS}
    learned, later = (set(settings.questions(later=after)) for after in (False, True))
    assert len(learned) > 50 and len(later) > 50 and len(learned & later) <= 1, "XQuAD asks one question twice"
    drifted = set(settings.questions(task="gsm8k"))
    assert drifted and not drifted & later


def test_the_command_writes_what_it_shows(tmp_path: Path) -> None:
    sizes = {"model": "nano", "fault": "swapped_heads", "learned": 5, "limit": 2, "calls": 6, "clients": 1}
    options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    saved, shown = measured(tmp_path, "bench", "guard", *options, "--quick")
    assert "swapped_heads" in shown and "clean: 6 calls" in shown
    fault = saved["faults"]["swapped_heads"]
    assert 0 <= fault["changed_served"] <= 2 and 0 <= fault["lived"] <= 2 and fault["calls_before"] == 2
    assert saved["clean"].keys() == {"calls", "translated", "checks", "false_alarms", "ever_off"}
