"""Planned writes: the same pages, whether a translation was ready before its request came or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.anchors.anchor import AnchorId
from kedge.anchors.offsets import Blend, OffsetTable
from kedge.integrations.vllm.plugin.learner import PlannedWrite, PlannedWrites, translated
from kedge.integrations.vllm.plugin.messages import TranslationWrite
from kedge.kv.segment import KVSegment
from kedge.reuse.costs import EngineCosts
from kedge.reuse.plan import Translation
from kedge.types import AgentId, GenerateRequest, RequestId, Segment
from tests.integrations.vllm.plugin.test_pages import DIM, HEADS, LAYERS, layer_of, pages_of, side_by_side

TOKENS, START = 5, 3
REQUEST = GenerateRequest((Segment((1, 2), "p0"),), agent=AgentId("a"))
FIRST, SECOND = ([0, 1], [4, 2])
"""Blocks of the requests"""


class Site:
    """The offsets of one agent, base KV of one value, and pages."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = [layer_of(side_by_side) for _ in range(LAYERS)]
        self.pages, balances = pages_of(self.layers), SimpleNamespace()
        balances.save = balances.spend = lambda *_, **__: None
        self.base = KVSegment(*torch.randn(2, LAYERS, TOKENS, HEADS, DIM))
        self.table = OffsetTable((LAYERS - 1) * 2 * HEADS * DIM, torch.float16, torch.device("cpu"))
        self.table.put(AnchorId(0), torch.randn(20, self.table.width))
        fake: Any = balances
        self.writes = PlannedWrites(self.pages, EngineCosts(), fake)

    def plan(self, name: str, first: int = 0, start: int = START) -> None:
        """Plan a request that reads the value, by the rows of the table from `first` on."""
        rows = torch.arange(first, first + 2 * TOKENS).view(TOKENS, 2)
        item = Translation(start, self.base, Blend(rows, torch.full((TOKENS, 2), 0.5), self.table.version), self.table)
        plan: Any = SimpleNamespace(translations=(item,), teaches=False)
        self.writes.put(RequestId(name), PlannedWrite(REQUEST, plan, None, {}, 0.0))

    def write(self, name: str, blocks: list[int], start: int = START) -> None:
        self.writes.write(TranslationWrite(RequestId(name), tuple(blocks), (range(start, start + TOKENS),)))

    @property
    def kv(self) -> torch.Tensor:
        return torch.stack([layer.pages for layer in self.layers])


@pytest.fixture
def blends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every blend."""
    seen: list[int] = []
    blend = OffsetTable.blend
    monkeypatch.setattr(OffsetTable, "blend", lambda table, of: (seen.append(of.tokens), blend(table, of))[1])
    return seen


def alone(**plans: tuple[list[int], int, int]) -> torch.Tensor:
    """The pages after each of these requests was planned and written before the next one was planned."""
    site = Site()
    for name, (blocks, first, start) in plans.items():
        site.plan(name, first, start)
        site.write(name, blocks, start)
    return site.kv


def test_what_was_ready_before_a_request_came_is_not_translated_for_it(blends: list[int]) -> None:
    site = Site()
    site.plan("one")
    site.plan("two")
    two = site.writes._planned[RequestId("two")]
    ready = {START: translated(site.pages, two.plan.translations[0])}
    site.writes.put(RequestId("two"), PlannedWrite(REQUEST, two.plan, None, ready, 0.0))
    blends.clear()
    site.write("one", FIRST)
    site.write("two", SECOND)
    assert blends == [TOKENS]
    assert torch.equal(site.kv, alone(one=(FIRST, 0, START), two=(SECOND, 0, START)))
