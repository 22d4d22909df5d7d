"""Prompts that are assembled ahead of requests that come: not one token changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kedge.engine.base import Engine
from kedge.engine.local.engine import LocalEngine
from kedge.runner.run import run
from kedge.settings import PlannerConstants
from kedge.types import (
    RequestId,
    ReuseMode,
    Segment,
)
from kedge.workflow.graph import Agent, Workflow
from tests.engine.local.conftest import engine_of, tiny_model
from tests.engine.local.stage import (
    ANSWER,
    ASKED,
    PLANNER,
    QUESTION,
    TEMPLATE,
    Stage,
    outcome,
    pieces,
    prompt_of,
    taught,
)
from tests.engine.local.test_translation import tokens

# what a hint that comes true is worth -------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [ReuseMode.TRANSLATE, ReuseMode.EXACT])
def test_only_the_last_token_is_left_and_no_token_changes(reuse: ReuseMode) -> None:
    outcomes = []
    for ahead in (False, True):
        stage = taught()
        request = prompt_of("reader", ASKED, stage.answer, reuse)
        if ahead:
            stage.prepare(replace(request, request_id=RequestId("hint")))
        sequence = stage.submit(request)
        stage.step()
        assert sequence.first_token is not None or not ahead, "one step is all that was left"
        stage.rest()
        outcomes.append(outcome(sequence))
        assert sequence.preassembled == (request.prompt_tokens - 1 if ahead else 0)
        assert sequence.receipt().preassembled == sequence.preassembled
    assert outcomes[0] == outcomes[1]
    assert (sequence.receipt().translated > 0) == (reuse is ReuseMode.TRANSLATE)
    assert stage.told["used"] == 1
    assert stage.leased == 0


def test_a_prompt_grows_while_the_one_before_it_is_being_answered() -> None:
    stage = taught()
    writer = stage.submit(prompt_of("writer", ASKED, produces="agent_writer@0", max_tokens=ANSWER))
    expected = prompt_of("reader", ASKED, ())
    stage.core.prepare(expected)
    while writer.first_token is None:
        assert stage.told["begun"] == 0, "somebody waits for a first token"
        stage.step()
    while not writer.finish:
        stage.step()
    [one] = stage.core.parts.preassembly.expected.values()
    assert one.ready == TEMPLATE[0] + QUESTION + TEMPLATE[1], "all up to the answer"
    stage.rest()
    assert one.ready == one.request.prompt_tokens - 1, "the answer followed by itself"
    stage.learn()
    request = prompt_of("reader", ASKED, tuple(writer.response))
    sequence = stage.serve(request)
    assert sequence.preassembled == request.prompt_tokens - 1
    assert outcome(stage.fresh().serve(replace(request, request_id=RequestId("plain")))) == outcome(sequence)


@pytest.mark.parametrize("steps", range(1, 10))
def test_a_request_that_comes_early_takes_what_is_there(steps: int) -> None:
    """At whatever piece of the work it arrives, in both modes."""
    for reuse in (ReuseMode.TRANSLATE, ReuseMode.EXACT):
        outcomes = []
        for ahead in (False, True):
            stage = taught()
            request = prompt_of("reader", ASKED, stage.answer, reuse)
            if ahead:
                stage.core.prepare(request)
                for _ in range(steps):
                    stage.step()
            outcomes.append(outcome(stage.serve(request)))
        assert outcomes[0] == outcomes[1]


def test_a_value_that_is_not_shareable_makes_all_of_the_prompt_dense() -> None:
    """What was translated ahead before the answer was known must not be seen by anybody."""
    question, outcomes = ASKED, []
    for ahead in (False, True):
        stage = Stage()
        for at in range(3):
            stage.serve(prompt_of("writer", tokens(50 + at, QUESTION), run=f"past-{at}"))
            stage.serve(prompt_of("reader", tokens(50 + at, QUESTION), (), run=f"past-{at}"))
        stage.core.parts.cache.clear()
        answer = stage.write(question)
        request = prompt_of("reader", question, answer)
        if ahead:
            stage.prepare(pieces(request))
            [one] = stage.core.parts.preassembly.expected.values()
            assert one.translates, "so far it looked good"
        sequence = stage.serve(request)
        outcomes.append(outcome(sequence))
        assert not sequence.plan.translates
    assert outcomes[0] == outcomes[1]
    assert sequence.preassembled == sequence.receipt().exact


def test_an_answer_that_no_anchor_knows_may_be_moved_ahead() -> None:
    outcomes = []
    for ahead in (False, True):
        stage = Stage(planner=PLANNER.model_copy(update={"move": "unlearned"}))
        request = prompt_of("reader", ASKED, stage.write(ASKED))
        if ahead:
            stage.prepare(request)
        sequence = stage.serve(request)
        outcomes.append(outcome(sequence))
        assert sequence.plan.translates and sequence.plan.teaches
        assert (sequence.preassembled > 0) == ahead
    assert outcomes[0] == outcomes[1]


def test_a_prompt_of_which_too_little_could_be_translated_is_dense() -> None:
    outcomes, planner = [], PlannerConstants(by_cost=False, recompute_head=2, min_translated=0.99)
    for ahead in (False, True):
        stage = taught(planner=planner)
        request = prompt_of("reader", ASKED, stage.answer)
        if ahead:
            stage.prepare(pieces(request))
        sequence = stage.serve(request)
        outcomes.append(outcome(sequence))
    assert outcomes[0] == outcomes[1]
    assert "of the prompt could be translated" in sequence.receipt().misses[-1].reason


def test_a_dense_prompt_that_was_computed_ahead_is_learned_from() -> None:
    stage = Stage()
    stage.serve(prompt_of("reader", ASKED, tokens(71, ANSWER)))  # leaves the base KV of its template
    before = stage.core.parts.stats()["anchors"]["observed"]
    request = prompt_of("reader", ASKED, tokens(72, ANSWER))
    stage.prepare(request)
    sequence = stage.serve(request)
    assert sequence.preassembled == request.prompt_tokens - 1
    assert not sequence.plan.translates
    assert stage.core.parts.stats()["anchors"]["observed"] > before


# the engine with its thread -----------------------------------------------------------------------------------------


def test_hints_that_could_not_be_served_are_none() -> None:
    with engine_of(tiny_model("llama"), kv_memory="8 blocks") as engine:
        good = prompt_of("reader", ASKED, ())
        for bad in ((), (-1,), (10**9,), tokens(1, 8 * 16)):
            engine.prepare(replace(good, segments=(Segment(bad, "p0"),)))
        engine.wait_idle(60)
        assert engine.inspect()["preassembly"]["begun"] == 0
        engine.prepare(good)
        engine.wait_idle(60)
        assert engine.inspect()["preassembly"]["live"] == 1
        assert engine.cancel(good.request_id)
    engine.prepare(good)


class Told:
    """An engine that cannot prepare: what is asked of it is what the protocol asks for."""

    def __init__(self, inner: LocalEngine) -> None:
        self.tokenizer = inner.tokenizer
        self.submit, self.cancel, self.end_run = inner.submit, inner.cancel, inner.end_run
        self.forecast, self.close = inner.forecast, inner.close
        self.prepare = partial(Engine.prepare, self)  # does nothing


def test_while_a_tool_runs_the_next_agents_prompt_is_assembled() -> None:
    read = "Q {user_question} said {agent_a_current} and got {condition_a_current} so"
    asked, answers = {"user_question": "how many ships lie at anchor?"}, []
    for prepares in (False, True):
        with engine_of(tiny_model("llama")) as engine:

            def slowly(answer: str, inputs: Mapping[str, str], engine: LocalEngine = engine) -> str:  # noqa: ARG001
                engine.wait_idle(60)
                return answer.upper()

            first = Agent("a", "sys", "Q {user_question}", max_tokens=8, tool=slowly, tool_seconds=60)
            team = Workflow("tools", (first, Agent("b", "", read, max_tokens=8)))
            done = run(engine if prepares else Told(engine), team, asked)
            answers.append([said.completion.tokens for said in done.results])
            receipt = done.of("b").completion.receipt
            engine.wait_idle(60)
            told: Any = engine.inspect()
        assert (receipt.preassembled > receipt.prompt_tokens // 2) == prepares
        assert told["preassembly"]["used"] == prepares
        assert (told["preassembly"]["live"], told["cache"]["leased_blocks"]) == (0, 0)
    assert answers[0] == answers[1]
