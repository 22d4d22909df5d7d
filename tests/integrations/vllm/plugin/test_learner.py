"""What a rank looks for in a step: nothing, once it has found nothing and nothing has come since."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kedge.guard import GuardOrders
from kedge.integrations.vllm.plugin.learner import MAX_CAPTURED, Learner, PlannedWrite
from kedge.integrations.vllm.plugin.requests import Capture, TranslationQuery, TranslationWrite
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.kv.segment import KVSegment
from kedge.reuse.costs import EngineCosts
from kedge.reuse.plan import CHEAPER, ReusePlan
from kedge.structures.bounded import ENTRIES
from kedge.types import AgentId, GenerateRequest, Miss, RequestId, ReuseMode, RunId, SampleId, Segment, ValueKind

VALUE = Segment(tuple(range(10, 42)), "value", SampleId(ValueKind.INPUT, "value", 0, "v"), (1,), (2,))
SEGMENTS = Segment((1, 2, 3, 4), "p0"), VALUE, Segment((5, 6), "p1")
ROOM = 2 * sum(len(one.tokens) for one in SEGMENTS)
"""Tokens of prompts that may be learned from"""
REQUEST = GenerateRequest(SEGMENTS, reuse=ReuseMode.TRANSLATE, run=RunId("r"), agent=AgentId("a"))


def kv(start: int, stop: int) -> KVSegment:
    return KVSegment(torch.ones(1, stop - start, 1, 2), torch.ones(1, stop - start, 1, 2))


@pytest.fixture
def learner() -> Learner:
    parts = {"rounding": 0.0, "kernel_slots": None, "bytes_per_token": 16}
    pages: Any = SimpleNamespace(**parts, table=lambda blocks, **_: blocks, read=lambda _, *part: kv(*part))
    found = Learner(pages, PluginSettings(anchors={"max_base_bytes": 16 * ROOM}), EngineCosts(by_cost=False))
    found.rotation.trust()
    return found


def captured(learner: Learner, request: GenerateRequest) -> None:
    """Ask about a prompt, and capture it."""
    learner.judge(TranslationQuery(request, 0, has_waited=True))
    learner.capture(Capture(request, (1,), 0))


def test_a_prompt_without_its_base_kv_is_looked_at_once_until_something_comes(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, lacks = list[GenerateRequest](), ["base KV"]

    def needs(request: GenerateRequest) -> list[str]:
        looks.append(request)
        return lacks

    monkeypatch.setattr(learner._runtime, "needs", needs)
    assert not learner.is_learning and not learner.learn() and not looks
    captured(learner, REQUEST)
    for _ in range(3):
        assert not learner.learn() and not learner.is_learning and len(looks) == 1
    lacks.clear()
    assert not learner.learn(), "nothing has come"
    learner.capture(Capture(replace(REQUEST, reuse=ReuseMode.EXACT), (1,), 1))
    assert learner.is_learning
    while learner.learn():
        pass
    assert not learner.is_learning and not learner.captured


def test_a_prompt_that_a_check_translates_leaves_base_kv_and_teaches_nothing(learner: Learner) -> None:
    captured(learner, replace(REQUEST, guard=GuardOrders(held_out=True)))
    assert not learner.captured
    captured(learner, REQUEST)
    assert list(learner.captured) == [REQUEST]


def test_where_computing_is_cheaper_nothing_is_looked_up_or_read(learner: Learner) -> None:
    answered = replace(REQUEST, produces=SampleId(ValueKind.AGENT, "a"))
    learner._costs.observe_translation(1, 1, 9.0)
    for is_dear in (True, False):
        learner._costs.is_by_cost = is_dear
        verdict = learner.judge(TranslationQuery(REQUEST, 0, has_waited=True))
        learner.capture(Capture(REQUEST, (1,), 0))
        learner.capture(Capture(answered, (1,), 0, tuple(range(40)), 39))
        assert (verdict.misses == (Miss("*", CHEAPER),)) is learner.is_at_rest is is_dear


def test_prompts_to_learn_from_take_no_more_memory_than_base_kv(learner: Learner) -> None:
    others = [replace(REQUEST, request_id=RequestId(name)) for name in "abc"]
    for one in others:
        captured(learner, one)
    assert list(learner.captured) == others[1:]
    captured(learner, replace(REQUEST, segments=(*SEGMENTS, Segment((7,) * ROOM, "p2"))))
    assert list(learner.captured) == others[1:], "what has never room takes it from none"
    short = [SEGMENTS[0], replace(VALUE, tokens=VALUE.tokens[:5])]
    for number in range(2 * MAX_CAPTURED):
        captured(learner, replace(REQUEST, request_id=RequestId(f"short {number}"), segments=short))
    assert len(learner.captured) == MAX_CAPTURED, "steps look through all of them"


def test_while_a_write_is_planned_no_pass_is_waited_for(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured until then."""
    captured(learner, REQUEST)
    monkeypatch.setattr(learner._runtime, "needs", lambda _: [])
    assert learner.is_learning
    plan: Any = None
    learner.planned[REQUEST.request_id] = plan
    assert not learner.is_learning and not learner.learn()
    learner.drop(REQUEST.request_id)
    assert learner.is_learning and learner.learn()


def test_where_keys_are_rotated_otherwise_nothing_is_computed_for_others_or_kept(learner: Learner) -> None:
    answered = replace(REQUEST, produces=SampleId(ValueKind.AGENT, "a"))
    assert learner.judge(TranslationQuery(REQUEST, 0)).needs
    known = learner.bases.stats()
    learner.rotation.refusal = "its rotary embedding differs from Kedge's"
    assert not learner.judge(TranslationQuery(REQUEST, 0)).needs
    captured(learner, REQUEST)
    learner.capture(Capture(answered, (1,), 0, (7, 8), 1))
    assert not learner.captured and learner.bases.stats() == known
    assert learner.rotation.refusal, "another prompt does not show that they are not"


# prompts that are captured although something in them is translated --------------------------------------------------


def write(learner: Learner, name: RequestId = REQUEST.request_id, seconds: float = 0.0) -> ReusePlan:
    """Write a plan, and return it."""
    plan = ReusePlan.dense((), REQUEST.prompt_tokens)
    learner.planned[name] = PlannedWrite(plan, None, seconds)
    assert name not in learner._written, "nothing is written yet"
    learner.write(TranslationWrite(name, (1,), (range(4, 6),)))
    return plan


def test_a_translation_costs_what_is_kept_of_its_prompt_and_its_answer_too(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed = list[float]()
    monkeypatch.setattr(learner._costs, "observe_translation", lambda _segments, _tokens, taken: observed.append(taken))
    write(learner, seconds=100.0)
    assert not observed
    learner._answer_seconds = 50.0
    learner.capture(Capture(REQUEST, (1,), 0, is_translated=True))
    assert observed == pytest.approx([150.0], rel=1e-3)
    captured(learner, REQUEST)
    assert len(observed) == 1, "that one was computed"


@pytest.mark.parametrize("delays", [False, True])
def test_a_translation_costs_the_step_that_asking_takes(
    learner: Learner, monkeypatch: pytest.MonkeyPatch, delays: bool
) -> None:
    learner._costs.observe_pass(1, 1, 50.0)
    plan = SimpleNamespace(holes=(range(4), range(37, 38)), misses=(), translates=True, teaches=False)
    monkeypatch.setattr(learner._runtime, "plan", lambda *_: plan)
    learner.judge(TranslationQuery(REQUEST, 0, delays=delays))
    assert learner.planned[REQUEST.request_id].seconds // 40 == delays


def test_a_plan_is_kept_until_its_prompt_is_captured_or_its_verdict_withdrawn(learner: Learner) -> None:
    plan = write(learner)
    assert not learner.planned and learner._written[REQUEST.request_id].plan is plan
    learner.drop(REQUEST.request_id)
    assert not learner._written
    for number in range(ENTRIES + 5):
        write(learner, RequestId(f"aborted-{number}"))
    assert len(learner._written) == ENTRIES, "of prompts that are never captured"
