"""Prompts that are assembled ahead with little room and with faults: requests come first."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kedge.engine.local.scheduler import AHEAD_CHUNK
from kedge.engine.local.sequence import RequestSequence
from kedge.errors import TranslationRefused
from kedge.settings import TierSettings
from kedge.types import (
    AgentId,
    ClientId,
    GenerateRequest,
    RequestId,
    ReuseMode,
    SampleId,
    SamplingParams,
    Segment,
)
from kedge.workflow.forecast import AgentKey
from kedge.workflow.steps import NextRun
from tests.engine.local.stage import ANSWER, ASKED, QUESTION, RUN, RUN_KEY, SPACE, Stage, pieces, prompt_of, taught
from tests.engine.local.test_translation import tokens

# pressure -----------------------------------------------------------------------------------------------------------


def test_a_request_without_room_gets_the_blocks_of_what_nobody_asked_for() -> None:
    stage = Stage(kv_memory="16 blocks")
    stage.prepare(prompt_of("reader", ASKED, tokens(71, ANSWER), ReuseMode.EXACT))
    assert stage.leased == 7
    sequence = stage.serve(prompt_of("writer", tokens(80, 150), max_tokens=4))
    assert len(sequence.response) == 4
    assert (stage.told["given_back"], stage.leased) == (1, 0)


def test_a_request_may_need_the_blocks_that_another_one_has_claimed() -> None:
    """Where requests are served in the order of arrival."""
    stage = Stage(kv_memory="20 blocks", tiers=TierSettings(policy="steps"))
    claimed = prompt_of("reader", ASKED, tokens(71, ANSWER), ReuseMode.EXACT)
    stage.prepare(claimed)
    first = stage.submit(prompt_of("writer", tokens(80, 200), max_tokens=30))
    second = stage.submit(claimed)
    stage.rest()
    assert (len(first.response), len(second.response)) == (30, 6)
    assert (second.preassembled, stage.told["given_back"], stage.leased) == (0, 1, 0)
    assert tuple(second.response) == tuple(Stage().serve(replace(claimed, request_id=RequestId("x"))).response)


def test_without_room_it_waits_until_there_is_some() -> None:
    stage = Stage(kv_memory="20 blocks")
    running = stage.submit(prompt_of("writer", tokens(80, 200), max_tokens=40))
    while running.first_token is None:
        stage.step()
    stage.core.prepare(prompt_of("reader", ASKED, tokens(71, ANSWER), ReuseMode.EXACT))
    while not running.finish:
        stage.step()
        assert stage.told["begun"] == 0
    stage.rest()
    assert stage.told["live"] == 1


@pytest.mark.parametrize("answered", [False, True])
def test_only_what_is_needed_later_is_evicted_for_it(answered: bool) -> None:
    """Neither for its first blocks nor for those of an answer that comes later."""
    stage = Stage(kv_memory="12 blocks")
    near, fixed = AgentKey(SPACE, "client", RUN, AgentId("near")), tokens(5, 96)
    stage.core.forecast({near: NextRun(1.0)}, {})
    segments = (Segment(fixed, "p0"), Segment(tokens(6, 3), "x", SampleId.parse("x")))
    stage.serve(
        GenerateRequest(
            segments, SamplingParams(1), ReuseMode.EXACT, client=ClientId("client"), run=RUN, agent=near.agent
        )
    )
    expected = prompt_of("reader", ASKED, tokens(71, ANSWER), ReuseMode.EXACT)
    stage.prepare(pieces(expected) if answered else expected)
    if answered:
        stage.core.parts.preassembly.answered(RUN_KEY, SampleId.parse("agent_writer@0"), tokens(71, ANSWER))
        stage.rest()
    [one] = stage.core.parts.preassembly.expected.values()
    assert (one.admitted, one.drafts_on) == (answered, True)
    assert stage.core.parts.cache.status(SPACE, fixed).device_tokens == 96
    stage.core.forecast({near: NextRun(3.0)}, {})
    stage.core.parts.preassembly.wake()
    stage.rest()
    assert one.ready == expected.prompt_tokens - 1
    assert stage.core.parts.cache.status(SPACE, fixed).device_tokens < 96


def test_beside_decodes_only_what_repairs_a_translation_is_computed() -> None:
    stage = taught()
    stage.serve(prompt_of("writer", tokens(80, QUESTION)))  # so that nothing is left to be learned from it
    running = stage.submit(prompt_of("writer", tokens(80, QUESTION), max_tokens=60))
    while running.first_token is None:
        stage.step()
    dense = prompt_of("stranger", ASKED, tokens(71, ANSWER), ReuseMode.EXACT)
    stage.core.prepare(dense)
    while not running.finish:
        for work in stage.core.scheduler.schedule():
            assert work.sequence is running or len(work.positions) == 0
        stage.step()
    [one] = stage.core.parts.preassembly.expected.values()
    assert one.ready == 0
    while one.ready < one.request.prompt_tokens - 1:
        before = one.ready
        stage.step()
        assert one.ready - before <= AHEAD_CHUNK
    assert stage.serve(replace(dense, request_id=RequestId("x"))).preassembled == dense.prompt_tokens - 1


def test_a_demanded_load_without_room_gets_the_blocks() -> None:
    stage = Stage(kv_memory="12 blocks", tiers=TierSettings(host_memory="100 blocks", backup_hits=0))
    known = GenerateRequest((Segment(tokens(5, 150), "p0"),), SamplingParams(2, ignore_eos=True), ReuseMode.EXACT)
    stage.serve(known)
    stage.prepare(prompt_of("reader", ASKED, tokens(71, ANSWER), ReuseMode.EXACT))
    assert stage.told["live"] == 1
    again = stage.serve(replace(known, request_id=RequestId("again")))
    assert (stage.told["given_back"], stage.leased) == (1, 0)
    assert len(again.response) == 2


# faults -------------------------------------------------------------------------------------------------------------


def test_a_pass_that_fails_ends_it_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = taught()
    request = prompt_of("reader", ASKED, tokens(71, ANSWER), ReuseMode.EXACT)
    stage.core.prepare(replace(request, request_id=RequestId("hint")))
    with monkeypatch.context() as patch:
        patch.setattr(stage.core.parts.runner, "forward", _raising(RuntimeError("no memory")))
        stage.rest()
    assert (stage.told["failed"], stage.leased) == (1, 0)
    assert len(stage.serve(request).response) == 6


def test_a_translation_that_fails_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = taught()
    request = prompt_of("reader", ASKED, stage.answer)
    with monkeypatch.context() as patch:
        patch.setattr(
            stage.core.parts.preassembly, "_translate_into", _raising(TranslationRefused("offset", 1, "on purpose"))
        )
        stage.prepare(replace(request, request_id=RequestId("hint")))
    assert (stage.told["failed"], stage.leased) == (1, 0)
    assert stage.serve(request).receipt().translated > 0


def _raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("seed", range(6))
def test_random_hints_change_no_token(seed: int) -> None:
    """Hints in any order, right, wrong and half known, with little room: answers are those of dense prefill."""
    rng = random.Random(seed)
    stage = Stage(kv_memory="26 blocks", tiers=TierSettings(host_memory="30 blocks", backup_hits=0))
    plain = Stage(kv_memory="200 blocks")
    agents, questions, answers = ("a", "bb", "ccc"), (tokens(1, 30), tokens(2, 45)), (tokens(3, 12), tokens(4, 20), ())
    live: list[RequestSequence] = []
    for _ in range(60):
        request = prompt_of(rng.choice(agents), rng.choice(questions), rng.choice(answers), ReuseMode.EXACT)
        match rng.randrange(8):
            case 0 | 1 | 2:
                stage.core.prepare(request)
            case 3 | 4 if request.segments[3].tokens:
                live.append(stage.submit(request))
            case 5:
                stage.core.parts.preassembly.answered(RUN_KEY, SampleId.parse("agent_writer@0"), rng.choice(answers))
            case 6 if live:
                stage.core.requests.cancel(rng.choice(live).key)
        stage.check()
        for _ in range(rng.randrange(4)):
            stage.step()
    stage.rest()
    for sequence in live:
        expected = plain.serve(
            replace(sequence.request, request_id=RequestId(f"p-{sequence.key}"), reuse=ReuseMode.OFF)
        )
        assert sequence.response == expected.response[: len(sequence.response)]
    assert stage.told["begun"] > 5
    stage.core.end_run(RUN_KEY)
    stage.check()
    assert stage.leased == 0
