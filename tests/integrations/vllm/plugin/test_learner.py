"""What a rank looks for in a step: nothing, once it has found nothing and nothing has come since."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.integrations.vllm.plugin.learner import Learner
from kedge.integrations.vllm.plugin.messages import Capture
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.kv.segment import KVSegment
from kedge.reuse.costs import EngineCosts
from kedge.types import AgentId, GenerateRequest, ReuseMode, RunId, SampleId, Segment, ValueKind

VALUE = Segment(tuple(range(10, 42)), "value", SampleId(ValueKind.INPUT, "value", 0, "v"), (1,), (2,))
SEGMENTS = Segment((1, 2, 3, 4), "p0"), VALUE, Segment((5, 6), "p1")
REQUEST = GenerateRequest(SEGMENTS, reuse=ReuseMode.TRANSLATE, run=RunId("r"), agent=AgentId("a"))


def kv(start: int, stop: int) -> KVSegment:
    return KVSegment(torch.ones(1, 1, stop - start, 2), torch.ones(1, 1, stop - start, 2))


@pytest.fixture
def learner() -> Learner:
    pages: Any = SimpleNamespace(table=lambda blocks: blocks, read=lambda _, start, stop: kv(start, stop))
    found = Learner(pages, PluginSettings(), None, EngineCosts(by_cost=False))
    found._refusal = None
    return found


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
    learner.capture(Capture(REQUEST, (1,), 0))
    assert not learner.learn() and lacking == ["first", "look"]
    for _ in range(3):
        assert not learner.learn() and not learner.is_learning
    assert lacking == ["first", "look"]


def test_it_is_learned_from_once_its_base_kv_has_come(learner: Learner, lacking: list[str]) -> None:
    learner.capture(Capture(REQUEST, (1,), 0))
    assert not learner.learn()
    lacking.clear()
    assert not learner.learn(), "nothing has come"
    learner.capture(Capture(GenerateRequest((Segment((1, 2), "p0"),)), (1,), 1))
    assert learner.is_learning
    while learner.learn():
        pass
    assert learner.take_taught() == (REQUEST.workflow_agent,) and not learner.is_learning


def test_an_expected_prompt_is_looked_at(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(learner._expected, "prepare", lambda: bool(seen.append(None)))
    assert not learner.learn() and not seen
    learner.expect(REQUEST)
    assert not learner.learn() and not learner.learn() and len(seen) == 1
