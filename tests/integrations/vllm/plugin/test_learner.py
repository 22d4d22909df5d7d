"""What a rank looks for in a step: nothing, once it has found nothing and nothing has come since."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.guard import GuardOrders
from kedge.integrations.vllm.plugin.learner import (
    Learner,
    PlannedWrite,
    PlannedWrites,
)
from kedge.integrations.vllm.plugin.messages import Capture, TranslationQuery, TranslationWrite
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.kv.segment import KVSegment
from kedge.reuse.costs import EngineCosts
from kedge.structures.bounded import ENTRIES
from kedge.types import AgentId, GenerateRequest, RequestId, ReuseMode, RunId, SampleId, Segment, ValueKind

VALUE = Segment(tuple(range(10, 42)), "value", SampleId(ValueKind.INPUT, "value", 0, "v"), (1,), (2,))
SEGMENTS = Segment((1, 2, 3, 4), "p0"), VALUE, Segment((5, 6), "p1")
REQUEST = GenerateRequest(SEGMENTS, reuse=ReuseMode.TRANSLATE, run=RunId("r"), agent=AgentId("a"))


def kv(start: int, stop: int) -> KVSegment:
    return KVSegment(torch.ones(1, 1, stop - start, 2), torch.ones(1, 1, stop - start, 2))


@pytest.fixture
def learner() -> Learner:
    pages: Any = SimpleNamespace(
        rounding=0.0, kernel_slots=None, table=lambda blocks: blocks, read=lambda _, start, stop: kv(start, stop)
    )
    found = Learner(pages, PluginSettings(), EngineCosts(by_cost=False))
    found.rotation.trust()
    return found


def captured(learner: Learner, request: GenerateRequest) -> None:
    """Ask about a prompt, and capture it, as it says that it leaves something."""
    assert learner.judge(TranslationQuery(request, 0, has_waited=True)).teaches
    learner.capture(Capture(request, (1,), 0))


@pytest.fixture
def lacking(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what base KV the prompts lack. It gets an entry more with every look at a prompt."""
    lacks = ["first"]

    def needs(_: GenerateRequest) -> list[str]:
        found = lacks[:1]
        lacks.extend(["look"] if found else [])
        return found

    monkeypatch.setattr(learner._runtime, "needs", needs)
    return lacks


def test_a_prompt_without_its_base_kv_is_looked_at_once(learner: Learner, lacking: list[str]) -> None:
    assert not learner.is_learning and not learner.learn() and lacking == ["first"]
    captured(learner, REQUEST)
    assert not learner.learn() and lacking == ["first", "look"]
    for _ in range(3):
        assert not learner.learn() and not learner.is_learning
    assert lacking == ["first", "look"]


def test_it_is_learned_from_once_its_base_kv_has_come(learner: Learner, lacking: list[str]) -> None:
    captured(learner, REQUEST)
    assert not learner.learn()
    lacking.clear()
    assert not learner.learn(), "nothing has come"
    learner.capture(Capture(GenerateRequest((Segment((1, 2), "p0"),)), (1,), 1))
    assert learner.is_learning
    while learner.learn():
        pass
    assert not learner.is_learning


def test_a_prompt_that_a_check_translates_leaves_base_kv_and_teaches_nothing(learner: Learner) -> None:
    captured(learner, replace(REQUEST, guard=GuardOrders(left_out=True, held_out=True)))
    assert not learner._captured
    captured(learner, REQUEST)
    assert len(learner._captured) == 1


def test_an_expected_prompt_is_looked_at(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(learner._expected, "prepare", lambda: bool(seen.append(None)))
    assert not learner.learn() and not seen
    learner.expect(REQUEST)
    assert not learner.learn() and not learner.learn() and len(seen) == 1


# what counts in a workflow's balance ----------------------------------------------------------------------------------


class Spent(list[float]):
    """Stands for balances, and keeps what is spent."""

    def spend(self, _: GenerateRequest, device: float = 0.0, *, host: float = 0.0) -> None:
        self.append(device + host)

    def save(self, _: GenerateRequest, seconds: float) -> None:
        """What is saved is of no interest here."""


def test_asking_about_a_prompt_costs_a_small_pass(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = Spent()
    monkeypatch.setattr(learner._balances, "spend", spent.spend)
    learner.judge(TranslationQuery(REQUEST, 0))
    assert spent[0] == learner._costs.pass_seconds(1, 1) > 0


def test_a_translation_pays_for_the_rows_of_its_lanes() -> None:
    pages: Any = SimpleNamespace(table=lambda _blocks, only: only, kernel_slots=None)
    spent, costs, plan = Spent(), EngineCosts(), SimpleNamespace(translations=())
    balances: Any = spent
    writes = PlannedWrites(pages, costs, balances)
    spans = range(4, 6), range(8, 9), range(12, 30)
    for seconds, written in ((100.0, spans), (200.0, spans[:1])):
        planned: Any = PlannedWrite(REQUEST, plan, None, {}, seconds)  # type: ignore[arg-type]
        writes.put(REQUEST.request_id, planned)
        writes.write(TranslationWrite(REQUEST.request_id, (1,), written))
    assert spent == pytest.approx([100.0 + costs.added_seconds(0, 2), 200.0], rel=1e-4)
    assert costs.added_seconds(0, 2) > 0


# prompts that are captured although something in them is translated --------------------------------------------------


def planned(teaches: bool) -> PlannedWrite:
    plan: Any = SimpleNamespace(translations=())
    return PlannedWrite(REQUEST, plan, None, {}, 0.0, teaches)


@pytest.fixture
def writes() -> PlannedWrites:
    pages: Any = SimpleNamespace(table=lambda _blocks, only: only, kernel_slots=None)
    balances: Any = Spent()
    return PlannedWrites(pages, EngineCosts(), balances)


def test_the_plan_of_a_prompt_that_leaves_something_is_kept_until_it_is_captured(writes: PlannedWrites) -> None:
    writes.put(REQUEST.request_id, one := planned(teaches=True))
    assert writes.take_written(REQUEST.request_id) is None, "nothing is written yet"
    writes.write(TranslationWrite(REQUEST.request_id, (1,), (range(4, 6),)))
    assert not writes and writes.take_written(REQUEST.request_id) is one.plan
    assert writes.take_written(REQUEST.request_id) is None


def test_other_plans_are_not_kept(writes: PlannedWrites) -> None:
    writes.put(REQUEST.request_id, planned(teaches=False))
    writes.write(TranslationWrite(REQUEST.request_id, (1,), (range(4, 6),)))
    assert writes.take_written(REQUEST.request_id) is None


def test_a_verdict_that_is_withdrawn_takes_the_written_plan_along(writes: PlannedWrites) -> None:
    writes.put(REQUEST.request_id, planned(teaches=True))
    writes.write(TranslationWrite(REQUEST.request_id, (1,), (range(4, 6),)))
    writes.drop(REQUEST.request_id)
    assert writes.take_written(REQUEST.request_id) is None, "a prompt that is computed anew holds nothing translated"


def test_plans_whose_prompts_are_never_captured_are_forgotten(writes: PlannedWrites) -> None:
    for number in range(ENTRIES + 5):
        writes.put(name := RequestId(f"aborted-{number}"), planned(teaches=True))
        writes.write(TranslationWrite(name, (1,), (range(4, 6),)))
    assert len(writes._written) == ENTRIES
