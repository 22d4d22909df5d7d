"""Prompts that are assembled for requests that do not come: they end, and no block is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kedge.types import (
    AgentId,
    ClientId,
    GenerateRequest,
    RequestId,
    ReuseMode,
    RunId,
    SampleId,
    Segment,
    TenantId,
    WorkflowId,
)
from kedge.workflow.steps import NextRun
from tests.engine.local.stage import (
    ANSWER,
    ASKED,
    QUESTION,
    RUN_KEY,
    TEMPLATE,
    Stage,
    outcome,
    pieces,
    prompt_of,
    taught,
)
from tests.engine.local.test_translation import tokens

# hints that do not come true ----------------------------------------------------------------------------------------


def other_question(request: GenerateRequest) -> GenerateRequest:
    return prompt_of("reader", tokens(99, QUESTION), request.segments[3].tokens)


def other_mode(request: GenerateRequest) -> GenerateRequest:
    return replace(request, reuse=ReuseMode.EXACT)


def other_wording(request: GenerateRequest) -> GenerateRequest:
    return replace(request, segments=(*request.segments[:-1], Segment(tokens(98, 7), "p2")))


def other_workflow(request: GenerateRequest) -> GenerateRequest:
    return replace(request, workflow=WorkflowId("another"))


def no_answer(request: GenerateRequest) -> GenerateRequest:
    return replace(request, segments=(*request.segments[:3], request.segments[4]))


def without_reuse(request: GenerateRequest) -> GenerateRequest:
    return replace(request, reuse=ReuseMode.OFF)


@pytest.mark.parametrize(
    "change", [other_question, other_mode, other_wording, other_workflow, no_answer, without_reuse]
)
def test_another_request_of_the_agent_throws_it_away(change: Callable[[GenerateRequest], GenerateRequest]) -> None:
    stage, outcomes = taught(), []
    request = prompt_of("reader", ASKED, stage.answer)
    for _ in range(3):  # until it teaches nothing new
        stage.fresh().serve(replace(change(request), request_id=RequestId("other")))
    stage.fresh()
    for ahead in (False, True):
        if ahead:
            stage.fresh().prepare(request)
        sequence = stage.serve(replace(change(request), request_id=RequestId("other")))
        outcomes.append(outcome(sequence))
        assert sequence.preassembled == 0
        stage.core.parts.cache.clear()
    assert outcomes[0] == outcomes[1]
    assert (stage.told["wasted"], stage.told["live"], stage.leased) == (1, 0, 0)


@pytest.mark.parametrize(
    "stranger",
    [
        {"agent": AgentId("writer")},
        {"run": RunId("another")},
        {"client": ClientId("another")},
        {"tenant": TenantId("another")},
    ],
)
def test_requests_of_others_neither_take_nor_end_it(stranger: dict[str, Any]) -> None:
    stage = taught()
    request = prompt_of("reader", ASKED, stage.answer)
    stage.prepare(request)
    sequence = stage.serve(replace(request, request_id=RequestId("stranger"), **stranger))
    assert (sequence.preassembled, stage.told["live"], stage.told["wasted"]) == (0, 1, 0)


def test_a_newer_hint_replaces_an_older_one_that_it_contradicts() -> None:
    stage = taught()
    first, second = (prompt_of("reader", tokens(seed, QUESTION), tokens(seed + 1, ANSWER)) for seed in (70, 80))
    stage.prepare(first)
    stage.prepare(second)
    assert (stage.told["wasted"], stage.told["live"]) == (1, 1)
    assert stage.serve(second).preassembled == second.prompt_tokens - 1


def test_a_hint_that_is_older_than_what_was_heard_changes_nothing() -> None:
    stage = taught()
    request = prompt_of("reader", ASKED, stage.answer)
    stage.prepare(request)
    stage.prepare(pieces(request))
    assert stage.serve(request).preassembled == request.prompt_tokens - 1


def test_exact_kv_under_another_value_is_never_taken_for_its_own() -> None:
    """The hint's exact prefix covers values that the request does not have, though nothing has been drafted yet."""
    stage = Stage()
    known = prompt_of("reader", ASKED, tokens(71, ANSWER), ReuseMode.EXACT)
    stage.serve(known)
    stage.core.prepare(replace(known, request_id=RequestId("hint")))
    assert stage.core.parts.preassembly.assemble(), "blocks only"
    other = prompt_of("reader", ASKED, tokens(90, ANSWER), ReuseMode.EXACT)
    stage.core.prepare(other)
    served = stage.serve(replace(other, request_id=RequestId("other")))
    assert tuple(served.response) == tuple(Stage().serve(other).response)


def test_where_the_cache_knows_more_exactly_that_is_taken() -> None:
    stage = taught()
    request = prompt_of("reader", ASKED, stage.answer)
    stage.prepare(request)
    stage.serve(prompt_of("reader", *(request.segments[at].tokens for at in (1, 3)), ReuseMode.EXACT, run="another"))
    sequence = stage.serve(request)
    assert sequence.receipt().exact > TEMPLATE[0] + QUESTION
    assert (sequence.preassembled, stage.told["wasted"]) == (0, 1)


def test_requests_without_reuse_or_agent_are_not_prepared() -> None:
    stage = Stage()
    request = prompt_of("reader", ASKED, ())
    stage.prepare(replace(request, reuse=ReuseMode.OFF))
    stage.prepare(replace(request, agent=AgentId("")))
    assert stage.told["begun"] == 0


def test_an_empty_answer_means_another_prompt() -> None:
    stage = taught()
    stage.prepare(prompt_of("reader", ASKED, ()))
    stage.core.parts.preassembly.answered(RUN_KEY, SampleId.parse("agent_writer@0"), ())
    stage.check()
    assert (stage.told["wasted"], stage.leased) == (1, 0)


def test_an_answer_that_makes_the_prompt_too_long_ends_it() -> None:
    stage = Stage(kv_memory="20 blocks")
    stage.prepare(prompt_of("reader", ASKED, ()))
    stage.core.parts.preassembly.answered(RUN_KEY, SampleId.parse("agent_writer@0"), tokens(71, 20 * 16))
    stage.check()
    assert (stage.told["wasted"], stage.leased) == (1, 0)


# ends ---------------------------------------------------------------------------------------------------------------


def by_run(stage: Stage, hint: GenerateRequest) -> None:
    stage.core.end_run(hint.run_key)


def by_cancel(stage: Stage, hint: GenerateRequest) -> None:
    assert stage.core.requests.cancel(hint.request_id)
    assert not stage.core.requests.cancel(hint.request_id)


def by_forecast(stage: Stage, hint: GenerateRequest) -> None:
    key = hint.agent_key
    stage.core.forecast({key: NextRun(1.0)}, {})
    assert stage.told["live"] == 1, "it is still near"
    stage.core.forecast({key: NextRun(2.0)}, {})


def by_forgetting(stage: Stage, hint: GenerateRequest) -> None:
    stage.core.forecast({hint.agent_key: None}, {})


def by_clear(stage: Stage, hint: GenerateRequest) -> None:  # noqa: ARG001
    stage.core.clear()


def by_close(stage: Stage, hint: GenerateRequest) -> None:  # noqa: ARG001
    stage.core.shut(None)


@pytest.mark.parametrize("end", [by_run, by_cancel, by_forecast, by_forgetting, by_clear, by_close])
@pytest.mark.parametrize("reuse", [ReuseMode.TRANSLATE, ReuseMode.EXACT])
def test_how_it_is_cancelled(end: Callable[[Stage, GenerateRequest], None], reuse: ReuseMode) -> None:
    stage = Stage()
    hint = prompt_of("reader", ASKED, tokens(71, ANSWER), reuse)
    stage.core.prepare(hint)
    for _ in range(3):
        stage.step()
    assert stage.leased > 0
    end(stage, hint)
    stage.check()
    assert (stage.told["cancelled"], stage.told["live"], stage.leased) == (1, 0, 0)
    assert not stage.core.parts.preassembly.pending


def test_a_request_that_is_cancelled_before_it_was_admitted_takes_its_preparation_along() -> None:
    stage = taught()
    request = prompt_of("reader", ASKED, tokens(71, ANSWER))
    stage.prepare(replace(request, request_id=RequestId("hint")))
    stage.submit(request)
    assert stage.core.requests.cancel(request.request_id)
    stage.check()
    assert (stage.told["cancelled"], stage.leased) == (1, 0)


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.reuse.ahead.MAX_PENDING", 4)
    stage = Stage(kv_memory="600 blocks")
    for at in range(4 + 3):
        stage.prepare(prompt_of(f"agent-{at}", ASKED, ()))
    assert (stage.told["live"], stage.told["cancelled"]) == (4, 3)
