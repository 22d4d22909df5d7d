"""Lessons: which requests wait until others of their agent have been learned from, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kedge.integrations.vllm.plugin import translations as module
from kedge.integrations.vllm.plugin.candidates import TranslationCandidate
from kedge.integrations.vllm.plugin.hints import HintedRequest
from kedge.integrations.vllm.plugin.messages import TranslationVerdict
from kedge.integrations.vllm.plugin.translations import MAX_LESSON_WAITS, Lessons
from kedge.types import AgentId, GenerateRequest, Namespace, RequestId, Segment, TenantId, Tokens

HERE = Namespace(TenantId("default"))


class Stage:
    """Requests of agents that need `wanted` lessons each."""

    def __init__(self, wanted: int = 2) -> None:
        self.hurried: list[tuple[Namespace, Tokens]] = []
        self.lessons = Lessons(lambda *base: self.hurried.append(base))
        self.wanted = wanted
        self._count = 0

    def candidate(self, agent: str = "a", needs: tuple[Tokens, ...] = (), missing: int | None = None) -> Any:
        self._count += 1
        request = GenerateRequest(
            (Segment((1, 2, 3), "q"),), agent=AgentId(agent), request_id=RequestId(f"r{self._count}")
        )
        held: Any = SimpleNamespace(request_id=request.request_id, num_prompt_tokens=3, num_preemptions=0)
        made = TranslationCandidate(HintedRequest(request), held, None)
        lacks = self.wanted if missing is None else missing
        made.take_verdict(TranslationVerdict((range(3),), needs=needs, is_lesson=True, lessons=lacks), 8)
        return made

    def admit(self, *candidates: Any) -> None:
        for one in candidates:
            self.lessons.admit(one)


def agent_of(candidate: Any) -> Any:
    return candidate.hinted.request.workflow_agent


def test_as_many_as_are_needed_go_on_and_the_others_wait() -> None:
    stage = Stage(wanted=2)
    first, second, third = (stage.candidate() for _ in range(3))
    assert not stage.lessons.must_wait(first)
    stage.admit(first)
    assert not stage.lessons.must_wait(second)
    stage.admit(second)
    assert stage.lessons.must_wait(third)
    assert stage.lessons.awaited == (agent_of(third),)


def test_agents_do_not_wait_for_one_another() -> None:
    stage = Stage(wanted=1)
    stage.admit(stage.candidate("a"))
    assert not stage.lessons.must_wait(stage.candidate("b"))


def test_a_request_that_needs_no_lesson_does_not_wait() -> None:
    stage = Stage(wanted=1)
    stage.admit(stage.candidate())
    assert not stage.lessons.must_wait(stage.candidate(missing=0))


def test_what_awaited_lessons_need_is_hurried_once() -> None:
    stage = Stage(wanted=1)
    stage.admit(stage.candidate(needs=((5, 6), (7,))))
    assert not stage.hurried, "nobody waits yet"
    waiting = stage.candidate()
    for _ in range(2):
        assert stage.lessons.must_wait(waiting)
    assert stage.hurried == [(HERE, (5, 6)), (HERE, (7,))]


def test_after_the_last_lesson_nobody_waits() -> None:
    stage = Stage(wanted=2)
    stage.admit(stage.candidate(), stage.candidate())
    waiting = stage.candidate()
    assert stage.lessons.must_wait(waiting)
    stage.lessons.taught(agent_of(waiting))
    assert stage.lessons.awaited
    stage.lessons.taught(agent_of(waiting))
    assert not stage.lessons.awaited and not stage.lessons.must_wait(waiting)


def test_another_takes_the_place_of_one_that_was_aborted() -> None:
    stage = Stage(wanted=1)
    aborted, waiting = stage.candidate(), stage.candidate()
    stage.admit(aborted)
    assert stage.lessons.must_wait(waiting)
    stage.lessons.drop(aborted)
    assert not stage.lessons.must_wait(waiting) and not stage.lessons.awaited


def test_a_lesson_that_has_its_prompt_outlives_its_request() -> None:
    stage = Stage(wanted=1)
    ended, waiting = stage.candidate(), stage.candidate()
    stage.admit(ended)
    ended.captured = True
    stage.lessons.drop(ended)
    assert stage.lessons.must_wait(waiting)


def test_a_preempted_lesson_counts_once() -> None:
    stage = Stage(wanted=2)
    preempted = stage.candidate()
    stage.admit(preempted, preempted)
    assert not stage.lessons.must_wait(stage.candidate())
    stage.wanted = 1
    assert not stage.lessons.must_wait(preempted), "it does not wait for itself"


def test_lessons_that_never_come_hold_nobody_up_twice() -> None:
    stage = Stage(wanted=1)
    stage.admit(stage.candidate())
    waiting = stage.candidate()
    assert [stage.lessons.must_wait(waiting) for _ in range(MAX_LESSON_WAITS + 1)] == [True] * MAX_LESSON_WAITS + [
        False
    ]
    assert not stage.lessons.awaited
    stage.admit(waiting)
    assert not stage.lessons.must_wait(stage.candidate())


class Crowds(RuleBasedStateMachine):
    """Requests of three agents come, wait, are admitted, learned from and aborted in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage(wanted=2)
        self.waiting: list[Any] = []
        self.running: list[Any] = []

    @rule(agent=st.sampled_from("abc"))
    def arrive(self, agent: str) -> None:
        self.waiting.append(self.stage.candidate(agent))

    @rule()
    def step(self) -> None:
        admitted = []
        for one in self.waiting:
            if not self.stage.lessons.must_wait(one):
                self.stage.admit(one)
                admitted.append(one)
        self.running += admitted
        self.waiting = [one for one in self.waiting if one not in admitted]

    @rule(agent=st.sampled_from("abc"))
    def teach(self, agent: str) -> None:
        self.stage.lessons.taught(agent_of(self.stage.candidate(agent)))

    @rule(captured=st.booleans(), last=st.booleans())
    def end(self, captured: bool, last: bool) -> None:
        if self.running:
            ended = self.running.pop(-1 if last else 0)
            ended.captured = captured
            self.stage.lessons.drop(ended)

    @invariant()
    def lessons_are_awaited_only_while_they_are_under_way(self) -> None:
        assert set(self.stage.lessons.awaited) <= set(self.stage.lessons._under_way)
        assert all(self.stage.lessons._under_way.values())

    @invariant()
    def everybody_goes_on_in_the_end(self) -> None:
        assert all(one.lesson_waits <= MAX_LESSON_WAITS + 1 for one in self.waiting)


TestCrowds = Crowds.TestCase


def test_only_so_many_agents_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_AGENTS", 3)
    stage = Stage(wanted=1)
    for agent in "abcde":
        stage.admit(stage.candidate(agent))
        assert stage.lessons.must_wait(stage.candidate(agent))
    assert [agent.agent for agent in stage.lessons.awaited] == ["c", "d", "e"]
