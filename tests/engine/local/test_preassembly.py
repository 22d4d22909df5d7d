"""Prompts that are assembled ahead: not one token changes, and whatever a hint is worth, no block is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import pytest

from kedge.engine.common.detokenizer import TextStream
from kedge.engine.local import build
from kedge.engine.local.core import EngineCore
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.preassembly import MOST
from kedge.engine.local.sampler import Sampler
from kedge.engine.local.scheduler import AHEAD_CHUNK
from kedge.engine.local.sequence import LocalStream, RequestSequence
from kedge.errors import TranslationRefused
from kedge.runner.run import run
from kedge.settings import AnchorSettings, EngineSettings, PlannerSettings, TierSettings
from kedge.types import (
    AgentId,
    ClientId,
    GenerateRequest,
    Namespace,
    Receipt,
    RequestId,
    ReuseMode,
    RunId,
    RunKey,
    SampleId,
    SamplingParams,
    Segment,
    Source,
    TenantId,
    Tokens,
    WorkflowId,
)
from kedge.workflow import Agent, AgentKey, NextRun, Workflow
from tests.engine.local.conftest import engine_of, tiny_model, tiny_tokenizer
from tests.engine.local.test_translation import OPEN, tokens

TEMPLATE = (20, 9, 5)
"""Tokens of the prefix segments of every agent: before the question, before the answer, and the last."""
QUESTION, ANSWER = 40, 24
ASKED = tokens(70, QUESTION)
PLANNER = PlannerSettings(by_cost=False, recompute_head=2)
SPACE, RUN = Namespace(TenantId("default")), RunId("run")
RUN_KEY = RunKey(SPACE, ClientId("client"), RUN)
_ids = count()


def prompt_of(
    agent: str,
    question: Tokens,
    answer: Tokens | None = None,
    reuse: ReuseMode = ReuseMode.TRANSLATE,
    run: str = RUN,
    produces: str | None = None,
    **sampling: object,
) -> GenerateRequest:
    """An agent's prompt around a question and the writer's answer; `answer=()` is one that is yet to come."""
    seed = sum(agent.encode())
    around = {"lead_in": tokens(1, 3), "stand_in": tokens(2, 6)}
    p0, p1, p2 = (Segment(tokens(seed + i, size), f"p{i}") for i, size in enumerate(TEMPLATE))
    segments = [p0, Segment(question, "user_question", SampleId.parse("input_user_question@0"), **around), p1]
    if answer is not None:
        segments += [Segment(answer, "agent_writer_current", SampleId.parse("agent_writer@0"), **around), p2]
    return GenerateRequest(
        tuple(segments),
        SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **sampling}),  # type: ignore[arg-type]
        reuse,
        RequestId(f"request-{next(_ids)}"),
        run=RunId(run),
        client=ClientId("client"),
        workflow=WorkflowId("flow"),
        agent=AgentId(agent),
        produces=SampleId.parse(produces) if produces else None,
    )


class Stage:
    """The engine without its thread: a test takes its steps, and the books are checked after each."""

    def __init__(self, **settings: object) -> None:
        defaults = {"num_blocks": 128, "device": "cpu", "anchors": AnchorSettings(**OPEN), "planner": PLANNER}
        config = EngineSettings(**{**defaults, **settings})
        self.core: EngineCore
        self.core, _ = build.core(model(), config)
        self.answer: Tokens = ()
        """The writer's, to `ASKED`."""
        self._before: dict[str, int] = {}

    def submit(self, request: GenerateRequest) -> RequestSequence:
        sequence = RequestSequence(
            request.request_id, request.namespace, list(request.tokens), request=request,
            stream=LocalStream(request.request_id), sampler=Sampler(request.sampling),
            text=TextStream(tiny_tokenizer(), ()), max_tokens=request.sampling.max_tokens,
        )  # fmt: skip
        self.core.requests.submit(sequence)
        self.check()
        return sequence

    def step(self) -> None:
        self.core.step()
        self.check()

    def check(self) -> None:
        self.core.check_integrity()
        told = self.told
        assert told["begun"] == sum(told[name] for name in ("live", *ENDS))
        for one in self.core._preassembly._expected.values():
            assert one.todo == sorted(set(one.todo))
            assert one.plan is None or one.request.prompt_tokens - 1 not in one.todo, "that is the request's"

    def rest(self) -> None:
        """Runs until nothing is left but learning."""
        while not self.core.idle or self.core.transferring:
            self.step()

    def learn(self) -> None:
        while self.core.can_learn:
            self.core.learn()
            self.check()

    def serve(self, request: GenerateRequest) -> RequestSequence:
        """Serves a request to its end, then learns from it."""
        sequence = self.submit(request)
        self.rest()
        self.learn()
        return sequence

    def prepare(self, request: GenerateRequest) -> None:
        """Tells what is expected, and assembles it."""
        self.core.prepare(request)
        self.check()
        self.rest()

    def teach(self, *agents: str, questions: int = 3) -> None:
        """Enough dense prefills that everything is shareable from now on."""
        for at in range(questions):
            question = tokens(50 + at, QUESTION)
            answer = self.write(question, run=f"past-{at}")
            for agent in agents:
                self.serve(prompt_of(agent, question, answer, run=f"past-{at}"))
            self.core.end_run(RunKey(SPACE, "client", RunId(f"past-{at}")))
        self.core._cache.clear_all()

    def write(self, question: Tokens, run: str = RUN) -> Tokens:
        """The writer's answer to a question."""
        asked = prompt_of("writer", question, run=run, produces="agent_writer@0", max_tokens=ANSWER)
        return tuple(self.serve(asked).response)

    def fresh(self) -> Stage:
        """As it was when it had been taught: nothing is cached, expected or counted."""
        self.rest()
        self.core._preassembly.clear()
        self.core._cache.clear_all()
        self._before = {name: value for name, value in self._told.items() if name != "live"}
        return self

    @property
    def told(self) -> dict[str, int]:
        """Since it was last `fresh`."""
        return {name: value - self._before.get(name, 0) for name, value in self._told.items()}

    @property
    def _told(self) -> dict[str, int]:
        told: Any = self.core.inspection.stats()["preassembly"]
        return told

    @property
    def leased(self) -> int:
        told: Any = self.core.inspection.stats()["cache"]
        return told["leased_blocks"]


ENDS = ("used", "wasted", "given_back", "cancelled", "failed")


@cache
def model() -> ModelRunner:
    return checked_runner(tiny_model("llama"))


@cache
def _taught(planner: PlannerSettings) -> Stage:
    stage = Stage(planner=planner)
    stage.teach("reader")
    stage.answer = stage.write(ASKED)
    return stage


def taught(planner: PlannerSettings = PLANNER) -> Stage:
    """Translates what the reader is asked about `ASKED`, to which the writer's answer is known."""
    return _taught(planner).fresh()


def outcome(sequence: RequestSequence) -> tuple[object, ...]:
    """What must not depend on whether a prompt was assembled ahead."""
    receipt = sequence.receipt()
    return tuple(sequence.response), receipt.spans, receipt.misses


def pieces(request: GenerateRequest) -> GenerateRequest:
    """The request as it is known before the writer has answered."""
    segments = (
        replace(one, tokens=()) if one.sample == SampleId.parse("agent_writer@0") else one for one in request.segments
    )
    return replace(request, segments=tuple(segments), request_id=RequestId(f"hint-{next(_ids)}"))


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
    assert (stage.told["used"], stage.told["used_tokens"]) == (1, request.prompt_tokens - 1)
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
    [one] = stage.core._preassembly._expected.values()
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
        stage.core._cache.clear_all()
        answer = stage.write(question)
        request = prompt_of("reader", question, answer)
        if ahead:
            stage.prepare(pieces(request))
            [one] = stage.core._preassembly._expected.values()
            assert one.translates, "so far it looked good"
        sequence = stage.serve(request)
        outcomes.append(outcome(sequence))
        assert not sequence.plan.translates
    assert outcomes[0] == outcomes[1]
    assert sequence.preassembled == sequence.receipt().exact
    assert stage.told["wasted_tokens"] > 0


def test_a_prompt_of_which_too_little_could_be_translated_is_dense() -> None:
    outcomes, planner = [], PlannerSettings(by_cost=False, recompute_head=2, min_translated=0.99)
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
    before = stage.core.inspection.stats()["anchors"]["observed"]
    request = prompt_of("reader", ASKED, tokens(72, ANSWER))
    stage.prepare(request)
    sequence = stage.serve(request)
    assert sequence.preassembled == request.prompt_tokens - 1
    assert not sequence.plan.translates
    assert stage.core.inspection.stats()["anchors"]["observed"] > before


@pytest.mark.parametrize("tail", [False, True])
def test_with_the_last_segment_recomputed_only_its_last_token_is_left(tail: bool) -> None:
    stage = taught(planner=PlannerSettings(by_cost=False, recompute_head=2, recompute_tail=tail))
    request = prompt_of("reader", ASKED, stage.answer)
    stage.prepare(request)
    sequence = stage.submit(request)
    stage.rest()
    assert sequence.preassembled == request.prompt_tokens - 1
    last = [span for span in sequence.receipt().spans if span.source is Source.COMPUTED][-1]
    assert len(last) == (TEMPLATE[2] if tail else 1)


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
        stage.core._cache.clear_all()
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
    assert stage.core._preassembly.assemble(), "blocks only"
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
    stage.core._preassembly.answered(RUN_KEY, SampleId.parse("agent_writer@0"), ())
    stage.check()
    assert (stage.told["wasted"], stage.leased) == (1, 0)


def test_an_answer_that_makes_the_prompt_too_long_ends_it() -> None:
    stage = Stage(num_blocks=20)
    stage.prepare(prompt_of("reader", ASKED, ()))
    stage.core._preassembly.answered(RUN_KEY, SampleId.parse("agent_writer@0"), tokens(71, 20 * 16))
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
    assert not stage.core._preassembly.pending


def test_a_request_that_is_cancelled_before_it_was_admitted_takes_its_preparation_along() -> None:
    stage = taught()
    request = prompt_of("reader", ASKED, tokens(71, ANSWER))
    stage.prepare(replace(request, request_id=RequestId("hint")))
    stage.submit(request)
    assert stage.core.requests.cancel(request.request_id)
    stage.check()
    assert (stage.told["cancelled"], stage.leased) == (1, 0)


def test_only_so_many_are_kept() -> None:
    stage = Stage(num_blocks=600)
    for at in range(MOST + 3):
        stage.prepare(prompt_of(f"agent-{at}", ASKED, ()))
    assert (stage.told["live"], stage.told["cancelled"]) == (MOST, 3)


# pressure -----------------------------------------------------------------------------------------------------------


def test_a_request_without_room_gets_the_blocks_of_what_nobody_asked_for() -> None:
    stage = Stage(num_blocks=16)
    stage.prepare(prompt_of("reader", ASKED, tokens(71, ANSWER), ReuseMode.EXACT))
    assert stage.leased == 7
    sequence = stage.serve(prompt_of("writer", tokens(80, 150), max_tokens=4))
    assert len(sequence.response) == 4
    assert (stage.told["given_back"], stage.leased) == (1, 0)


def test_a_request_may_need_the_blocks_that_another_one_has_claimed() -> None:
    stage = Stage(num_blocks=20)
    claimed = prompt_of("reader", ASKED, tokens(71, ANSWER), ReuseMode.EXACT)
    stage.prepare(claimed)
    first = stage.submit(prompt_of("writer", tokens(80, 200), max_tokens=30))
    second = stage.submit(claimed)
    stage.rest()
    assert (len(first.response), len(second.response)) == (30, 6)
    assert (second.preassembled, stage.told["given_back"], stage.leased) == (0, 1, 0)
    assert tuple(second.response) == tuple(Stage().serve(replace(claimed, request_id=RequestId("x"))).response)


def test_without_room_it_waits_until_there_is_some() -> None:
    stage = Stage(num_blocks=20)
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
    stage = Stage(num_blocks=12)
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
        stage.core._preassembly.answered(RUN_KEY, SampleId.parse("agent_writer@0"), tokens(71, ANSWER))
        stage.rest()
    [one] = stage.core._preassembly._expected.values()
    assert (one.admitted, one.drafts_on) == (answered, True)
    assert stage.core._cache.match(SPACE, fixed).tokens_count == 96
    stage.core.forecast({near: NextRun(3.0)}, {})
    stage.core._preassembly.wake()
    stage.rest()
    assert one.ready == expected.prompt_tokens - 1
    assert stage.core._cache.match(SPACE, fixed).tokens_count < 96
    assert stage.core.inspection.stats()["cache"]["evictions_by_reason"].keys() == {"ahead"}  # type: ignore[index]


def test_beside_decodes_only_what_repairs_a_translation_is_computed() -> None:
    stage = taught()
    running = stage.submit(prompt_of("writer", tokens(80, QUESTION), max_tokens=60))
    while running.first_token is None:
        stage.step()
    dense = prompt_of("stranger", ASKED, tokens(71, ANSWER), ReuseMode.EXACT)
    stage.core.prepare(dense)
    while not running.finish:
        for work in stage.core.scheduler.schedule():
            assert work.sequence is running or len(work.positions) == 0
        stage.step()
    [one] = stage.core._preassembly._expected.values()
    assert one.ready == 0
    while one.ready < one.request.prompt_tokens - 1:
        before = one.ready
        stage.step()
        assert one.ready - before <= AHEAD_CHUNK
    assert stage.serve(replace(dense, request_id=RequestId("x"))).preassembled == dense.prompt_tokens - 1


def test_a_demanded_load_without_room_gets_the_blocks() -> None:
    stage = Stage(num_blocks=12, tiers=TierSettings(host_blocks=100, backup_hits=0))
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
        patch.setattr(stage.core._runner, "forward", _raising(RuntimeError("no memory")))
        stage.rest()
    assert (stage.told["failed"], stage.leased) == (1, 0)
    assert len(stage.serve(request).response) == 6


def test_a_translation_that_fails_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = taught()
    request = prompt_of("reader", ASKED, stage.answer)
    with monkeypatch.context() as patch:
        translator = stage.core._preassembly._writer._translator
        patch.setattr(translator, "write", _raising(TranslationRefused("offset", 1, "on purpose")))
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
    stage = Stage(num_blocks=26, tiers=TierSettings(host_blocks=30, backup_hits=0))
    plain = Stage(num_blocks=200)
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
                stage.core._preassembly.answered(RUN_KEY, SampleId.parse("agent_writer@0"), rng.choice(answers))
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


# the engine with its thread -----------------------------------------------------------------------------------------


def test_hints_that_could_not_be_served_are_none() -> None:
    with engine_of(tiny_model("llama"), num_blocks=8) as engine:
        good = prompt_of("reader", ASKED, ())
        for bad in ((), (-1,), (10**9,), tokens(1, 8 * 16)):
            engine.prepare(replace(good, segments=(Segment(bad, "p0"),)))
        engine.wait_idle(30)
        assert engine.inspect()["preassembly"]["begun"] == 0
        engine.prepare(good)
        engine.wait_idle(30)
        assert engine.inspect()["preassembly"]["live"] == 1
        assert engine.cancel(good.request_id)
    engine.prepare(good)


def test_the_receipt_says_what_was_ready() -> None:
    with engine_of(tiny_model("llama")) as engine:
        request = prompt_of("reader", ASKED, tokens(71, ANSWER), ReuseMode.EXACT)
        engine.prepare(request)
        engine.wait_idle(30)
        receipt: Receipt = engine.submit(replace(request, request_id=RequestId("x"))).result(30).receipt
        assert receipt.preassembled == request.prompt_tokens - 1
        assert receipt.computed == request.prompt_tokens
        assert all(ms >= 0 for ms in receipt.parts_ms.values())


# anchors and base KV on the host ------------------------------------------------------------------------------------


SMALL = {"max_bytes": 170_000, "host_bytes": 1 << 30, "max_base_bytes": 75_000, "host_base_bytes": 1 << 30}
"""Room on the device for what one agent's plan reads, and not for that of all three."""


def told_tiers(stage: Stage) -> tuple[dict[str, Any], dict[str, Any]]:
    told: Any = stage.core.inspection.stats()
    return told["anchors"]["tiers"], told["base_kv"]["tiers"]


def test_anchors_and_base_kv_behind_the_device_change_no_token() -> None:
    """The same workload with all on the device, and with hardly any room on it: only the place differs."""
    stages, outcomes = [], []
    for bounds in (
        {},
        SMALL,
    ):
        stage = Stage(anchors=AnchorSettings(**OPEN, **bounds))
        stage.teach("reader", "critic")
        stage.answer = stage.write(ASKED)
        served = []
        for agent in ("reader", "critic", "reader"):
            served.append(outcome(stage.fresh().serve(prompt_of(agent, ASKED, stage.answer))))
        stages.append(stage)
        outcomes.append(served)
    assert outcomes[0] == outcomes[1]
    assert all(any(span.source is Source.TRANSLATED for span in spans) for _, spans, _ in outcomes[1])
    for tier in told_tiers(stages[1]):
        assert tier["host_units"] > 0
        assert tier["demanded"] > 0
    for tier in told_tiers(stages[0]):
        assert (tier["host_bytes"], tier["offloaded"]) == (0, 0)


def test_the_anchors_of_who_runs_next_are_fetched_in_spare_time() -> None:
    stage = Stage(anchors=AnchorSettings(**OPEN, **{**SMALL, "max_bytes": 140_000}))
    stage.teach("reader", "critic")
    reader, critic, writer = (AgentKey(SPACE, "client", RUN, AgentId(name)) for name in ("reader", "critic", "writer"))
    before = told_tiers(stage)[0]["bytes_loaded"]
    for near, *far in ((reader, critic, writer), (critic, reader, writer), (reader, critic, writer)):
        stage.core.forecast({near: NextRun(1.0), **dict.fromkeys(far, NextRun(7.0))}, {})
        assert not stage.core.idle
        stage.rest()
        demanded = told_tiers(stage)[0]["demanded"]
        stage.fresh().serve(prompt_of(near.agent, tokens(51, QUESTION), tokens(71, ANSWER)))
        assert told_tiers(stage)[0]["demanded"] == demanded, "all that it needed was there"
    told = told_tiers(stage)[0]
    assert told["bytes_loaded"] > before
    assert told["completed"] > 0


class Told:
    """An engine that cannot prepare: what is asked of it is what the protocol asks for."""

    def __init__(self, inner: LocalEngine) -> None:
        self.tokenizer = inner.tokenizer
        self.submit, self.cancel, self.end_run = inner.submit, inner.cancel, inner.end_run
        self.forecast, self.close = inner.forecast, inner.close


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
            engine.wait_idle(30)
            told: Any = engine.inspect()
        assert (receipt.preassembled > receipt.prompt_tokens // 2) == prepares
        assert told["preassembly"]["used"] == prepares
        assert (told["preassembly"]["live"], told["cache"]["leased_blocks"]) == (0, 0)
    assert answers[0] == answers[1]
