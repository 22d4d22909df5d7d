"""Wrong writes: one agent's translated KV is other KV, in the way that the name says, and nobody else's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.guard.faults import MakeWrite, WrongWrites, at_another_base, from_corrupt_base, with_swapped_heads
from kedge.anchors.offsets import empty_table
from kedge.anchors.sites import no_offsets
from kedge.anchors.translator import Translation
from kedge.bench.shapes import load_model
from kedge.engine.local.model.runner import ModelRunner
from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.settings import EngineSettings
from kedge.types import AgentId

START, TOKENS = 5, 12


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return load_model(None, EngineSettings())[0]


def written(runner: ModelRunner, make: MakeWrite, agent: str) -> tuple[KVSegment, KVSegment]:
    """Base KV, and what is there after its translation for an agent where those of `final` are wrong."""
    storage = PagedStorage(runner.spec, 4, 16, runner.device, runner.rotary)
    table = SlotTable.of([2, 0], storage.block_size)
    made = torch.Generator().manual_seed(0)
    shape = (runner.spec.layers, TOKENS, runner.spec.kv_heads, runner.spec.head_dim)
    base = KVSegment(torch.randn(shape, generator=made), torch.randn(shape, generator=made))
    kept = KVSegment(base.keys.clone(), base.values.clone())
    none = empty_table(base)
    plan: Any = SimpleNamespace(translations=(Translation(START, base, no_offsets(base, none), none),))
    fault = WrongWrites(make, AgentId("final"))
    request: Any = SimpleNamespace(agent=AgentId(agent))
    assert fault(runner, storage).assemble(request, table, plan) is plan
    assert torch.equal(base.keys, kept.keys) and torch.equal(base.values, kept.values), "others read it as well"
    slots = table.slots[START : START + TOKENS]
    return base, KVSegment(storage.keys[:, slots], storage.values[:, slots])


@pytest.mark.parametrize("make", [at_another_base, with_swapped_heads, from_corrupt_base])
def test_other_agents_translations_are_right(runner: ModelRunner, make: MakeWrite) -> None:
    base, there = written(runner, make, "critic")
    assert torch.equal(there.values, base.values)
    assert torch.allclose(runner.rotary.unrotate(there.keys, slice(START, START + TOKENS)), base.keys, atol=1e-4)


def test_heads_are_in_reverse_order(runner: ModelRunner) -> None:
    base, there = written(runner, with_swapped_heads, "final")
    assert torch.equal(there.values, base.values.flip(2)) and not torch.equal(there.values, base.values)
    keys = runner.rotary.unrotate(there.keys, slice(START, START + TOKENS))
    assert torch.allclose(keys, base.keys.flip(2), atol=1e-4)


def test_keys_alone_are_rotated_otherwise(runner: ModelRunner) -> None:
    base, there = written(runner, at_another_base, "final")
    assert torch.equal(there.values, base.values)
    keys = runner.rotary.unrotate(there.keys, slice(START, START + TOKENS))
    assert not torch.allclose(keys, base.keys, atol=0.1)


def test_some_numbers_of_base_kv_are_others(runner: ModelRunner) -> None:
    base, there = written(runner, from_corrupt_base, "final")
    wrong = (there.values != base.values).float().mean()
    assert 0 < wrong < 0.1 and (there.values - base.values).abs().max() > 1
